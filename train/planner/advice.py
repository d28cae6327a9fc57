"""Changes that make a run fit: keys of its recipe, more devices, or others, each tried by the
estimate that refused."""

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

KEYS: dict[str, Any] = {  # and the value that takes least memory; numbers in between are tried too
    "training.keep_features_gb": 0.0,
    "regenerate.batch_size": 1,
    "evaluation.lossless_check": False,
    "training.activation_checkpointing": True,
    "training.batch_size": 1,
    "target.sharding": "fsdp",
    "data.max_length": 256,
}


@dataclass(frozen=True)
class Advice:
    """Changes that, made together, let the run fit. `saves`: bytes at the peak."""

    changes: tuple[str, ...]
    saves: float


def advise(plan: Plan) -> list[Advice]:
    """Ways to make the run fit: single changes of the recipe, all of them together if none will do,
    other devices."""
    advice = [Advice((text,), plan.needed - needed) for text, needed in _alone(plan)] or _together(
        plan
    )
    if plan.device.kind != CPU:
        for key, device in sorted(DEVICES.items(), key=lambda item: item[1].memory):
            if (
                device.memory > plan.device.memory
                and needed_with(plan, plan.recipe, device) <= USABLE * device.memory
            ):
                return [*advice, Advice((f"--gpu {key}",), 0.0)]
    return advice


def needed_with(
    plan: Plan, recipe: Recipe, device: Device | None = None, count: int | None = None
) -> float:
    """Bytes of one device, had the recipe been another one. Shapes of target and drafter stay."""
    outlines = [
        replace(s.outline, recipe=part)
        for s, (_, part) in zip(plan.stages, recipe.training_stages())
    ]
    stages = [memory(each, processes=count or plan.count) for each in outlines]
    return peak_of(stages).total + (device or plan.device).context


def _alone(plan: Plan) -> Iterator[tuple[str, float]]:
    """Each key by itself, at the first value that lets the run fit, with the bytes needed then."""
    for key in KEYS:
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
    """Key after key, each at the first value that makes the run fit or the last that helps, until
    it does."""
    recipe, least, texts = plan.recipe, plan.needed, dict[str, str]()
    for key in KEYS:
        for text, changed in _values(plan, recipe, key):
            if (needed := needed_with(plan, changed)) < least:
                least, recipe, texts[key] = needed, changed, text
            if least <= plan.available:
                return [Advice(tuple(texts.values()), plan.needed - least)]
    return []


def _values(plan: Plan, recipe: Recipe, key: str) -> Iterator[tuple[str, Recipe]]:
    """Smaller and smaller values of a key: (how to write it, the recipe)."""
    section, _, name = key.partition(".")
    least, value = KEYS[key], getattr(getattr(recipe, section), name)
    tried = [least] if value != least else []
    if type(least) is int:
        tried = [v for i in range(1, value.bit_length() + 1) if (v := value >> i) > least] + [
            least
        ] * (value > least)
    if key == "target.sharding" and plan.count == 1:
        tried = []
    for each in tried:
        if (changed := _changed(recipe, key, each)) is not None:
            yield _written(recipe, key, each), changed


def _changed(recipe: Recipe, key: str, value: Any) -> Recipe | None:
    """The recipe with another value; stages that name the key follow. None if it is not one
    then."""
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
    """The change as an override on the command line."""
    text = f"{key}={json.dumps(value)}"
    if key == "training.batch_size" and recipe.training.global_batch_size is None:
        text += f" training.gradient_accumulation_steps={_accumulation(recipe, value)}"
    if key == "evaluation.lossless_check" and "lossless_mismatches" in recipe.gates:
        text += " (without the gate lossless_mismatches)"
    return text
