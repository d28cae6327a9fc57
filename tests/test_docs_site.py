"""The documentation builds as a site without a warning: links, anchors, and every page in the
navigation."""

from __future__ import annotations

import logging
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.chromium import BINARY, Chromium

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    warnings = logging.Handler(logging.WARNING)
    warnings.records, warnings.emit = (
        [],
        lambda record: warnings.records.append(record.getMessage()),
    )
    logging.getLogger("mkdocs").addHandler(warnings)
    out = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out))
    config.plugins.run_event("startup", command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.run_event("shutdown")
        logging.getLogger("mkdocs").removeHandler(warnings)
    return out, warnings.records


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
    out, warnings = site
    assert not warnings
    reference = (out / "reference/api.html").read_text(encoding="utf-8")
    assert 'id="draftsmith.inference.entrypoints.llm.LLM.generate"' in reference


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no chromium or google-chrome on this machine")
def test_a_page_in_a_browser(site, tmp_path):
    handler = partial(SimpleHTTPRequestHandler, directory=site[0])
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Chromium(tmp_path)
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/quickstart.html")
        assert "make quickstart" in browser.evaluate("document.body.innerText")
        assert (
            browser.evaluate("document.querySelector('.md-nav').getBoundingClientRect().height") > 0
        )
        assert not browser.messages, browser.messages
    finally:
        browser.close()
        server.shutdown()


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
