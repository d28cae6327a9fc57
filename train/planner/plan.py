"""Time, memory, disk and cost of a run on given devices, and the verdict whether it fits.

The figures rest on configurations and counts alone: no weight is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculators.errors import ConfigError
from train.planner.devices import CPU, Device, Range
from train.planner.memory import EXACT, Parts, StageMemory, disk, measuring, memory
from train.planner.outline import Outline, outline
from train.planner.phases import ASSUMED_TAU, RESPONSES, TRAINING, Phase, phases
from train.planner.token_counts import assumed, counter, mixed
from train.recipe.recipe import Recipe

VALIDATION_EXAMPLES = 200  # of a validation source that nobody counted
USABLE = 0.97  # of a device's memory; the rest is its driver's


@dataclass
class Stage:
    """One stage of the training, with the phases before and after it."""

    name: str
    outline: Outline
    phases: list[Phase]
    memory: list[StageMemory]
    steps: int | None  # None: not known


@dataclass
class Plan:
    """A recipe on `count` devices."""

    recipe: Recipe
    device: Device
    count: int
    stages: list[Stage]
    price_per_hour: float | None = None  # of one device
    assumptions: list[str] = field(default_factory=list)

    @property
    def times(self) -> list[tuple[str, Range]]:
        """Seconds of each phase, in order."""
        return [
            (
                f"{stage.name}: {phase.name}" if stage.name else phase.name,
                phase.whole.seconds(self.device),
            )
            for stage in self.stages
            for phase in stage.phases
        ]

    @property
    def complete(self) -> bool:
        """False if the time is that of one step only."""
        return all(stage.steps is not None for stage in self.stages)

    @property
    def seconds(self) -> Range:
        return Range(*(sum(column) for column in zip(*(time for _, time in self.times))))

    @property
    def hints(self) -> list[str]:
        """Advice on the time of the run."""
        phases = [
            (phase, phase.whole.seconds(self.device).likely)
            for stage in self.stages
            for phase in stage.phases
        ]
        written = sum(time for phase, time in phases if phase.name == RESPONSES)
        trained = sum(time for phase, time in phases if phase.name in TRAINING)
        if (
            not self.complete
            or written <= trained
            or all(s.outline.recipe.regenerate.endpoints for s in self.stages)
        ):
            return []
        return [
            f"the target's responses take {written / max(trained, 1e-9):.1f} times as long to write"
            " in process as the training takes: let servers write them (regenerate.endpoints,"
            " docs/regeneration.md)"
        ]

    @property
    def cost(self) -> Range | None:
        """The cost of all devices for the whole time, in the currency of the price."""
        if self.price_per_hour is None or not self.complete:
            return None
        return Range(*(s / 3600 * self.count * self.price_per_hour for s in self.seconds))

    @property
    def peak(self) -> StageMemory:
        return peak_of([stage.memory for stage in self.stages])

    @property
    def needed(self) -> float:
        """Bytes that one device needs."""
        return self.peak.total + self.device.context

    @property
    def available(self) -> float:
        return USABLE * self.device.memory

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def disk(self) -> Parts:
        """Bytes below the run's folder; stages keep checkpoints of their own."""
        found: Parts = {}
        for stage in self.stages:
            for name, size in disk(stage.outline).items():
                found[name] = (
                    max(found.get(name, 0), size) if name == "export" else found.get(name, 0) + size
                )
        return found


def peak_of(stages: Sequence[Sequence[StageMemory]]) -> StageMemory:
    """The largest of all stages of a training; the export is measured after the last."""
    last = len(stages) - 1
    found = [
        m
        for i, stage in enumerate(stages)
        for m in stage
        if i == last or not m.name.startswith("measure")
    ]
    return max(found, key=lambda m: m.total)


