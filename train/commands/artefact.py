"""`draftsmith inspect` and `draftsmith export`, over speculators/export. torch is imported when a
command runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from inference.spec_decode.proposers.methods import TRAINING_FREE
from speculators.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from speculators.export.inspection import Inspection
    from speculators.export.serving_commands import Way

DTYPES = ("auto", "float32", "bfloat16", "float16")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # of the Hub
WORDS = {  # an engine's reaction to a fault
    "refuses": "{} refuses it",
    "crashes": "{} loads it and crashes",
    "swallows": "{} does not notice",
    "harmless": "does not matter in {}",
}


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A run's folder, or the folder or id of a drafter or its adapter.",
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
        int | None, typer.Option(help="Its layers, where taps are not named.")
    ] = None,
) -> None:
    """Write the best drafter of a run, finished or not, or any drafter once more, in a format that
    engines load."""
    from speculators.export import read_drafter_config, read_fields
    from speculators.export.convert import redress
    from train.pipeline.export_stage import reexport

    console = Console()
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    on_hub = not source.exists() and REPOSITORY.fullmatch(str(source))
    if any((source / name).is_file() for name in ("config.json", "adapter_config.json")) or on_hub:
        target: dict[str, Any] = {"target": {"name_or_path": model}} if model else {}
        redress(
            source,
            out,
            format=format,
            dtype=dtype,
            provenance=target,
            num_target_layers=target_layers,
        )
        console.print(f"{out}: {source} in the format {format}", highlight=False)
    else:
        _, step = reexport(source, out, dtype=dtype, format=format)
        console.print(f"{out}: the drafter of step {step}", highlight=False)
    _print_ways(
        console, _ways(read_drafter_config(out, target_layers), read_fields(out), str(out), model)
    )


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
    from inference.entrypoints.speculative_config import parse_speculative_config
    from speculators.export.inspection import inspect_folder
    from speculators.export.serving_commands import serving
    from train.recipe.sections import TargetSection

    console = Console()
    if drafter in TRAINING_FREE and not Path(drafter).is_dir():
        options = parse_speculative_config({"method": drafter})
        ways = serving(drafter, target=model, training_free=options)
        if as_json:
            typer.echo(
                json.dumps({"method": drafter, "serving": [vars(way) for way in ways]}, indent=2)
            )
        else:
            _print_ways(console, ways)
        return
    if drafter.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"inspect: {drafter} is a recipe; give a drafter's folder, or look at its data with"
            " prepare"
        )
    target = TargetSection(model=model).sketch() if model else None
    tokenizer = _tokenizer(model) if model else None
    result = inspect_folder(drafter, target, num_target_layers=target_layers, tokenizer=tokenizer)
    if (
        model
        and tokenizer is None
        and (mask := getattr(result.config, "mask_token_id", None)) is not None
    ):
        result.add("mask_token_unchecked", f"mask_token_id is {mask}")
    if as_json:
        typer.echo(json.dumps(_as_data(result, drafter, model), indent=2))
    else:
        _print(console, result, drafter, model, tensors)
    raise typer.Exit(0 if result.sound else 1)


def _tokenizer(model: str) -> Any:
    """The target's, None where its folder has none."""
    from train.recipe.sections import TargetSection

    try:
        return TargetSection(model=model).load_tokenizer()
    except CheckpointError:
        return None


def _ways(config: Any, fields: Any, folder: str, model: str) -> list[Way]:
    from speculators.export.serving_commands import serving

    own = fields.get("draftsmith") or {}
    target = model or (own.get("target") or {}).get("name_or_path", "")
    format_ = "speculators" if "speculators_config" in fields else own.get("format", "vllm")
    tokens = own.get("num_speculative_tokens")
    return serving(
        config.family, folder=folder, target=target, tokens=tokens, config=config, format=format_
    )


def _facts(result: Inspection) -> dict[str, Any]:
    config = result.config
    facts: dict[str, Any] = {
        "family": result.family,
        "format": result.layout.format if result.layout else None,
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


def _as_data(result: Inspection, drafter: str, model: str) -> dict[str, Any]:
    ways = [] if result.config is None else _ways(result.config, result.fields, drafter, model)
    return {
        "folder": str(result.folder),
        "sound": result.sound,
        **_facts(result),
        "faults": [vars(fault) for fault in result.faults],
        "serving": [vars(way) for way in ways],
        "tensors": {
            name: {"shape": list(h.shape), "dtype": h.dtype}
            for name, h in sorted(result.headers.items())
        },
    }


def _print(console: Console, result: Inspection, drafter: str, model: str, tensors: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", "", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in _facts(result).items():
        if value not in (None, "", [], {}):
            table.add_row(
                name.replace("_", " "), Text(f"{value:,}" if isinstance(value, int) else str(value))
            )
    console.print(table)
    if tensors:
        table = Table("tensor", "shape", "dtype", box=SIMPLE_HEAD, pad_edge=False)
        for name, header in sorted(result.headers.items()):
            table.add_row(Text(name), " x ".join(map(str, header.shape)), header.dtype)
        console.print(table)
    if result.faults:
        table = Table("fault", "in engines", "what to do", box=SIMPLE_HEAD, pad_edge=False)
        for fault in sorted(result.faults, key=lambda fault: fault.warning):
            kind = Text(f"{fault.kind}: ", style="yellow" if fault.warning else "bold red")
            reaction = WORDS[fault.vllm].format("vLLM") + (f": {fault.then}" if fault.then else "")
            reaction += f". {WORDS[fault.sglang].format('SGLang')}" if fault.sglang else ""
            table.add_row(
                kind.append(fault.what, style="default"), Text(reaction), Text(fault.todo)
            )
        console.print(table)
    if result.config is not None:
        _print_ways(console, _ways(result.config, result.fields, drafter, model))
    if result.sound:
        console.print("every tensor is there and has its shape", style="green")


def _print_ways(console: Console, ways: list[Way]) -> None:
    for way in ways:
        console.print(
            Text(way.engine, style="bold"), Text(way.note, style="dim") if way.note else ""
        )
        if way.command:
            console.print(Text(f"  {way.command}"), soft_wrap=True)
