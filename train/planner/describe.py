"""A plan as tables, for `draftsmith plan` and `train --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.inference.console import size_text
from draftsmith.train.planner.plan import Parts, Plan, Stage

Rows = Sequence[tuple[str, str]]


def describe(plan: Plan, console: Console | None = None) -> None:
    """Prints all of a plan."""
    console, first = console or Console(), plan.stages[0]
    where = f" on {plan.count} x {plan.device.name}" if plan.device else ""
    _print(console, f"{plan.recipe.name} ({plan.recipe.family}){where}", _models(first))
    for stage in plan.stages:
        title = f"Training: {stage.name}" if stage.name else "Training"
        _print(console, title, _training(stage) + _work(stage, plan))
    _print(console, "Memory of one device while it trains, about", _bytes(plan.memory))
    _print(console, "Assumed", [("", text) for text in plan.assumptions])
    console.print(escape(verdict(plan)), style="green" if plan.fits else "red", soft_wrap=True)


def verdict(plan: Plan) -> str:
    """One line."""
    sum_of_bytes = sum(plan.memory.values())
    needed = size_text(sum_of_bytes)
    if plan.device is None:
        return f"about {needed} per device; name a device for time (--gpu)"
    device = size_text(plan.device.memory)
    if not plan.fits:
        return f"does not fit: target and drafter alone exceed {device} per device"
    fits = "may not fit" if sum_of_bytes > plan.device.memory else "fits"
    text = f"{fits}: about {needed} of {device} per device"
    if plan.seconds is None:
        return f"{text}; the number of examples is not known: give --examples for time"
    return f"{text}; about {duration(plan.seconds)}"


def _models(stage: Stage) -> Rows:
    t, d, recipe = stage.target, stage.drafter, stage.recipe
    features = f"{size_text(stage.feature_bytes)} per token, made online and never stored"
    if recipe.features.mode == "cache":
        per_token = stage.cached_bytes
        features = f"{size_text(per_token)} per token on disk, about"
        features += f" {size_text(per_token * stage.tokens)} in all"
    shape = f"{t.config.model_type}, {t.num_layers} x {t.hidden_size}, vocabulary {t.vocab_size:,}"
    size = f"{in_count(t.num_parameters)} parameters, {t.dtype}"
    start = recipe.drafter.init_from or recipe.drafter.start
    return [
        ("target", f"{t.name_or_path}: {shape}; {size}"),
        ("taps", f"{list(d.tap_layers)} (0: embedding output, i: output of layer i-1)"),
        ("drafter", f"{d.describe()}; {in_count(stage.trainable)} trained parameters"),
        ("draft vocabulary", f"{d.draft_vocab_size:,} of {d.vocab_size:,} tokens"),
        ("starts from", str(start)),
        ("features", features),
    ]


def _training(stage: Stage) -> list[tuple[str, str]]:
    rows = []
    for source in stage.sources:
        text = source.note
        if source.examples is not None:
            counts = f"{in_count(source.tokens)} tokens, {in_count(source.supervised)} supervised"
            text = f"{source.examples:,} examples, about {counts}"
        rows.append(("data", f"{source.label}: {text}"))
    shared, steps = stage.step_rows, stage.steps
    tokens = shared.rows_per_step * stage.recipe.data.max_length
    return [
        *rows,
        ("budget", f"{steps:,} steps" if steps else "until epochs or minutes are spent"),
        ("a step", f"{tokens:,} tokens ({shared.rows} rows x {shared.micro_steps} micro-steps)"),
        ("settings", _settings(stage)),
        ("precision", str(stage.autocast)),
    ]


def _settings(stage: Stage) -> str:
    """Optimizer and learning rates, and whose they are."""
    given, chosen = stage.recipe.training, stage.training
    rates = f"{chosen.optimizer}, learning rate {chosen.learning_rate:g}"
    if chosen.optimizer == "muon":
        rates += f", {chosen.muon_learning_rate:g} for matrices"
    if given.settings == "given":
        return f"{rates}: the recipe's"
    if given.is_short(stage.steps):
        return f"{rates}: of a short run (training.settings: given keeps the published ones)"
    return f"{rates}: the published ones"


def _work(stage: Stage, plan: Plan) -> list[tuple[str, str]]:
    """FLOPs and time of each phase."""
    rows = []
    for phase in stage.phases:
        text = f"{phase.flops / 1e15:.3g} PFLOP"
        if plan.device:
            text += f", {duration(phase.seconds(plan.device, plan.count))}"
        per_step = stage.steps is None and not phase.name.startswith("responses")
        rows.append((phase.name + ", one step" * per_step, text))
    return rows


def _print(console: Console, title: str, rows: Rows) -> None:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.show_header = table.pad_edge = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    console.print()


def _bytes(parts: Parts) -> Rows:
    total = {"total": sum(parts.values())}
    return [(name, size_text(size)) for name, size in (parts | total).items() if size]


def in_count(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"


def duration(seconds: float) -> str:
    """`1.2 h`, in the unit that suits the value."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
