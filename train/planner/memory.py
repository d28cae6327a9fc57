"""Bytes: of one device at the peak of each stage of a run, and of its folder on disk.

What is made of tensors whose shapes are known (weights, gradients, optimizer states, features, checkpoints) is exact;
activations and working memory follow formulas that say "about". Knows sizes; runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inference.evaluation.evaluate import EvaluationSettings
from speculators.drafter import Drafter
from speculators.layers.attention import recomputes_scores
from speculators.precision import as_dtype
from train.features.prefetch import looks_ahead
from train.losses.chunked import default_chunk_size
from train.planner.outline import Outline
from train.recipe.sections import TrainingSection
from train.trainer.optimizers import Together, make_optimizer
from train.trainer.parallel import MESSAGE_BYTES

FRAGMENTATION = 0.1  # of all that comes and goes: what an allocator cannot give out
FIRST_CAPACITY = (
    256  # positions of a cache of keys and values, which doubles from there (inference/kv_cache/ragged_cache.py)
)
LIBRARIES = 48 << 20  # of a process on a CPU: what they take once they are used (the middle of what is left over by the
# other parts in the runs that scripts/bench_plan.py fits on)
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
        """At the peak."""
        return self.held | max(self.passing.values(), key=_sum, default={})

    @property
    def allowance(self) -> int:
        """For fragmentation, of what comes and goes."""
        return round(FRAGMENTATION * max(map(_sum, self.passing.values()), default=0))

    @property
    def total(self) -> int:
        return _sum(self.parts) + self.allowance


def memory(plan: Outline, *, processes: int = 1, device: str = "cpu") -> list[StageMemory]:
    """Of each stage of a run that takes any, in their order. `device`: the kind, as torch calls it."""
    stages = [_training(plan, processes, device)]
    if plan.recipe.regenerate.enabled or plan.validation:
        r = plan.recipe.regenerate
        most = r.max_new_tokens if r.enabled else plan.recipe.evaluation.max_tokens
        longest = min(plan.recipe.data.max_length, longest_prompt(plan) + most)
        held = {"target's weights": _target_bytes(plan, processes)}
        stages.insert(0, StageMemory("regenerate", held, {"decode": _generation(plan, r.batch_size, longest)}))
    if plan.recipe.evaluation.prompts or plan.recipe.data.validation:
        stages += measuring(plan)
    return stages


# --------------------------------------------------------------------------------------------- training


def _training(plan: Outline, processes: int, device: str) -> StageMemory:
    recipe, t = plan.recipe, plan.recipe.training
    (B, _), T, K = plan.micro_steps(processes), recipe.data.max_length, plan.depths
    kept = int(t.keep_features_gb * 2**30)
    if plan.tokens:
        kept = min(kept, plan.tokens * plan.feature_bytes)
    held = {
        "target's weights": _target_bytes(plan, processes),
        **({"libraries at work": LIBRARIES} if device == "cpu" else {}),
        "drafter: weights": state_bytes(plan.head),
        "drafter: gradients": 4 * plan.trainable,
        f"drafter: states of {t.optimizer}": optimizer_bytes(plan.head, t),
        **({"features kept between epochs, at most": kept} if kept else {}),
        **({"adapter on the target, with its optimizer": 16 * adapter_parameters(plan)} if recipe.joint else {}),
    }
    head = sum(p.numel() for p in plan.head.head_parameters())
    largest = max(p.numel() for p in plan.head.trainable_parameters())
    chunk = plan.drafter.chunk_bytes(B, T, device)
    features = {f"features of {B} x {T} tokens": B * T * plan.feature_bytes}
    learning = {
        **features,
        f"activations of {K} depths": activations(plan, B),
        f"one loss chunk of {chunk_size(plan, device)} tokens": _chunk_bytes(plan, device),
        "gradients of the output head, in the making": 4 * head,
        **({"a chunk of attention in work": chunk} if chunk else {}),
    }
    forward = {
        "the target's forward": _forward_bytes(plan, B * T),
        "masks of packed rows": B * T * T * (1 + 2 * plan.target.dtype.itemsize),
    }
    if recipe.joint:
        learning |= {"activations of the target": B * T * plan.target.attention.layers * _layer_values(plan) * 4}
    if looks_ahead(recipe, device):
        learning["the coming batch's features and the forward that makes them"] = _sum(forward | features)
    updating = {
        "the optimizer's working memory": 4 * (largest if device == "cpu" else plan.trainable),
        **({"gradients summed over processes": 2 * (MESSAGE_BYTES + 4 * largest)} if processes > 1 else {}),
    }
    return StageMemory("train", held, {"learn": learning, "target": forward | features, "update": updating})


def _target_bytes(plan: Outline, processes: int) -> int:
    """Of its weights on one device; sharded ones are gathered a layer at a time, the next one ahead."""
    whole = plan.target.num_parameters * plan.target.dtype.itemsize
    if processes == 1 or not sharded(plan):
        return whole
    return whole // processes + 2 * whole // max(plan.target.num_layers, 1)


def sharded(plan: Outline) -> bool:
    """Whether each process holds a part of the target only."""
    return plan.recipe.target.sharding != "none"


def checkpointed(plan: Outline) -> bool:
    """Whether depths are computed again in the backward pass."""
    return plan.recipe.training.activation_checkpointing


def activations(plan: Outline, rows: int) -> int:
    """What an unroll over `rows` rows keeps for its backward pass, about: of the slots that have a term, where the rest
    is not computed. Recomputed depths keep what they read, and one of them is there whole."""
    T, K = plan.recipe.data.max_length, plan.depths
    width = plan.autocast.itemsize
    asked = bool(plan.head.multiplied(0)[1])
    slots = rows * T * (plan.used_share if asked else 1.0)
    one = plan.drafter.activation_bytes(T, width, recompute=recomputed_scores(plan, rows, slots / rows))
    one += (K - 1) * plan.drafter.look_back_bytes(width) // 2  # on average of the depths
    depths = K if any(map(len, plan.head.multiplied(K - 1))) else 1  # or one pass serves them all
    gathered = K * 4 * plan.drafter.hidden_size  # states for the loss, and their gradients
    if checkpointed(plan) and depths > 1:
        return round(slots * (one + 3 * depths * width * plan.drafter.hidden_size + gathered))
    return round(slots * (depths * one + gathered))


def recomputed_scores(plan: Outline, rows: int, queries: float) -> bool:
    """Whether the head's attention makes its scores again, over rows with `queries` slots that ask."""
    a = plan.drafter.attention
    return bool(a.layers) and recomputes_scores(
        rows, a.heads // a.layers, math.ceil(queries), plan.recipe.data.max_length
    )


