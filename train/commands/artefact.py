"""`draftsmith inspect` and `draftsmith export`: an artefact looked at, and written. Registered by train/cli.py.

A few lines over speculators/export, and how it is shown; torch is imported when a command runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from speculators.errors import ConfigError

if TYPE_CHECKING:
    from speculators.export.inspection import Inspection
    from speculators.export.serving_commands import Way

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # of the Hub
WORDS = {  # what vLLM does of a fault, to people
    "refuses": "vLLM refuses it",
    "crashes": "vLLM loads it and crashes",
    "swallows": "vLLM does not notice",
    "harmless": "does not matter in vLLM",
}


def export(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run's folder, or the folder or repository id of a drafter.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; what it held is replaced.")],
    dtype: Annotated[
        str, typer.Option(help="auto: the recipe's or the drafter's; float32, bfloat16, float16.")
    ] = "auto",
    format: Annotated[str, typer.Option(help="vllm, speculators, sglang, transformers.")] = "vllm",
    model: Annotated[str, typer.Option(help="The target, where the drafter does not name it.")] = "",
    target_layers: Annotated[int | None, typer.Option(help="Its layers, where taps are not named.")] = None,
) -> None:
    """Write the best drafter of a run, finished or not, or any drafter once more, in a format that engines load."""
    from speculators.export import read_drafter_config, read_fields
    from speculators.export.convert import redress
    from train.pipeline.export_stage import DTYPES, reexport

    console = Console()
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    on_hub = not source.exists() and REPOSITORY.fullmatch(str(source))
    if (source / "config.json").is_file() or on_hub:
        told: dict[str, Any] = {"target": {"name_or_path": model}} if model else {}
        redress(source, out, format=format, dtype=dtype, provenance=told, num_target_layers=target_layers)
        console.print(f"{out}: {source} in the format {format}", highlight=False)
    else:
        _, step = reexport(source, out, dtype=dtype, format=format)
        console.print(f"{out}: the drafter of step {step}", highlight=False)
    _print_ways(console, _ways(read_drafter_config(out, target_layers), read_fields(out), str(out), model))


def inspect(
    drafter: Annotated[
        str, typer.Argument(metavar="DIR", help="Folder or repository id of a drafter, anybody's; or ngram, suffix.")
    ],
    model: Annotated[str, typer.Option(help="A target to check it against.")] = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    target_layers: Annotated[
        int | None, typer.Option(help="Layers of the target, for heads that do not say which they tap.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a drafter is, what is wrong with it, and whether vLLM would notice. Exit code 1: there are faults."""
    from speculators.export.inspection import inspect_folder
    from speculators.export.serving_commands import TRAINING_FREE, serving

    console = Console()
    if drafter in TRAINING_FREE and not Path(drafter).is_dir():
        ways = serving(drafter, target=model)
        if as_json:
            typer.echo(json.dumps({"method": drafter, "serving": [vars(way) for way in ways]}, indent=2))
        else:
            _print_ways(console, ways)
        return
    if drafter.endswith((".yaml", ".yml")):
        raise ConfigError(f"inspect: {drafter} is a recipe; give a drafter's folder, or look at its data with prepare")
    found = inspect_folder(drafter, _sketch(model), num_target_layers=target_layers)
    if as_json:
        typer.echo(json.dumps(_as_data(found, drafter, model), indent=2))
    else:
        _print(console, found, drafter, model, tensors)
    raise typer.Exit(0 if found.sound else 1)


def _sketch(model: str) -> Any:
    """The target's sizes from its config.json; None without a target."""
    from train.recipe.sections import TargetSection

    return TargetSection(model=model).sketch() if model else None


# --------------------------------------------------------------------------------------------- what they print


def _ways(config: Any, fields: Any, folder: str, model: str) -> list[Way]:
    from speculators.export.serving_commands import serving

    own = fields.get("draftsmith") or {}
    target = model or (own.get("target") or {}).get("name_or_path", "")
    format_ = "speculators" if "speculators_config" in fields else own.get("format", "vllm")
    tokens = own.get("num_speculative_tokens")
    return serving(config.family, folder=folder, target=target, tokens=tokens, config=config, format=format_)


def _facts(found: Inspection) -> dict[str, Any]:
    """What the folder is, as far as it can be told."""
    config, own = found.config, found.fields.get("draftsmith") or {}
    facts: dict[str, Any] = {
        "family": found.family,
        "format": found.layout.format if found.layout else None,
        "architectures": list(found.fields.get("architectures") or ()),
        "target": (own.get("target") or {}).get("name_or_path") or found.verifier,
        "chat_template": own.get("chat_template_sha256"),
        "chat_template_kwargs": own.get("chat_template_kwargs"),
    }
    if config is not None:
        facts |= {
            "head": config.describe(),
            "target_hidden_size": config.target_hidden_size,
            "target_layers": own.get("num_target_layers"),
            "taps": list(config.tap_layers),
            "vocabulary": config.vocab_size,
            "draft_vocabulary": config.draft_vocab_size,
        }
        if rope := getattr(config, "rope_parameters", None):
            facts |= {
                "rope_parameters": rope,
                "max_position_embeddings": getattr(config, "max_position_embeddings", None),
            }
    return facts | {"parameters": found.parameters, "dtype": ", ".join(found.dtypes)}


def _as_data(found: Inspection, drafter: str, model: str) -> dict[str, Any]:
    return {
        "folder": str(found.folder),
        "sound": found.sound,
        **_facts(found),
        "faults": [vars(each) for each in found.faults],
        "serving": []
        if found.config is None
        else [vars(way) for way in _ways(found.config, found.fields, drafter, model)],
        "tensors": {name: {"shape": list(h.shape), "dtype": h.dtype} for name, h in sorted(found.headers.items())},
    }


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False)


def _print(console: Console, found: Inspection, drafter: str, model: str, tensors: bool) -> None:
    table = _table("", "")
    table.show_header = False
    for name, value in _facts(found).items():
        if value not in (None, "", [], {}):
            told = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name.replace("_", " "), Text(told))
    console.print(table)
    if tensors:
        shapes = _table("tensor", "shape", "dtype")
        for name, header in sorted(found.headers.items()):
            shapes.add_row(Text(name), " x ".join(map(str, header.shape)), header.dtype)
        console.print(shapes)
    _print_faults(console, found)
    if found.config is not None:
        _print_ways(console, _ways(found.config, found.fields, drafter, model))
    if found.sound:
        console.print("every tensor is there and has its shape", style="green")


def _print_faults(console: Console, found: Inspection) -> None:
    if not found.faults:
        return
    table = _table("fault", "in vLLM", "what to do")
    for each in sorted(found.faults, key=lambda each: each.warning):
        told = Text(f"{each.kind}: ", style="yellow" if each.warning else "bold red").append(each.what, style="default")
        then = WORDS[each.vllm] + (f": {each.then}" if each.then else "")
        table.add_row(told, Text(then), Text(each.todo))
    console.print(table)


def _print_ways(console: Console, ways: list[Way]) -> None:
    for way in ways:
        console.print(Text(way.engine, style="bold"), Text(way.note, style="dim") if way.note else "")
        if way.command:
            console.print(Text(f"  {way.command}"), soft_wrap=True)
