"""`draftsmith plan`: time, memory, disk and cost of a recipe on given devices, before anything is
spent.

Exit code 1: target and drafter do not fit the device. The figures are train/planner/plan.py's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from train.commands.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from train.planner.devices import Range
    from train.planner.plan import Plan


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device, such as h100; without it no time is given.")
    ] = None,
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
    """Estimate time, memory, disk and cost of a recipe on given devices. Exit code 1: target and
    drafter do not fit."""
    from train.planner.devices import find_device
    from train.planner.plan import make_plan
    from train.recipe.load import load_recipe

    estimate = make_plan(
        load_recipe(recipe, overrides or ()),
        None if gpu is None else find_device(gpu),
        count,
        price_per_hour=price_per_hour,
        examples=examples,
        tokens=tokens,
    )
    if as_json:
        typer.echo(json.dumps(facts(estimate), indent=2))
    else:
        _print(estimate)
    raise typer.Exit(0 if estimate.fits else 1)


def facts(plan: Plan) -> dict[str, Any]:
    """All figures: seconds, bytes, and the currency of the price."""
    return {
        "recipe": plan.recipe.name,
        "device": plan.device.name if plan.device else None,
        "count": plan.count,
        "fits": plan.fits,
        "verdict": verdict(plan),
        "memory": plan.memory,
        "steps": [stage.steps for stage in plan.stages],
        "seconds": plan.seconds._asdict() if plan.seconds else None,
        "phases": [{"name": name, "flops": phase.flops} for name, phase in plan.phases],
        "disk": plan.disk,
        "cost": plan.cost._asdict() if plan.cost else None,
        "assumptions": plan.assumptions,
    }


def verdict(plan: Plan) -> str:
    """One line."""
    from inference.console import size_text

    needed = size_text(sum(plan.memory.values()))
    if plan.device is None:
        return f"about {needed} per device; name a device for time (--gpu)"
    device = size_text(plan.device.memory)
    if not plan.fits:
        return f"does not fit: target and drafter alone exceed {device} per device"
    tight = sum(plan.memory.values()) > plan.device.memory
    fits = "may not fit" if tight else "fits"
    text = f"{fits}: about {needed} of {device} per device"
    if plan.seconds is None:
        return f"{text}; the number of examples is not known: give --examples for time"
    cost = f"; cost {_range(plan.cost, '{:,.2f}')}" if plan.cost else ""
    return f"{text}; {_duration(plan.seconds)}{cost}"


def _print(plan: Plan) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from train.planner.dry_run import byte_rows, print_pairs

    console = Console()
    where = f" on {plan.count} x {plan.device.name}" if plan.device else ""
    console.print(f"[bold]{escape(plan.recipe.name)}[/bold]{where}", highlight=False)
    per = "" if all(stage.steps for stage in plan.stages) else ", of one step"
    table = Table("phase", "PFLOP", "time", box=SIMPLE_HEAD, pad_edge=False)
    for name, phase in plan.phases:
        time = _duration(phase.seconds(plan.device, plan.count)) if plan.device else "-"
        table.add_row(escape(name) + per, f"{phase.flops / 1e15:.3g}", time)
    console.print(table)
    print_pairs(console, "Memory of one device while it trains", byte_rows(plan.memory))
    print_pairs(console, "Disk", byte_rows(plan.disk))
    print_pairs(console, "Assumed", [("", text) for text in plan.assumptions])
    style = "green" if plan.fits else "red"
    console.print(
        f"[bold {style}]{escape(verdict(plan))}[/bold {style}]", highlight=False, soft_wrap=True
    )


def _duration(time: Range) -> str:
    """`1.2 to 2.1 h`, in the unit that suits the likely value."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if time.likely >= 2 * size or unit == "s":
            break
    return _range(time, "{:.3g}", size) + f" {unit}"


def _range(time: Range, form: str, size: float = 1.0) -> str:
    return f"{form.format(time.low / size)} to {form.format(time.high / size)}"