def adapter_parameters(plan: Outline) -> int:
    """Of the LoRA of a target that is trained along, about: r x (in + out) of every matrix."""
    return round(plan.recipe.joint.r * plan.target.products.values) if plan.recipe.joint else 0


def chunk_size(plan: Outline, device: str) -> int:
    """Rows whose logits exist at once."""
    vocabulary = max(plan.target.vocab_size, plan.drafter.draft_vocab_size)
    return plan.recipe.training.loss_chunk_size or default_chunk_size(vocabulary, torch.device(device))


def _chunk_bytes(plan: Outline, device: str) -> int:
    rows = chunk_size(plan, device)
    return rows * 4 * (4 * plan.target.vocab_size + 2 * plan.drafter.draft_vocab_size)


def _forward_bytes(plan: Outline, tokens: int) -> int:
    """Working memory of the target's forward without gradients: what one layer passes on, some of it in float32."""
    return tokens * _layer_values(plan) * (plan.target.dtype.itemsize + 1)


def _layer_values(plan: Outline) -> int:
    """Read and written around the products of one layer, per token."""
    return round(plan.target.products.values / max(plan.target.num_layers, 1))


def state_bytes(drafter: Drafter) -> int:
    """Of its tensors as training holds and saves them, float32."""
    return sum(t.numel() * (4 if t.is_floating_point() else t.element_size()) for t in drafter.state_dict().values())


