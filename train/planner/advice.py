"""What would make a run fit: keys of its recipe, more devices, or others, each tried out by the estimate that refused.

Knows which keys take memory, and no terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from train.planner.devices import CPU, DEVICES, Device
from train.planner.memory import memory
from train.planner.plan import USABLE, Plan, peak_of
from train.recipe.recipe import Recipe, make_recipe

FEWEST = {"training.batch_size": 1, "regenerate.batch_size": 1, "data.max_length": 256, "training.loss_chunk_size": 64}


@dataclass(frozen=True)
class Advice:
    """Changes that, made together, let the run fit. `saves`: bytes at the peak."""

    changes: tuple[str, ...]
    saves: float


def advise(plan: Plan) -> list[Advice]:
    """Ways to make the run fit: single changes of the recipe, all of them together if none will do, other devices."""
    found = [Advice((text,), plan.needed - needed) for text, needed in _alone(plan)]
    if not found:
        found += _together(plan)
    smaller = sorted(DEVICES.items(), key=lambda item: item[1].memory)
    for key, device in smaller:
        other = needed_with(plan, plan.recipe, device, plan.count)
        if plan.device.kind != CPU and device.memory > plan.device.memory and other <= USABLE * device.memory:
            found.append(Advice((f"--gpu {key}",), 0.0))
            break
    return found


def needed_with(plan: Plan, recipe: Recipe, device: Device | None = None, count: int | None = None) -> float:
    """Bytes of one device, had the recipe been another one. Shapes of target and drafter stay."""
    device, count = device or plan.device, count or plan.count
    outlines = [replace(s.outline, recipe=part) for s, (_, part) in zip(plan.stages, recipe.training_stages())]
    found = [memory(each, processes=count) for each in outlines]
    return peak_of(found).total + device.context


def _alone(plan: Plan) -> Iterator[tuple[str, float]]:
    """Each key by itself, at the first value that lets the run fit, with the bytes needed then."""
    for key in _KEYS:
        for text, changed in _values(plan, plan.recipe, key):
            if (needed := needed_with(plan, changed)) <= plan.available:
                yield text, needed
                break
    if plan.device.kind != CPU:
        for count in (2 * plan.count, 4 * plan.count, 8 * plan.count):
            if (needed := needed_with(plan, plan.recipe, count=count)) <= plan.available:
                yield f"--count {count}", needed
                break


def _together(plan: Plan) -> list[Advice]:
    """Key after key, each at the first value that makes the run fit or the last that helps, until it does."""
    recipe, least, texts = plan.recipe, plan.needed, []
    for key in _KEYS:
        chosen = None
        for text, changed in _values(plan, recipe, key):
            needed = needed_with(plan, changed)
            if needed < least:
                least, chosen = needed, (text, changed)
            if needed <= plan.available:
                break
        if chosen is not None:
            texts.append(chosen[0])
            recipe = chosen[1]
        if least <= plan.available:
            return [Advice(tuple(texts), plan.needed - least)]
    return []


_KEYS = (
    "training.keep_features_gb",
    "regenerate.batch_size",
    "evaluation.lossless_check",
    "training.activation_checkpointing",
    "training.loss_chunk_size",
    "training.batch_size",
    "target.sharding",
    "data.max_length",
)


def _values(plan: Plan, recipe: Recipe, key: str) -> Iterator[tuple[str, Recipe]]:
    """(how to write it, the recipe) for smaller and smaller values of a key."""
    section, _, name = key.partition(".")
    value = getattr(getattr(recipe, section), name)
    if key == "training.loss_chunk_size":
        value = plan.stages[0].outline.chunk_size
    wanted: list[Any] = []
    if key in FEWEST:
        while value > FEWEST[key]:
            value = max(value // 2, FEWEST[key])
            wanted.append(value)
    elif key == "training.activation_checkpointing" and not value:
        wanted = [True]
    elif key == "evaluation.lossless_check" and value:
        wanted = [False]
    elif key == "training.keep_features_gb" and value:
        wanted = [0.0]
    elif key == "target.sharding" and value == "none" and plan.count > 1:
        wanted = ["fsdp"]
    for each in wanted:
        if (changed := _changed(recipe, key, each)) is not None:
            yield _written(recipe, key, each), changed


def _changed(recipe: Recipe, key: str, value: Any) -> Recipe | None:
    """The recipe with another value; stages that name the key follow. None if it is not one then."""
    section, _, name = key.partition(".")
    tree = recipe.model_dump(mode="json")
    tree[section][name] = value
    if key == "training.batch_size" and recipe.training.global_batch_size is None:
        tree[section]["gradient_accumulation_steps"] = _accumulation(recipe, value)
    if key == "evaluation.lossless_check":
        tree["gates"].pop("lossless_mismatches", None)
    for stage in tree["stages"]:
        if name in (stage.get(section) or {}):
            stage[section][name] = value
    try:
        return make_recipe(tree)
    except ValidationError:
        return None


def _accumulation(recipe: Recipe, batch_size: int) -> int:
    """Micro-steps that keep the rows of a step, or one more."""
    rows = recipe.training.batch_size * recipe.training.gradient_accumulation_steps
    return -(-rows // batch_size)


def _written(recipe: Recipe, key: str, value: Any) -> str:
    """As an override on the command line."""
    text = f"{key}={json.dumps(value)}"
    if key == "training.batch_size" and recipe.training.global_batch_size is None:
        text += f" training.gradient_accumulation_steps={_accumulation(recipe, value)}"
    if key == "evaluation.lossless_check" and "lossless_mismatches" in recipe.gates:
        text += " (without the gate lossless_mismatches)"
    return text
