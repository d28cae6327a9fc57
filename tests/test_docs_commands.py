"""Every command that README and the documentation show is one that exists: its options, its files,
its make target, the JSON in it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.entrypoints.vllm_options import read_speculative_config
from draftsmith.train.cli import app
from tests.support.docs_commands import commands

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


CASES = sorted({(page.relative_to(ROOT).as_posix(), c) for page in PAGES for c in commands(page)})


def check_draftsmith(words: list[str]) -> None:
    commands: Any = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    commands[words[0]].make_context(words[0], words[1:])  # UsageError for an unknown option


def check_file(name: str) -> None:
    if name.startswith(("recipes/", "scripts/", "train/", "tests/")) and "*" not in name:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page, line", CASES)
def test_command_of_the_documentation_exists(page, line):
    words = shlex.split(line)
    words = [word for word in words if "=" not in word or word.startswith("-") or " " in word]
    words = [*itertools.takewhile(lambda word: word not in ("&", "&&"), words)]
    for word in words:
        check_file(word)
    program = Path(words[0]).name
    if program == "draftsmith":
        check_draftsmith(words[1:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in words[1:] if not word.startswith("-"))
    elif program == "accelerate":
        assert any(re.fullmatch(r"train/\w+\.py", word) for word in words)
    elif "-m" in words and words[words.index("-m") + 1].startswith("draftsmith"):
        assert importlib.util.find_spec(words[words.index("-m") + 1])
    elif words[:2] == ["vllm", "serve"] and "--speculative-config" in words:
        config = json.loads(words[words.index("--speculative-config") + 1])
        parse_speculative_config(read_speculative_config(config))


def test_documentation_shows_commands():
    assert len(CASES) > 60


def test_quickstart_has_a_line_for_every_command():
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    table = page.partition("## The commands")[2]
    commands: Any = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    assert [name for name in commands if f"`draftsmith {name}" not in table] == []
