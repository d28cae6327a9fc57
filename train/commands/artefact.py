"""`draftsmith inspect`, `export` and `push`: on a drafter on disk. Torch is imported when one
runs."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.flags import flag_name
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.errors import CheckpointError, ConfigError, DataError, HubError
from draftsmith.speculators.hub import repository_id
from draftsmith.train.commands.options import AsJson, Model, TargetLayers, command_of
from draftsmith.train.recipe.data_sections import Dtype

if TYPE_CHECKING:
    from draftsmith.speculators.export.inspection import Inspection
    from draftsmith.speculators.export.serving_commands import ServingCommand
    from draftsmith.train.pipeline.quantise_stage import AcceptanceChange

MAX_LOSS = 0.02  # share of acceptance that --quantize may cost


@dataclass(frozen=True)
class ExportOptions:
    """What `draftsmith export` takes."""

    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A run's folder, or the folder or id of a drafter."),
    ]
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; what it held is replaced.")
    ]
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Precision of its tensors; default: auto, the recipe's or the drafter's."
        ),
    ] = None
    format: Annotated[
        str, typer.Option(help="vllm (default), speculators, sglang, transformers.")
    ] = ""
    model: Model = ""
    target_layers: TargetLayers = None
    into: Annotated[
        Path | None,
        typer.Option(help="A target's folder: OUT is its copy with the MTP module of SOURCE."),
    ] = None
    quantize: Annotated[str, typer.Option(help="int8: weights of one byte (docs/serve.md).")] = ""
    max_acceptance_loss: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --quantize: the share of acceptance it may cost; default: 0.02.",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --quantize: held-out prompts; a run has its own."),
    ] = None


def run_export(options: ExportOptions) -> None:
    """Write a drafter as a folder that engines load. It is the best checkpoint of a run, or a
    drafter that is converted to another format."""
    from draftsmith.speculators.export import read_drafter_config, read_fields
    from draftsmith.speculators.export.convert import convert, write_back
    from draftsmith.speculators.export.formats import NATIVE
    from draftsmith.train.pipeline.export_stage import reexport

    _refuse_unused(options)
    console = Console()
    source = options.source
    out = options.out
    dtype = options.dtype or "auto"
    format = options.format or NATIVE
    if options.quantize:
        change = _quantise(options)
        console.print(f"{out}: {source} in {options.quantize}; {change}", highlight=False)
    elif options.into is not None:
        write_back(_drafter_of(source), options.into, out)
        console.print(f"{out}: {options.into} with the module of {source}", highlight=False)
        return
    elif _is_export(source):
        convert(
            source,
            out,
            format=format,
            dtype=dtype,
            provenance=_named_target(options.model),
            num_target_layers=options.target_layers,
            target=_table_target(options),
        )
        console.print(f"{out}: {source} in the format {format}", highlight=False)
    else:
        _, step = reexport(source, out, dtype=dtype, format=format, model=options.model)
        console.print(f"{out}: the drafter of step {step}", highlight=False)
    config = read_drafter_config(out, options.target_layers)
    fields = read_fields(out)
    _print_commands(console, _commands(config, fields, str(out), options.model))


def _refuse_unused(options: ExportOptions) -> None:
    """ConfigError for an option that this export would not use."""
    from draftsmith.speculators.export.formats import NATIVE
    from draftsmith.train.recipe.recipe import EXPORT

    is_run = not _is_export(options.source)
    unused: dict[str, str] = {}  # option -> what it is for, and what to do
    if options.quantize:
        if options.into is not None or options.format not in ("", NATIVE):
            raise ConfigError("goes with neither --into nor another --format", where="--quantize")
        unused["target_layers"] = "the target that judges the loss has them; leave it out"
        if is_run:
            unused["prompts"] = (
                f"a run is held to its own; give {options.source / EXPORT} in place of"
                f" {options.source} for others"
            )
    else:
        loss = "for the loss of --quantize, and nothing is quantised; give that, or leave it out"
        unused |= {"prompts": loss, "max_acceptance_loss": loss}
    if options.into is not None:
        copied = "--into copies the target's folder as it is; leave one of the two out"
        unused |= dict.fromkeys(("dtype", "format", "model", "target_layers"), copied)
    elif is_run:
        unused["target_layers"] = (
            "for a drafter that does not say which layers it taps; a run's does, leave it out"
        )
    for name, reason in unused.items():
        if getattr(options, name) not in (None, ""):
            raise ConfigError(reason, where=flag_name(name))


def _named_target(model: str) -> dict[str, Any]:
    """What an export says of the target that --model names."""
    return {"target": {"name_or_path": model}} if model else {}


def _table_target(options: ExportOptions) -> Any:
    """The target that --model names, if a draft model's table is of another size; else None.
    ConfigError for another tokenizer: rows that are added or cut off would not make it fit."""
    from draftsmith.inference.entrypoints.loading import load_own_tokenizer
    from draftsmith.speculators.export import read_drafter_config
    from draftsmith.speculators.export.serving_commands import other_table
    from draftsmith.speculators.vocab.token_bytes import same_vocabulary
    from draftsmith.train.recipe.sections import TargetSection

    source = str(options.source)
    config = read_drafter_config(source, options.target_layers)
    if config.family != "draft_model" or not options.model:
        return None
    target = TargetSection(model=options.model)
    sketch = target.sketch()
    if not other_table(config, source, options.model, sketch.vocab_size):
        return None
    if reason := same_vocabulary(target.load_tokenizer(), load_own_tokenizer(source)):
        raise ConfigError(
            f"the draft model's tokenizer is not the target's: {reason}; give a target or a draft"
            " model of the same line, or leave --model out and serve it with"
            " use_heterogeneous_vocab",
            where=f"--model {options.model}",
        )
    return sketch


def _drafter_of(source: Path) -> Path:
    """The folder of the drafter: below a run's, which has none itself."""
    from draftsmith.train.recipe.recipe import EXPORT

    below = source / EXPORT
    is_run = not (source / "config.json").is_file() and (below / "config.json").is_file()
    return below if is_run else source


