"""The tables of docs/ are current, and name every field of config.json that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.docs_tables import SAMPLES, pages
from speculators.export.formats import LAYOUTS
from speculators.registry import build_config


@pytest.mark.parametrize(
    "page, text", pages().items(), ids=lambda value: getattr(value, "name", "")
)
def test_the_tables_of_the_docs_are_what_the_code_says(page: Path, text: str) -> None:
    assert page.read_text(encoding="utf-8") == text, "run: python scripts/docs_tables.py"


def flat(fields: dict[str, Any], prefix: str = "") -> set[str]:
    """Names of all fields, nested ones dotted; what is below `draftsmith` and rotary parameters is
    one field."""
    names: set[str] = set()
    for name, value in fields.items():
        whole = isinstance(value, dict) and name not in (
            "draftsmith",
            "rope_parameters",
            "rope_scaling",
        )
        names |= flat(value, f"{prefix}{name}.") if whole else {prefix + name}
    return names


@pytest.mark.parametrize("key", [key for key in LAYOUTS if key[1] in SAMPLES], ids="-".join)
def test_every_field_that_is_written_has_its_meaning(key) -> None:
    layout, (always, switched) = LAYOUTS[key], SAMPLES[key[1]]
    written: set[str] = set()
    for switches in [{}, *switched]:
        config = build_config("docs", key[1], **always | switches)
        fields = layout.to_config(config)
        fields["draftsmith"]["target"] = {"name_or_path": "T", "architectures": []}
        written |= flat(layout.dressed(fields))
    assert written == set(layout.meanings)
