"""`draftsmith plan`: time, memory, disk and cost of a recipe on given devices, before anything is
spent.

Exit code 1: it does not fit, with what takes the memory and which changes make it fit. What is
shown, and how; the figures are train/planner/plan.py's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from train.commands.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from train.planner.advice import Advice
    from train.planner.devices import Range
    from train.planner.plan import Plan


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(help="Device, such as h100; cpu measures this machine's.")
    ] = "cpu",
    count: Annotated[
        int, typer.Option(min=1, help="Devices, each with a process, on one host.")
    ] = 1,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price of one device for an hour; without it no cost is given."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Conversations of each training source that is not on this machine."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one conversation, instead of counting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Estimate time, memory, disk and cost of a recipe on given devices. Exit code 1: it does not
    fit."""
    from train.planner.advice import advise
    from train.planner.devices import find_device
    from train.planner.plan import make_plan
    from train.recipe.load import load_recipe

    made = make_plan(
        load_recipe(recipe, overrides or ()),
        find_device(gpu),
        count,
        price_per_hour=price_per_hour,
        examples=examples,
        tokens=tokens,
    )
    advice = [] if made.fits else advise(made)
    if as_json:
        typer.echo(json.dumps(facts(made, advice), indent=2))
    else:
        _print(made, advice)
    raise typer.Exit(0 if made.fits else 1)


def facts(made: Plan, advice: list[Advice]) -> dict[str, Any]:
    """All figures: seconds, bytes, and the currency of the price."""
    return {
        "recipe": made.recipe.name,
        "device": made.device.name,
        "count": made.count,
        "fits": made.fits,
        "verdict": verdict(made),
        "memory": {
            "needed": made.needed,
            "available": made.available,
            "stages": [
                {"stage": stage.name, "when": each.name, "total": each.total, "parts": each.parts}
                for stage in made.stages
                for each in stage.memory
            ],
        },
        "steps": [stage.steps for stage in made.stages],
        "seconds": made.seconds._asdict() if made.complete else None,
        "phases": [
            {"name": name, **time._asdict(), "flops": phase.whole.flops}
            for (name, time), phase in zip(
                made.times, (p for s in made.stages for p in s.phases), strict=True
            )
        ],
        "disk": made.disk,
        "cost": made.cost._asdict() if made.cost else None,
        "advice": [{"changes": list(each.changes), "saves": each.saves} for each in advice],
        "assumptions": made.assumptions,
        "hints": made.hints,
    }


def verdict(made: Plan) -> str:
    """One line."""
    from inference.console import size_text

    room = f"{size_text(made.needed)} of {size_text(made.available)} per device"
    if not made.fits:
        worst = max(made.peak.parts.items(), key=lambda part: part[1])
        return (
            f"does not fit: {room}, most of all {worst[0]} ({size_text(worst[1])}), when it has to"
            f" {made.peak.name}"
        )
    if not made.complete:
        return (
            f"fits: {room}; time is not known, because nobody knows how many examples there are:"
            " give --examples"
        )
    cost = f", {_range(made.cost, '{:,.2f}')} in money" if made.cost else ""
    return f"fits: {room}; {_duration(made.seconds)}{cost}"


def _print(made: Plan, advice: list[Advice]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from inference.console import size_text
    from train.planner.dry_run import byte_rows, memory_rows, print_pairs

    console = Console()
    console.print(
        f"[bold]{escape(made.recipe.name)}[/bold] on {made.count} x {made.device.name}",
        highlight=False,
    )
    times = Table(
        "phase", "time", "of it", "PFLOP", box=SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    times.title = (
        "Time, from low to high" if made.complete else "Time of one step, from low to high"
    )
    whole = made.seconds.likely or 1.0
    works = [phase.whole.flops for stage in made.stages for phase in stage.phases]
    for (name, time), flops in zip(made.times, works, strict=True):
        if time.high:
            times.add_row(
                escape(name), _duration(time), f"{time.likely / whole:.0%}", f"{flops / 1e15:.3g}"
            )
    times.add_row("all", _duration(made.seconds), "", f"{sum(works) / 1e15:.3g}", style="bold")
    console.print(times)
    rows = memory_rows(made.peak)[:-1]
    rows += [
        ("runtime and libraries", size_text(made.device.context)),
        ("needed", size_text(made.needed)),
    ]
    print_pairs(console, f"Memory of one device at its peak, when it has to {made.peak.name}", rows)
    others = [
        (
            f"{stage.name}: {each.name}" if stage.name else each.name,
            size_text(each.total + made.device.context),
        )
        for stage in made.stages
        for each in stage.memory
    ]
    print_pairs(console, "Memory by stage", others)
    print_pairs(console, "Disk", byte_rows(made.disk))
    print_pairs(console, "Assumed", [("", text) for text in made.assumptions])
    style = "green" if made.fits else "red"
    console.print(
        f"[bold {style}]{escape(verdict(made))}[/bold {style}]", highlight=False, soft_wrap=True
    )
    for text in made.hints:
        console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
    for each in advice:
        saves = f"  (saves {size_text(each.saves)})" if each.saves else ""
        console.print(
            f"  would fit: {escape(' '.join(each.changes))}{saves}", highlight=False, soft_wrap=True
        )
    if not made.fits and not advice:
        console.print(
            "  no change of the recipe that was tried makes it fit, and no device of the table",
            soft_wrap=True,
        )


def _duration(time: Range) -> str:
    """`1.2 - 2.1 h`, in the unit that suits the likely value."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if time.likely >= 2 * size or unit == "s":
            break
    return _range(time, "{:.3g}", size) + f" {unit}"


def _range(time: Range, form: str, size: float = 1.0) -> str:
    return f"{form.format(time.low / size)} to {form.format(time.high / size)}"