def make_plan(
    recipe: Recipe,
    device: Device,
    count: int = 1,
    *,
    price_per_hour: float | None = None,
    examples: int | None = None,
    tokens: int | None = None,
) -> Plan:
    """`examples`: of each training source that cannot be counted; `tokens`: of one example. Where
    neither these nor the data tell how long the training is, the phases are those of one step."""
    if device.kind == CPU and count > 1:
        raise ConfigError(
            "--count: this machine's CPU is one device, whatever the number of processes"
        )
    outlines = list(_outlines(recipe, device, examples, tokens))
    stages = [
        _stage(name, plan, device, count, last=i == len(outlines) - 1)
        for i, (name, plan) in enumerate(outlines)
    ]
    plan = Plan(recipe, device, count, stages, price_per_hour)
    plan.assumptions = _assumptions(plan)
    return plan


def require_memory_to_measure(recipe: Recipe, available: int | None) -> None:
    """Raises ConfigError before a training if the export cannot be measured on a device of
    `available` bytes. None: not known, and nothing is refused."""
    if available is None or not recipe.measured:
        return
    _, last = recipe.training_stages()[-1]
    worst = max(measuring(outline(last, device="cuda")), key=lambda m: m.total)
    if worst.total <= available:
        return
    exact = (
        "evaluation.lossless_check=false (without a gate on lossless_mismatches), "
        if worst.name == EXACT
        else ""
    )
    raise ConfigError(
        f"evaluation: the drafter could be trained and not measured: to {worst.name} takes about"
        f" {worst.total / 1e9:.0f} GB, and the device has {available / 1e9:.0f} GB. Set {exact}a"
        " smaller evaluation.batch_size, prompts_per_workload or max_tokens; `draftsmith plan`"
        " shows what each saves"
    )


def _outlines(
    recipe: Recipe, device: Device, examples: int | None, tokens: int | None
) -> Iterator[tuple[str, Outline]]:
    """The outline of each stage; sources that several of them read alike are counted once."""
    known: dict[Any, Any] = {}
    for name, part in recipe.training_stages():
        key = (part.data.model_dump_json(), part.regenerate.model_dump_json())
        if key not in known:
            count, data = counter(part), part.data
            train = [
                assumed(count(s), s, part, examples if s.resolved().name else None, tokens)
                for s in data.train
            ]
            few = {
                s.label: VALIDATION_EXAMPLES
                for s in data.validation
                if s.resolved().name and not s.limit
            }
            held_out = [
                assumed(count(s), s, part, few.get(s.label), tokens) for s in data.validation
            ]
            known[key] = mixed(train, data.train), mixed(held_out, data.validation)
        yield name, outline(part, known[key], device.kind)


def _stage(name: str, plan: Outline, device: Device, count: int, *, last: bool) -> Stage:
    budget = plan.recipe.training.max_minutes
    steps = plan.steps(count)
    if budget is not None:
        one = sum(p.whole.seconds(device).likely for p in phases(plan, processes=count, steps=1))
        within = max(int(60 * budget / one), 1)
        steps = within if steps is None else min(steps, within)
    known = steps is not None
    found = phases(plan, processes=count, steps=steps or 1, around=known, report=known and last)
    return Stage(name, plan, found, memory(plan, processes=count), steps)


def _assumptions(plan: Plan) -> list[str]:
    """The assumptions that the figures rest on."""
    d = plan.device
    first = plan.stages[0].outline
    found = [f"{s.label}: {s.note}" for s in (*first.sources, *first.validation) if s.note]
    products, transfers = ([f"{100 * x:.0f}" for x in each] for each in (d.products, d.transfers))
    found.append(
        f"products reach {products[0]} to {products[2]} % of the peak (likely {products[1]}),"
        f" transfers {transfers[0]} to {transfers[2]} % of the bandwidth (likely {transfers[1]})"
        + ("" if d.kind == CPU else "; not measured on this device")
    )
    if first.recipe.regenerate.enabled:
        found.append(
            "the target's responses are as long as those in the data, and written by all processes"
        )
    found.append(
        f"the report is made by one process; drafts are accepted to {ASSUMED_TAU:g} tokens a round"
    )
    return found