def optimizer_bytes(drafter: Drafter, training: TrainingSection) -> int:
    """Of the states that the recipe's optimizer keeps: two moments and a counter, or one momentum."""
    made = make_optimizer(drafter, training)
    total = 0
    for optimizer in made.optimizers if isinstance(made, Together) else [made]:
        for group in optimizer.param_groups:
            sizes = [4 * p.numel() for p in group["params"]]
            total += sum(sizes) if isinstance(optimizer, torch.optim.Muon) else 2 * sum(sizes) + 4 * len(sizes)
    return total


# --------------------------------------------------------------------------------------------- writing and measuring


def longest_prompt(plan: Outline) -> int:
    """In tokens, of those that were counted: a cache is as wide as its longest text. Where none was counted, a whole
    row."""
    return max((s.longest_prompt for s in (*plan.sources, *plan.validation)), default=0) or plan.recipe.data.max_length


def _capacity(longest: int) -> int:
    """Positions that a cache holds for texts of `longest` tokens."""
    capacity = FIRST_CAPACITY
    while capacity < longest:
        capacity *= 2
    return capacity


def cache_bytes(plan: Outline, rows: int, longest: int, itemsize: int | None = None) -> int:
    """Keys and values of `rows` texts of up to `longest` tokens, at the capacity that the cache grows to."""
    return rows * _capacity(longest) * plan.target.attention.kv_values * (itemsize or plan.target.dtype.itemsize)


def _generation(plan: Outline, rows: int, longest: int, itemsize: int | None = None) -> Parts:
    V, batched = plan.target.vocab_size, max(512, 32 * rows)  # tokens of one prefill (pipeline/data_stage.py)
    return {
        f"keys and values of {rows} texts of up to {longest} tokens": cache_bytes(plan, rows, longest, itemsize),
        "a prefill": _forward_bytes(plan, batched),
        "logits and distributions": 4 * 4 * rows * V,
    }


def measuring(plan: Outline) -> list[StageMemory]:
    """The export in the runtime, one engine after the other: target, drafter and caches in their own precision, then in
    float32 where the same tokens are looked for."""
    e, target, usual = plan.recipe.evaluation, plan.target, EvaluationSettings()
    workloads = max(sum(s.workloads for s in plan.validation), len(e.prompts), 1)
    engines = {"measure": (max(usual.rows, e.batch_size), e.prompts_per_workload, target.dtype.itemsize, True)}
    if e.lossless_check:
        engines[EXACT] = (usual.rows, usual.lossless_prompts, 4, False)
    found = []
    for name, (most, prompts, itemsize, replays) in engines.items():
        rows = min(most, prompts * workloads)
        held = {
            "target's weights": target.num_parameters * itemsize,
            "drafter's weights": (plan.trainable + plan.frozen) * itemsize,
            **({"drafter's weights, for replay": (plan.trainable + plan.frozen) * itemsize} if replays else {}),
        }
        served = _generation(plan, rows, longest_prompt(plan) + e.max_tokens, itemsize)
        found.append(StageMemory(name, held, {"served": served}))
    return found


# --------------------------------------------------------------------------------------------- disk


def disk(plan: Outline) -> Parts:
    """Bytes below the run's folder at its end. Tensors alone: headers of files add some kB."""
    recipe, config = plan.recipe, plan.drafter
    exported = plan.target.checkpoint_dtype if recipe.export.dtype == "auto" else as_dtype(recipe.export.dtype)
    kept = recipe.training.keep_last
    whole = plan.trainable + plan.frozen
    alone = getattr(config, "adapter_of", None) is not None  # of a draft model
    maps = 8 * config.draft_vocab_size + config.vocab_size if config.reduced_vocabulary else 0  # d2t, t2d
    return {
        f"checkpoints ({kept} kept, one being written)": (kept + 1) * checkpoint_bytes(plan),
        "best weights": state_bytes(plan.head),
        "export": plan.trainable * 4 if alone else whole * exported.itemsize + maps,
        **({"features": plan.cached_bytes * plan.tokens} if recipe.features.mode == "cache" else {}),
        "responses": 7 * plan.supervised if recipe.regenerate.enabled else 0,  # ids as text
    }


def checkpoint_bytes(plan: Outline) -> int:
    """Of one checkpoint."""
    return state_bytes(plan.head) + optimizer_bytes(plan.head, plan.recipe.training)


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
