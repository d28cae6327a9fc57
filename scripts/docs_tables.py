"""A hook of mkdocs: pages and tables of the documentation that are made when the site is built.

`index.md` is README.md. The pages below `reference/` (recipe keys, acceptance.json, command line,
Python API) are read off the code. A page names a table by `<!-- table: NAME -->` on a line of its
own, a measured one, `docs/results/NAME.json`, by `<!-- result: NAME -->`, and a picture of one by
`<!-- picture: NAME -->`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs is started without it

from draftsmith.inference.evaluation.suites import DIR, SUITES
from draftsmith.inference.report.html import svg
from draftsmith.inference.report.schema import SUMMARY_KEYS, AcceptanceReport
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE, method_options
from draftsmith.speculators.export.formats import FORMATS, LAYOUTS, NATIVE
from draftsmith.speculators.export.serving_commands import vllm_method
from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.cli import app
from draftsmith.train.recipe.data_sections import PRESETS
from draftsmith.train.recipe.recipe import describe_schema
from draftsmith.train.recipe.schema import SchemaRow
from scripts.minutes_picture import pictures

VLLM_VERSIONS = ("0.32", "0.33")  # of the table of engines
ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- (table|result|picture): (\w+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made here to the site's files."""
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its tables and pictures; mkdocs calls it for every page. Raises KeyError for
    one that nothing makes."""

    def lines(match: re.Match[str]) -> str:
        kind, name = match.groups()
        parts = {"table": TABLES, "picture": PICTURES}.get(kind)
        return "\n".join(["", *(_result(name) if parts is None else parts[name]()), ""])

    return MARK.sub(lines, markdown)


def _result(name: str) -> list[str]:
    """A measured table with its date, commit, machine and command, as far as it was measured."""
    result = _measured(name)
    if not result:
        return [f"Not measured for this release; `python scripts/bench.py {name}` does."]
    rule = ["---", *["---:"] * (len(result["columns"]) - 1)]
    table = [f"| {' | '.join(cells)} |" for cells in (result["columns"], rule, *result["rows"])]
    origin = f"{result['date']}, commit {result['commit']}, {result['machine']}:"
    return [f"{result['title']}:", "", *table, "", origin, "", "```bash", result["command"], "```"]


def _measured(name: str) -> dict[str, Any]:
    """A result; empty if it was not measured."""
    file = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _table(heads: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table whose first column is code."""
    rule = " | ".join("---" for _ in heads.split("|"))
    lines = [f"| {heads} |", f"| {rule} |"]
    for name, *rest in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in rest)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------ pictures in pages


def _minutes() -> list[str]:
    """Acceptance of trainings against their minutes and tokens, by machine; nothing if none was
    measured."""
    results = _measured("minutes")
    if not results:
        return []
    drawn = [str(svg(figure)) for figure in pictures(results, _measured("peers_minutes"))]
    return ["\n\n".join(drawn)]  # each a paragraph


# ------------------------------------------------------------------ tables in pages


def _suites() -> list[str]:
    rows = (
        (name, suite.title, " or ".join(f"`{column}`" for column in suite.columns))
        for name, suite in SUITES.items()
    )
    table = _table("suite | what it is | turns of the user are in", rows)
    commands = [suite.fetch for suite in SUITES.values()]
    return [*table, "", "```bash", f"mkdir -p {DIR}", *commands, "```"]


def _formats() -> list[str]:
    rows = []
    for name, purpose in FORMATS.items():
        families = ", ".join(f"`{family}`" for format_, family in LAYOUTS if format_ == name)
        rows.append((name, purpose, families))
    return _table("format | for | families", rows)


def _engines() -> list[str]:
    """What serves each family, by the layouts; tests/vllm holds them to vLLM's own registry."""
    rows = []
    for family in (*FAMILIES, *TRAINING_FREE):
        layout: Any
        if (NATIVE, family) in LAYOUTS:
            layout = LAYOUTS[NATIVE, family].layout
            method = vllm_method(family)["method"] if layout.in_vllm else ""
            served = [bool(method) and not layout.dropped(version) for version in VLLM_VERSIONS]
        else:
            layout = method_options(family)
            method = (layout.vllm or {}).get("method", family) if layout.vllm is not None else ""
            served = [bool(method)] * len(VLLM_VERSIONS)
        rows.append(
            (
                family,
                f"`{method}`" if method else "",
                *("yes" if yes else "no" for yes in served),
                layout.sglang_algorithm or "",
                layout.vllm_note,
            )
        )
    versions = " | ".join(f"vLLM {version}" for version in VLLM_VERSIONS)
    return _table(f"family | method in vLLM | {versions} | algorithm in SGLang | remarks", rows)


def _presets() -> list[str]:
    rows = []
    for name, keys in PRESETS.items():
        rest = ", ".join(f"`{key}: {value}`" for key, value in keys.items() if key != "name")
        rows.append((name, keys["name"], rest))
    return _table("name | on the Hub | also stands for", rows)


