"""`draftsmith inspect` and `draftsmith export`, over speculators/export. torch is imported when a
command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.hub import repository_id

if TYPE_CHECKING:
    from draftsmith.speculators.export.inspection import Inspection
    from draftsmith.speculators.export.serving_commands import ServingCommand

DTYPES = ("auto", "float32", "bfloat16", "float16")


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A run's folder, or the folder or id of a drafter.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; what it held is replaced.")
    ],
    dtype: Annotated[
        str, typer.Option(help="auto: the recipe's or the drafter's; float32, bfloat16, float16.")
    ] = "auto",
    format: Annotated[str, typer.Option(help="vllm, speculators, sglang, transformers.")] = "vllm",
    model: Annotated[
        str, typer.Option(help="The target, where the drafter does not name it.")
    ] = "",
    target_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the target, if the drafter does not name its taps."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="A target's folder: OUT is its copy with the MTP module of SOURCE."),
    ] = None,
) -> None:
    """Export the best checkpoint of a run, or convert a drafter to another format."""
    from draftsmith.speculators.export import read_drafter_config, read_fields
    from draftsmith.speculators.export.convert import convert, write_back
    from draftsmith.train.pipeline.export_stage import reexport

    if dtype not in DTYPES:
        raise ConfigError(f"expected one of {', '.join(DTYPES)}", where=f"--dtype {dtype}")
    console = Console()
    if into is not None:
        write_back(source, into, out)
        console.print(f"{out}: {into} with the module of {source}", highlight=False)
        return
    if (source / "config.json").is_file() or repository_id(str(source)):
        convert(
            source,
            out,
            format=format,
            dtype=dtype,
            provenance={"target": {"name_or_path": model}} if model else {},
            num_target_layers=target_layers,
        )
        console.print(f"{out}: {source} in the format {format}", highlight=False)
    else:
        _, step = reexport(source, out, dtype=dtype, format=format)
        console.print(f"{out}: the drafter of step {step}", highlight=False)
    config, fields = read_drafter_config(out, target_layers), read_fields(out)
    _print_commands(console, _commands(config, fields, str(out), model))


def inspect(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help=f"A drafter: folder or repository id; or {', '.join(TRAINING_FREE)}.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A target to check it against.")] = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    target_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the target, for heads that do not say which they tap."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a drafter, its faults, and the engines' reactions to each of them. Exit code 1: there
    are faults."""
    from draftsmith.speculators.export.inspection import inspect_folder
    from draftsmith.train.recipe.sections import TargetSection

    if drafter in TRAINING_FREE and not Path(drafter).is_dir():
        _inspect_method(drafter, model, as_json)
        return
    if drafter.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{drafter} is a recipe; give a drafter's folder, or look at its data with prepare",
            where="inspect",
        )
    result = inspect_folder(drafter, num_target_layers=target_layers)
    named = result.target_name or ""
    if held_to := model or (named if Path(named).is_dir() else ""):
        tokenizer = _tokenizer(held_to)
        result = inspect_folder(
            drafter,
            TargetSection(model=held_to).sketch(),
            num_target_layers=target_layers,
            tokenizer=tokenizer,
        )
        if tokenizer is None and hasattr(result.config, "mask_token_id"):
            text = "not held to texts, as the target's tokenizer could not be loaded"
            result.add("mask_token_id", text, warning=True)
    commands = []
    if result.config is not None:
        commands = _commands(result.config, result.fields, drafter, model)
    if as_json:
        typer.echo(json.dumps(_as_data(result, commands), indent=2))
    else:
        _print(Console(), result, commands, tensors)
    raise typer.Exit(0 if result.sound else 1)


def _inspect_method(method: str, model: str, as_json: bool) -> None:
    """How to serve a method that has no folder."""
    from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
    from draftsmith.speculators.export.serving_commands import serving

    options = parse_speculative_config({"method": method})
    commands = serving(method, target=model, training_free=options)
    if as_json:
        data = {"method": method, "serving": [vars(command) for command in commands]}
        typer.echo(json.dumps(data, indent=2))
    else:
        _print_commands(Console(), commands)


def _tokenizer(model: str) -> Any:
    """The target's, None where its folder has none."""
    from draftsmith.train.recipe.sections import TargetSection

    try:
        return TargetSection(model=model).load_tokenizer()
    except CheckpointError:
        return None


def _commands(config: Any, fields: Any, folder: str, model: str) -> list[ServingCommand]:
    from draftsmith.speculators.export.formats import format_of
    from draftsmith.speculators.export.serving_commands import serving

    own = fields.get("draftsmith") or {}
    target = model or (own.get("target") or {}).get("name_or_path", "")
    tokens, format_ = own.get("num_speculative_tokens"), format_of(fields)
    return serving(
        config.family,
        folder=folder,
        target=target,
        tokens=tokens,
        config=config,
        format=format_,
    )


def _facts(result: Inspection) -> dict[str, Any]:
    from draftsmith.speculators.export.formats import format_of

    config = result.config
    facts: dict[str, Any] = {
        "family": result.family,
        "format": format_of(result.fields) if result.layout else None,
        "architectures": list(result.fields.get("architectures") or ()),
        "target": result.target_name,
        "chat_template": result.own.get("chat_template_sha256"),
        "chat_template_kwargs": result.own.get("chat_template_kwargs"),
    }
    if config is not None:
        facts |= {
            "head": config.describe(),
            "target_hidden_size": config.target_hidden_size,
            "target_layers": result.own.get("num_target_layers"),
            "taps": list(config.tap_layers),
            "vocabulary": config.vocab_size,
            "draft_vocabulary": config.draft_vocab_size,
        }
        if getattr(config, "rope_parameters", None):
            facts |= {
                name: getattr(config, name, None)
                for name in ("rope_parameters", "max_position_embeddings")
            }
    return facts | {"parameters": result.parameters, "dtype": ", ".join(result.dtypes)}


def _as_data(result: Inspection, commands: list[ServingCommand]) -> dict[str, Any]:
    tensors = {
        name: {"shape": list(header.shape), "dtype": header.dtype}
        for name, header in sorted(result.headers.items())
    }
    return {
        "folder": str(result.folder),
        "sound": result.sound,
        **_facts(result),
        "faults": [vars(fault) for fault in result.faults],
        "serving": [vars(command) for command in commands],
        "tensors": tensors,
    }


def _print(
    console: Console, result: Inspection, commands: list[ServingCommand], tensors: bool
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", "", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in _facts(result).items():
        if value not in (None, "", [], {}):
            text = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name.replace("_", " "), Text(text))
    console.print(table)
    if tensors:
        table = Table("tensor", "shape", "dtype", box=SIMPLE_HEAD, pad_edge=False)
        for name, header in sorted(result.headers.items()):
            table.add_row(Text(name), " x ".join(map(str, header.shape)), header.dtype)
        console.print(table)
    if result.faults:
        table = Table("fault", "", "in engines", box=SIMPLE_HEAD, pad_edge=False)
        for fault in sorted(result.faults, key=lambda fault: fault.warning):
            where = Text(fault.where, style="yellow" if fault.warning else "bold red")
            table.add_row(where, Text(fault.text), Text(fault.engines))
        console.print(table)
    _print_commands(console, commands)
    if result.sound:
        console.print("every tensor is there and has its shape", style="green")


def _print_commands(console: Console, commands: list[ServingCommand]) -> None:
    for command in commands:
        note = Text(command.note, style="dim") if command.note else ""
        console.print(Text(command.engine, style="bold"), note)
        if command.command:
            console.print(Text(f"  {command.command}"), soft_wrap=True)
