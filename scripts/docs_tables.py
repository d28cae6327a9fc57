"""A hook of mkdocs: the reference tables of the documentation, made from the code when the site is
built.

A page names a table by `<!-- table: NAME -->` on a line of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from inference.evaluation.suites import DIR, SUITES
from inference.report.schema import SUMMARY_KEYS, AcceptanceReport
from speculators.export.formats import FORMATS, LAYOUTS

MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its tables; mkdocs calls it for every page. Raises KeyError for a table that
    nothing makes."""
    return MARK.sub(lambda match: "\n".join(["", *TABLES[match[1]](), ""]), markdown)


def _table(heads: str, rows: Any) -> list[str]:
    """Lines of a table whose first column is code."""
    rule = " | ".join("---" for _ in heads.split("|"))
    return [
        f"| {heads} |",
        f"| {rule} |",
        *(f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows),
    ]


# ------------------------------------------------------------------ docs/suites.md


def _suites() -> list[str]:
    rows = []
    for name, suite in SUITES.items():
        columns = (
            " or ".join(f"`{column}`" for column in suite.columns)
            or "the files of its members, in one folder"
        )
        category = (
            f"`{suite.category}`"
            if suite.category
            else "one per member"
            if suite.members
            else f"`{name}`"
        )
        rows.append((name, suite.title, columns, category, suite.compare))
    commands = [suite.fetch for suite in SUITES.values() if suite.fetch]
    table = _table("suite | what it is | turns of the user are in | category | compare with", rows)
    return [*table, "", "```bash", f"mkdir -p {DIR}", *commands, "```"]


# ------------------------------------------------------------------ docs/formats.md


def _formats() -> list[str]:
    families = {
        name: ", ".join(f"`{family}`" for format_, family in LAYOUTS if format_ == name)
        for name in FORMATS
    }
    return _table(
        "format | for | families", ((name, told, families[name]) for name, told in FORMATS.items())
    )


# ------------------------------------------------------------------ docs/acceptance-json.md


def _models() -> list[str]:
    """A table of fields for the file, and one for every model inside it."""
    schema, lines = AcceptanceReport.model_json_schema(mode="serialization"), list[str]()
    for name, model in {"The file": schema, **schema["$defs"]}.items():
        fields = (
            (field, _type(value), value["description"])
            for field, value in model["properties"].items()
        )
        about = " ".join(model["description"].split())
        lines += ["", f"### {name}", "", about, "", *_table("field | type | meaning", fields)]
    return lines[1:]


def _type(field: dict[str, Any]) -> str:
    """A field's type in JSON's words; a model's name links to its table."""
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f'`"{field["const"]}"`'
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object":
        values = field["additionalProperties"]
        return f"object of {_type(values) if isinstance(values, dict) else 'any'}"
    return field["type"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "formats": _formats,
    "summary": lambda: _table("key | meaning", SUMMARY_KEYS.items()),
    "fields": _models,
    "suites": _suites,
}