def _is_export(source: Path) -> bool:
    return (source / "config.json").is_file() or bool(repository_id(str(source)))


def _quantise(options: ExportOptions) -> AcceptanceChange:
    from draftsmith.speculators.export import read_fields
    from draftsmith.speculators.export.quantisation import (
        check_scheme,
        require_plain,
        split_quantisation,
    )
    from draftsmith.train.pipeline.quantise_stage import HeldOut, quantise_export, quantise_run

    source = options.source
    out = options.out
    model = options.model
    dtype = options.dtype or "auto"
    max_loss = MAX_LOSS if options.max_acceptance_loss is None else options.max_acceptance_loss
    scheme: Any = options.quantize
    check_scheme(scheme, "--quantize")
    if _is_export(source):
        require_plain(split_quantisation(read_fields(source))[1], "--quantize")
        held_out = HeldOut.for_export(source, model, options.prompts)
        named = _named_target(model)
        return quantise_export(
            source, out, held_out, scheme, max_loss, dtype=dtype, provenance=named
        )
    with tempfile.TemporaryDirectory(prefix="draftsmith-quantise-") as scratch:
        return quantise_run(source, out, Path(scratch), scheme, max_loss, dtype=dtype, model=model)


export = command_of("export", ExportOptions, run_export)


def inspect(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help=f"A drafter: folder (or a run's) or repository id; or {', '.join(TRAINING_FREE)}.",
        ),
    ],
    model: Model = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    target_layers: TargetLayers = None,
    vllm_version: Annotated[
        str | None,
        typer.Option(help="Show the command of this vLLM, such as 0.33; default: the newest fit."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a drafter is, and its faults. Each fault comes with what the engines do about it;
    with --model the drafter is also compared with that target. Exit code 1: there are faults."""
    from draftsmith.speculators.export.inspection import inspect_folder
    from draftsmith.speculators.export.layouts.base import minor

    if vllm_version is not None:
        minor(vllm_version)  # what is no version is refused before the work
    if drafter in TRAINING_FREE and not Path(drafter).is_dir():
        _inspect_method(drafter, model, vllm_version, as_json)
        return
    if Path(drafter).is_dir():
        drafter = str(_drafter_of(Path(drafter)))
    result = inspect_folder(drafter, num_target_layers=target_layers)
    named = result.target_name or ""
    if target := model or (named if Path(named).is_dir() else ""):
        result = _held_to(target, drafter, target_layers)
    commands = []
    if result.config is not None:
        own = drafter if result.holds_target else ""
        commands = _commands(result.config, result.fields, drafter, model or own, vllm_version)
    if as_json:
        typer.echo(json.dumps(_as_tree(result, commands), indent=2))
    else:
        _print(Console(), result, commands, tensors)
    raise typer.Exit(0 if result.sound else 1)


def _as_tree(result: Inspection, commands: list[ServingCommand]) -> dict[str, Any]:
    """What `inspect --json` prints."""
    shapes = {n: [list(h.shape), h.dtype] for n, h in sorted(result.headers.items())}
    return {
        "folder": str(result.folder),
        "sound": result.sound,
        **_facts(result),
        "faults": [vars(fault) for fault in result.faults],
        "serving": [vars(command) for command in commands],
        "tensors": shapes,
    }


def _held_to(model: str, drafter: str, target_layers: int | None) -> Inspection:
    """The inspection of a drafter beside its target: sizes, tokenizer, and hash of the weights."""
    from draftsmith.speculators.digests import model_weights_sha256
    from draftsmith.speculators.export.inspection import inspect_folder
    from draftsmith.train.recipe.sections import TargetSection

    target = TargetSection(model=model)
    try:
        tokenizer = target.load_tokenizer()
    except CheckpointError:
        tokenizer = None
    weights = None
    with suppress(DataError, HubError):  # not on this machine, and nobody states their hash
        weights = model_weights_sha256(target.model, target.revision)
    result = inspect_folder(
        drafter,
        target.sketch(),
        num_target_layers=target_layers,
        tokenizer=tokenizer,
        target_weights=weights,
    )
    if tokenizer is None and hasattr(result.config, "mask_token_id"):
        text = "not held to texts, as the target's tokenizer could not be loaded"
        result.add("mask_token_id", text, warning=True)
    return result


def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An exported drafter, or the folder of a run.")
    ],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hub.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public; private otherwise.")
    ] = False,
    base_model: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="The target's id, for the card.")
    ] = "",
    license_: Annotated[
        str, typer.Option("--license", help="License for the card, such as apache-2.0.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="acceptance.json; default: the one beside the drafter.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be sent and print the card.")
    ] = False,
) -> None:
    """Upload a drafter to the Hub, with a model card. The card is written from its acceptance
    report. The same command goes on with an upload that was stopped."""
    from draftsmith.speculators.export.upload import Destination
    from draftsmith.train.pipeline.publish import CARD, PushOptions, assemble
    from draftsmith.train.pipeline.publish import push as upload

    options = PushOptions(base_model or None, license_ or None, report)
    to = Destination(repository, not public)
    if not dry_run:
        typer.echo(f"{to}: {upload(folder, to, options, say=_note)}")
        return
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as scratch:
        assembled = assemble(folder, repository, Path(scratch), options, say=_note)
        typer.echo((assembled / CARD).read_text(encoding="utf-8"))
        for path in sorted(path for path in assembled.rglob("*") if path.is_file()):
            size = path.stat().st_size
            typer.echo(f"{size:>15,} bytes  {path.relative_to(assembled).as_posix()}")
    typer.echo(f"This would go to {to}; nothing was sent")


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"note: {text}", style="yellow"))


def _inspect_method(method: str, model: str, vllm_version: str | None, as_json: bool) -> None:
    """How to serve a method that has no folder."""
    from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
    from draftsmith.speculators.export.serving_commands import serving

    options = parse_speculative_config({"method": method})
    commands = serving(method, target=model, training_free=options, vllm_version=vllm_version)
    if as_json:
        data = {"method": method, "serving": [vars(command) for command in commands]}
        typer.echo(json.dumps(data, indent=2))
    else:
        _print_commands(Console(), commands)


def _commands(
    config: Any, fields: Any, folder: str, model: str, vllm_version: str | None = None
) -> list[ServingCommand]:
    from draftsmith.speculators.export.formats import format_of
    from draftsmith.speculators.export.serving_commands import serving

    described = fields.get("draftsmith") or {}
    return serving(
        config.family,
        folder=folder,
        target=model or (described.get("target") or {}).get("name_or_path", ""),
        tokens=described.get("num_speculative_tokens"),
        config=config,
        format=format_of(fields),
        vllm_version=vllm_version,
    )


def _facts(result: Inspection) -> dict[str, Any]:
    from draftsmith.speculators.export.formats import format_of

    config = result.config
    facts: dict[str, Any] = {
        "family": result.family,
        "format": format_of(result.fields) if result.layout else None,
        "architectures": list(result.fields.get("architectures") or ()),
        "target": result.target_name,
        "chat_template": result.section.get("chat_template_sha256"),
        "chat_template_kwargs": result.section.get("chat_template_kwargs"),
    }
    if config is not None:
        facts |= {
            "head": config.describe(),
            "target_hidden_size": config.target_hidden_size,
            "target_layers": result.section.get("num_target_layers"),
            "taps": list(config.tap_layers),
            "vocabulary": config.vocab_size,
            "draft_vocabulary": config.draft_vocab_size,
            "rope_parameters": getattr(config, "rope_parameters", None),
        }
    return facts | {"parameters": result.parameters, "dtype": ", ".join(result.dtypes)}


def _print(
    console: Console, result: Inspection, commands: list[ServingCommand], tensors: bool
) -> None:
    from rich.table import Column, Table

    table = Table("name", Column("value", overflow="fold"), box=None, pad_edge=False)
    table.show_header = False
    for name, value in _facts(result).items():
        if value not in (None, "", [], {}):
            table.add_row(name.replace("_", " "), Text(str(value)))
    for name, header in sorted(result.headers.items()) if tensors else ():
        table.add_row(Text(name), f"{' x '.join(map(str, header.shape))} {header.dtype}")
    console.print(table)
    for fault in sorted(result.faults, key=lambda fault: fault.warning):
        where = Text(f"{fault.where}: ", style="yellow" if fault.warning else "bold red")
        console.print(where.append(f"{fault.text}; {fault.engines}".rstrip("; "), style=""))
    _print_commands(console, commands)
    if result.sound:
        console.print("every tensor is there and has its shape", style="green")


def _print_commands(console: Console, commands: list[ServingCommand]) -> None:
    for command in commands:
        heading = Text(command.engine, style="bold")
        if command.note:
            heading.append(f": {command.note}", style="not bold dim")
        console.print(heading)
        if command.command:
            console.print(Text(f"  {command.command}"), soft_wrap=True)
