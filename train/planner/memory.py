"""Bytes of one device at the peak of each stage of a run, and of the run's folder on disk.

Weights, gradients, optimizer states, features and checkpoints follow from their shapes. Activations
and working memory are counted in the computations themselves (rehearsal.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inference.evaluation.evaluate import EvaluationSettings
from speculators.drafter import Drafter
from speculators.precision import as_dtype
from train.features.prefetch import looks_ahead
from train.planner import rehearsal
from train.planner.outline import Outline
from train.trainer.parallel import MESSAGE_BYTES

FRAGMENTATION = 0.1  # of passing memory: what an allocator cannot give out
LIBRARIES = (
    128 << 20
)  # of a process on a CPU, once they are used: the middle of what scripts/bench_plan.py finds
Parts = dict[str, int]  # bytes, by what takes them
EXACT = "measure in float32"  # the last stage, where the same tokens are looked for


@dataclass(frozen=True)
class StageMemory:
    """`held` for the whole stage; of `passing` only the largest is there at a time."""

    name: str
    held: Parts
    passing: dict[str, Parts] = field(default_factory=dict)

    @property
    def parts(self) -> Parts:
        """The parts at the peak."""
        return self.held | max(self.passing.values(), key=_sum, default={})

    @property
    def allowance(self) -> int:
        """Bytes for fragmentation."""
        return round(FRAGMENTATION * max(map(_sum, self.passing.values()), default=0))

    @property
    def total(self) -> int:
        return _sum(self.parts) + self.allowance


def memory(plan: Outline, *, processes: int = 1) -> list[StageMemory]:
    """The stages of a run that take memory, in their order."""
    recipe, r = plan.recipe, plan.recipe.regenerate
    stages = [training_memory(plan, processes)]
    if r.enabled or plan.validation:
        most = r.max_new_tokens if r.enabled else recipe.evaluation.max_tokens
        longest = min(recipe.data.max_length, longest_prompt(plan) + most)
        held = {"target's weights": _target_bytes(plan, processes)}
        served = _served(plan, r.batch_size, longest, plan.target.dtype)
        stages.insert(0, StageMemory("regenerate", held, {"decode": served}))
    if recipe.measured:
        stages += measuring(plan)
    return stages


def training_memory(plan: Outline, processes: int = 1) -> StageMemory:
    """The memory of the training alone. Gradients are made by the backward pass; with several
    micro-steps they stay."""
    recipe, shared, T = plan.recipe, plan.step_rows(processes), plan.recipe.data.max_length
    B, micro = shared.rows, shared.micro_steps
    step, (update, states) = rehearsal.step(plan, B), rehearsal.update(plan)
    adapter, kept = (
        rehearsal.adapter_parameters(plan),
        int(recipe.training.keep_features_gb * 2**30),
    )
    gradients = {"gradients": 4 * (plan.trainable + adapter)}
    held = {
        "target's weights": _target_bytes(plan, processes),
        "libraries at work": LIBRARIES if plan.device.type == "cpu" else 0,
        "drafter: weights": state_bytes(plan.head),
        f"states of {recipe.training.optimizer}": states,
        "features kept between epochs, at most": (
            min(kept, plan.tokens * plan.feature_bytes) if plan.tokens else kept
        ),
        "adapter on the target": 4 * adapter,
    } | (gradients if micro > 1 else {})
    features = {f"features of {B} x {T} tokens": B * T * plan.feature_bytes}
    peak, before = max(step["drafter"].peak, step["loss"].peak), step["loss"].entered
    made = "" if micro > 1 else " and gradients"
    learning = features | {
        f"activations of {plan.depths} depths": before - _sum(features),
        f"one loss chunk of {plan.chunk_size} tokens, the backward pass{made}": peak - before,
    }
    if looks_ahead(recipe, plan.device.type):
        learning["the coming batch's features and the forward that makes them"] = step[
            "features"
        ].peak
    largest = max(p.numel() for p in plan.head.trainable_parameters())
    updating = ({} if micro > 1 else gradients) | {
        "the optimizer's working memory": update.peak,
        "gradients summed over processes": (
            2 * (MESSAGE_BYTES + 4 * largest) if processes > 1 else 0
        ),
    }
    forward = features | {"the target's forward": step["features"].peak - _sum(features)}
    passing = {"learn": learning, "target": forward, "update": updating}
    return StageMemory("train", {name: size for name, size in held.items() if size}, passing)


def _target_bytes(plan: Outline, processes: int) -> int:
    """Bytes of its weights on one device; sharded ones are gathered a layer at a time, the next one
    ahead."""
    whole = plan.target.num_parameters * plan.target.dtype.itemsize
    if processes == 1 or plan.recipe.target.sharding == "none":
        return whole
    return whole // processes + 2 * whole // max(plan.target.num_layers, 1)


def state_bytes(drafter: Drafter) -> int:
    """Bytes of its tensors as training holds and saves them, in float32."""
    return sum(
        t.numel() * (4 if t.is_floating_point() else t.element_size())
        for t in drafter.state_dict().values()
    )


def longest_prompt(plan: Outline) -> int:
    """Tokens of the longest prompt that was counted: a cache is as wide as its longest text. A
    whole row where none was counted."""
    return (
        max((s.longest_prompt for s in (*plan.sources, *plan.validation)), default=0)
        or plan.recipe.data.max_length
    )


def _served(plan: Outline, rows: int, longest: int, dtype: torch.dtype, drafts: int = 0) -> Parts:
    """Bytes that `rows` texts of up to `longest` tokens take in the runtime."""
    prompt = max(512, 32 * rows)  # tokens of one prefill (train/pipeline/data_stage.py)
    filled = rehearsal.prefill(plan, 1, prompt, dtype)
    decoded, cache = rehearsal.decode(plan, rows, longest - 1, dtype, drafts)
    return {
        f"keys and values of {rows} texts of up to {longest} tokens": cache,
        "a forward, its logits and distributions": max(filled.peak, decoded.peak),
    }


def measuring(plan: Outline) -> list[StageMemory]:
    """The export in the runtime, one engine after the other: target, drafter and caches in their
    own precision, then in float32 where the same tokens are looked for."""
    e, target, usual = plan.recipe.evaluation, plan.target, EvaluationSettings()
    workloads = max(sum(s.workloads for s in plan.validation), len(e.prompts), 1)
    engines = {"measure": (max(usual.rows, e.batch_size), e.prompts_per_workload, target.dtype, 2)}
    if e.lossless_check:
        engines[EXACT] = (usual.rows, usual.lossless_prompts, torch.float32, 1)
    stages = []
    for name, (most, prompts, dtype, drafters) in engines.items():
        size, rows = dtype.itemsize, min(most, prompts * workloads)
        held = {
            "target's weights": target.num_parameters * size,
            f"drafter's weights{', and again for replay' if drafters > 1 else ''}": (
                plan.parameters * size * drafters
            ),
        }
        longest = longest_prompt(plan) + e.max_tokens
        served = _served(plan, rows, longest, dtype, e.num_speculative_tokens)
        stages.append(StageMemory(name, held, {"served": served}))
    return stages


# --------------------------------------------------------------------------------------------- disk


def disk(plan: Outline) -> Parts:
    """Bytes of the tensors below the run's folder at its end; headers of files add some kB."""
    recipe, config = plan.recipe, plan.drafter
    exported = (
        plan.target.checkpoint_dtype
        if recipe.export.dtype == "auto"
        else as_dtype(recipe.export.dtype)
    )
    kept = 1
    alone = getattr(config, "adapter_of", None) is not None  # of a draft model
    maps = (
        8 * config.draft_vocab_size + config.vocab_size if config.reduced_vocabulary else 0
    )  # d2t, t2d
    return {
        f"checkpoints ({kept} kept, one being written)": (kept + 1) * checkpoint_bytes(plan),
        "best weights": state_bytes(plan.head),
        "export": plan.trainable * 4 if alone else plan.parameters * exported.itemsize + maps,
        **(
            {"features": plan.cached_bytes * plan.tokens} if recipe.features.mode == "cache" else {}
        ),
        "responses": 7 * plan.supervised if recipe.regenerate.enabled else 0,  # ids as text
    }


def checkpoint_bytes(plan: Outline) -> int:
    """Bytes of one checkpoint."""
    return state_bytes(plan.head) + rehearsal.update(plan)[1]


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
