"""A newcomer's folder, in which the commands of README and the tutorial run as they stand: the
files that the pages name, and in the Hub's cache the quickstart's target as Qwen3-8B."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

from typer.testing import CliRunner

from draftsmith.train.cli import app
from tests.support.docs_commands import commands

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
MODEL = "Qwen/Qwen3-8B"
TARGET = ROOT / "recipes" / "quickstart" / "target"
RUN_BY = {  # what runs the commands that begin so; the others are `own_commands`
    r"make (venv|quickstart|test)": ".ci/run",
    r"vllm serve |.* --engine vllm": "tests/vllm/test_readme_in_vllm.py",
    r"draftsmith bench": "tests/integration/test_readme.py, with servers of ours",
    r"pip install gguf|.* recipes/smollm2-135m-instruct/": "tests/real",
    r"draftsmith push": "tests/train/pipeline/test_push.py",
    r"export DRAFTSMITH_VLLM_PYTHON": "make test-vllm",
}


def own_commands(page: Path) -> list[str]:
    return [c for c in commands(page) if not any(re.match(known, c) for known in RUN_BY)]


def make_folder(folder: Path) -> None:
    with gzip.open(ROOT / "recipes" / "quickstart" / "data" / "test.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    # the answers to these are short
    chats = [{"messages": row["messages"]} for row in rows if row["workload"] == "json"]
    chats.sort(key=lambda chat: len(json.dumps(chat)))
    parts = {"my_chats": chats[:6], "my_held_out_chats": chats[6:7], "my_prompts": chats[7:8]}
    for name, rows in parts.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "train").symlink_to(ROOT / "train")


def environment(folder: Path, **others: str) -> dict[str, str]:
    """Of processes: no accelerator, and the Hub's cache of the fixture `hub_cache`."""
    path = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
    variables = {
        "HF_HUB_CACHE": str(folder / "hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "PATH": path + os.environ["PATH"],
    }
    return os.environ | variables | others


def run(command: str, folder: Path) -> str:
    """What a command prints; `draftsmith` runs in this process."""
    program, *words = shlex.split(command)
    if program == "draftsmith":
        result = CliRunner().invoke(app, words)
        code = result.exit_code
        output = result.output
        if code and result.exception is not None:
            output += "".join(traceback.format_exception(result.exception))
    else:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment(folder), capture_output=True, text=True
        )
        code = done.returncode
        output = done.stdout + done.stderr
    assert code == 0, f"{command}\n{output[-4000:]}"
    return output
