"""The documentation builds as a site without a warning: links, anchors, and every page in the
navigation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    """By the command of `make docs`, which is in no checkout's path."""
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference/api.html").read_text(encoding="utf-8")
    assert 'id="draftsmith.inference.entrypoints.llm.LLM.generate"' in reference


def test_files_that_the_pages_name_exist():
    named = re.compile(
        r"`((?:tests|scripts|recipes|train|inference|speculators)/[\w./-]+\.(?:py|yaml|json))`"
    )
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    missing = {
        f"{page.name}: {name}"
        for page in pages
        if page.name != "CHANGELOG.md"
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert not missing


def test_links_of_the_pages_outside_the_site_lead_somewhere():
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for link in re.findall(
            r"\]\(((?!http|#)[^)#]+)", (ROOT / page).read_text(encoding="utf-8")
        ):
            assert (ROOT / link).exists(), f"{page}: {link}"
