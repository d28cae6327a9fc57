"""The commands that a page of the documentation shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

BLOCK = re.compile(r"^( *)```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The commands of a page's bash blocks, a line each, without comments."""
    lines = []
    for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        line = ""
        for part in block.replace("\\\n", " ").splitlines():
            line += f" {part}"
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quotation goes on in the next line
                continue
            lines += [shlex.join(words)] if words else []
            line = ""
    return lines
