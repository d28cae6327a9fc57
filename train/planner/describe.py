"""A plan as tables, for `draftsmith plan` and `train --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal as size_text
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftsmith.speculators.options import AUTO
from draftsmith.train.planner.plan import Parts, Phase, Plan, StagePlan

Lines = Sequence[tuple[str, str]]


def describe(plan: Plan) -> None:
    """Prints all of a plan."""
    console = Console()
    where = f" on {plan.count} x {plan.device.name}" if plan.device else ""
    _print(console, f"{plan.recipe.name} ({plan.recipe.family}){where}", _models(plan.stages[0]))
    for stage in plan.stages:
        title = f"Training: {stage.name}" if stage.name else "Training"
        _print(console, title, _training(stage, plan))
    _print(console, "Memory of one device where it takes the most, about", _sizes(plan.memory))
    _print(console, "Memory of the host beside it, about", _sizes(plan.host))
    _print(console, "Disk, about", _sizes(plan.disk))
    _print(console, "Assumed", [("", text) for text in plan.assumptions])
    for warning in plan.warnings:
        console.print(escape(warning), style="yellow", soft_wrap=True)
    console.print(escape(verdict(plan)), style="green" if plan.fits else "red", soft_wrap=True)


def _sizes(parts: Parts) -> Lines:
    """Sizes in bytes, and their sum."""
    rows = [(name, size_text(size)) for name, size in parts.items() if size]
    return [*rows, ("total", size_text(sum(parts.values())))] if rows else []


def verdict(plan: Plan) -> str:
    """One line."""
    total = sum(plan.memory.values())
    if plan.device is None:
        return f"about {size_text(total)} per device; name a device for time (--gpu)"
    device = size_text(int(plan.device.memory))
    if not plan.fits:
        return f"does not fit: target and drafter alone exceed {device} per device"
    fits = "may not fit" if total > plan.device.memory else "fits"
    time = "give --examples for time" if plan.seconds is None else f"about {duration(plan.seconds)}"
    return f"{fits}: about {size_text(total)} of {device} per device; {time}"


def _models(stage: StagePlan) -> Lines:
    t = stage.target
    d = stage.drafter
    recipe = stage.recipe
    features = f"{size_text(stage.feature_bytes)} per token"
    if recipe.features.mode == "cache":
        features += f" on disk, {size_text(stage.feature_bytes * stage.tokens)} in all"
    return [
        ("target", f"{t.name_or_path}: {t.num_parameters:,} parameters, {t.dtype}"),
        ("taps", f"{list(d.tap_layers)} (0: embedding output, i: output of layer i-1)"),
        ("drafter", f"{d.describe()}; {stage.trainable:,} trained parameters"),
        ("draft vocabulary", _vocabulary(stage)),
        ("starts from", recipe.drafter.init_from or recipe.drafter.start),
        ("features", features),
    ]


def _vocabulary(stage: StagePlan) -> str:
    """How many tokens are scored; where that is measured first, the plan is of all."""
    d = stage.drafter
    if getattr(stage.recipe.drafter, "draft_vocab_size", None) == AUTO:
        return f"auto: as many of {d.vocab_size:,} tokens as are fastest; planned with all"
    return f"{d.draft_vocab_size:,} of {d.vocab_size:,} tokens"


def _training(stage: StagePlan, plan: Plan) -> Lines:
    """Data, budget and optimizer; FLOPs and time of each phase."""
    rows = []
    for source in stage.sources:
        text = source.note
        if source.examples is not None:
            counts = f"{source.tokens:,} tokens, {source.supervised:,} supervised"
            text = f"{source.examples:,} examples, about {counts}"
        rows.append(("data", f"{source.label}: {text}"))
    step = stage.step_rows
    tokens = step.rows_per_step * stage.recipe.data.max_length
    rows += [
        ("budget", _budget(stage, plan)),
        ("a step", f"{tokens:,} tokens (rows: {step.rows}, micro-steps: {step.micro_steps})"),
        ("optimizer", stage.training.describe()),
    ]
    if stage.recipe.features.endpoints and plan.device:
        states = stage.states_per_second(plan.device)
        rate = f"{states:,.0f} tokens/s ({size_text(int(states * stage.feature_bytes))}/s)"
        rows.append(("states of servers", f"{rate}, so that the training never waits"))
    of = "" if stage.steps else ", one step"
    for phase in stage.phases[:-2]:
        rows.append((phase.name, _work(phase, plan)))
    for phase in stage.phases[-2:]:
        rows.append((f"{phase.name}{of}", _work(phase, plan)))
    return rows


def _work(phase: Phase, plan: Plan) -> str:
    """Arithmetic of a phase, and its time on a device."""
    text = f"{phase.flops / 1e15:.3g} PFLOP"
    if phase.elsewhere:
        text += ", at servers"
    elif plan.device:
        text += f", {duration(phase.seconds(plan.device, plan.count))}"
    return text


def _budget(stage: StagePlan, plan: Plan) -> str:
    """The end of the training as the recipe gives it."""
    training = stage.recipe.training
    parts = []
    if stage.steps:
        parts.append(f"{stage.steps:,} steps")
    elif training.epochs:
        parts.append(f"{training.epochs:g} epochs of data that was not counted")
    if training.max_minutes:
        text = f"{training.max_minutes:g} min"
        if plan.device:
            text += f", about {stage.steps_within_minutes(plan.device):,.0f} steps"
        parts.append(text)
    return " or ".join(parts) + (", whichever comes first" if len(parts) > 1 else "")


def _print(console: Console, title: str, rows: Lines) -> None:
    """A table of names and values under its title, unless it is empty."""
    if not rows:
        return
    console.print(Text(title, style="bold"), soft_wrap=True)  # a table's own is folded to its width
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    console.print()


def duration(seconds: float) -> str:
    """`1.2 h`, in the unit that suits the value."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