# ------------------------------------------------------------------ pages


def _index() -> str:
    """README.md as a page of the site: links into docs/ lose that part, links to files outside the
    site become plain text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(
        r"\[([^\]]+)\]\((?!http|#)[\w/.-]*(?<!\.md)(?<!\.png)\)",
        r"\1",
        re.sub(r"\[([^\]]+)\]\((?:[A-Z]+\.md|recipes/README\.md|LICENSE)\)", r"\1", text),
    )


def _recipe() -> str:
    """Every key of a recipe; those of a family's drafter in a table of their own."""
    lines = [
        "# Recipe keys",
        "",
        "Keys of every recipe, with the defaults of `eagle3`. `draftsmith schema` prints them too.",
        "",
    ]
    head = "key | takes | default | meaning"
    rows = describe_schema("eagle3")
    lines += _table(head, map(_key, (r for r in rows if not r.name.startswith("drafter."))))
    for family in FAMILIES:
        of_family = (row for row in describe_schema(family) if row.name.startswith("drafter."))
        lines += ["", f"## drafter, {family}", "", *_table(head, map(_key, of_family))]
    return "\n".join(lines)


def _key(row: SchemaRow) -> tuple[str, str, str, str]:
    takes = re.sub(r"matching (\S+)", r"matching `\1`", row.type)
    return row.name, takes, f"`{row.default}`" if row.default else "", row.description


def _acceptance() -> str:
    """The fields of acceptance.json: a table for the file, and one for every model inside it."""
    schema = AcceptanceReport.model_json_schema(mode="serialization")
    lines = [
        "# acceptance.json",
        "",
        "The report as data; [Evaluate](../evaluate.md) defines its numbers. Load it with",
        "`draftsmith.inference.report.schema.load_report(path)`. Fields are only added within one",
        "major version of the layout. What was not measured is null.",
    ]
    for name, model in {"The file": schema, **schema["$defs"]}.items():
        fields = (
            (field, _type(value), value["description"])
            for field, value in model["properties"].items()
        )
        about = " ".join(model["description"].split())
        lines += ["", f"## {name}", "", about, "", *_table("field | type | meaning", fields)]
    return "\n".join(lines)


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


def _commands() -> str:
    """The help of every command, as the terminal prints it at 100 columns."""
    group = typer.main.get_command(app)
    context = click.Context(
        group, info_name="draftsmith", max_content_width=100, terminal_width=100
    )
    lines = ["# Command line", ""]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = click.Context(command, info_name=name, parent=context, terminal_width=100)
        lines += [f"## draftsmith {name}", "", "```text", command.get_help(inner), "```", ""]
    return "\n".join(lines)


def _api() -> str:
    """Docstrings of the public classes and functions, by mkdocstrings."""
    lines = ["# Python"]
    for title, names in API.items():
        lines += ["", f"## {title}", ""]
        for name in names:
            lines.append(f"::: {name}")
            if name == LLM:
                lines.append("    options: {inherited_members: true}")
            lines.append("")
    return "\n".join(lines)


LLM = "draftsmith.inference.entrypoints.llm.LLM"
API = {
    "Inference": (
        LLM,
        "draftsmith.inference.sampling_params.SamplingParams",
        "draftsmith.inference.outputs.RequestOutput",
        "draftsmith.inference.outputs.CompletionOutput",
        "draftsmith.inference.evaluation.evaluate.evaluate",
        "draftsmith.inference.report.schema.load_report",
    ),
    "Training": (
        "draftsmith.train.recipe.load.load_recipe",
        "draftsmith.train.pipeline.run.run",
        "draftsmith.train.losses.objective.chunked_objective",
        "draftsmith.train.losses.divergences",
    ),
    "Drafters and targets": (
        "draftsmith.speculators.drafter.Drafter",
        "draftsmith.speculators.drafter.DraftStep",
        "draftsmith.speculators.drafter.DraftInput",
        "draftsmith.speculators.target.target_head.TargetHead",
        "draftsmith.speculators.target.frozen_target.FrozenTarget",
        "draftsmith.speculators.target.frozen_target.TargetFeatures",
        "draftsmith.speculators.export.export_drafter",
        "draftsmith.speculators.export.load_drafter",
        "draftsmith.speculators.export.inspection.inspect_folder",
    ),
}
PAGES: dict[str, Callable[[], str]] = {
    "index.md": _index,
    "reference/recipe.md": _recipe,
    "reference/acceptance-json.md": _acceptance,
    "reference/cli.md": _commands,
    "reference/api.md": _api,
}
PICTURES: dict[str, Callable[[], list[str]]] = {"minutes": _minutes}
TABLES: dict[str, Callable[[], list[str]]] = {
    "engines": _engines,
    "formats": _formats,
    "presets": _presets,
    "suites": _suites,
    "summary": lambda: _table("key | meaning", SUMMARY_KEYS.items()),
}
