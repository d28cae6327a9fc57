"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new --window-size=1200,1000 --no-sandbox --disable-gpu --disable-dev-shm-usage"
    " --no-first-run --disable-background-networking --disable-component-update"
    " --disable-extensions --remote-debugging-pipe"
).split()
MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Chromium:
    """One page. `messages`: what it wrote to its console, errors included."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", shell, "chromium", BINARY, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self.messages = 0, b"", []
        self._session: dict[str, str] = {}
        targets = self.send("Target.getTargets")["targetInfos"]
        (page,) = (target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._read, 1 << 16)
                assert read, "Chromium has gone"
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if message.get("method") in MESSAGES:
                self.messages.append(json.dumps(message["params"]))

    def evaluate(self, expression: str) -> Any:
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Until it is truthy."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never came true: {expression}; {self.messages}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.messages.clear()
        self.send("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def picture(self, path: Path) -> None:
        picture = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
