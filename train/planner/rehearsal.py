"""Runs the computations of a run on tensors without memory, at the shapes of a recipe, and counts
them (trace.py).

The training step is the Trainer's, rounds and replays are the runtime's. A new family, loss or
architecture of a target needs no code here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from inference.evaluation.expected_acceptance import BATCH_TOKENS, accept_tables, teacher_forced
from inference.kv_cache.ragged_cache import RaggedCache
from inference.sampling.sampler import inverse_cdf, probabilities
from inference.sampling_params import SamplingParams
from speculators.drafter import Drafter, DraftInput
from speculators.layers.attention import SCORES
from speculators.layers.fused_attention import KERNELS
from speculators.registry import family_class
from speculators.target.frozen_target import FrozenTarget
from speculators.target.probe import needs_eager
from train.data.loss_mask import TokenRow
from train.data.packing import PackedRow, pack
from train.losses import chunked
from train.losses.chunked import BLOCK_BYTES, CHUNK_BYTES, CHUNK_ROWS, SMALLEST_CHUNK
from train.losses.products import SLAB_BYTES
from train.planner.devices import Work
from train.planner.trace import CPU, Tally, Trace, without_memory
from train.trainer.joint_target import JointTarget
from train.trainer.optimizers import make_optimizer, optimizers_in
from train.trainer.parallel import fill_gradients
from train.trainer.trainer import Trainer

if TYPE_CHECKING:
    from train.planner.outline import Outline

F = TypeVar("F", bound=Callable)

BLOCK_ROWS = 32  # of a block of the objective without memory, at least


def remembered(by: Callable[[Outline], tuple] = lambda plan: ()) -> Callable[[F], F]:
    """Calls a function of an outline once for the same arguments and the same `by(outline)`
    (`Outline.known`)."""

    def decorate(function: F) -> F:
        @wraps(function)
        def call(plan: Outline, *args: Any) -> Any:
            key = (function.__name__, args, by(plan))
            if key not in plan.known:
                plan.known[key] = function(plan, *args)
            return plan.known[key]

        return cast(F, call)

    return decorate


# ---------------------------------------------------------------------------------------------
# training


@remembered(
    lambda plan: (
        plan.recipe.data.max_length,
        plan.chunk_size,
        plan.recipe.training.activation_checkpointing,
    )
)
def step(plan: Outline, rows: int) -> dict[str, Tally]:
    """Counts one micro-step over `rows` rows as "features", "drafter" and "loss"."""
    packed, joint = packed_rows(plan, rows), _joint(plan)
    target, head = _target(plan, plan.target.dtype, joint is not None), _head(plan)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast == torch.bfloat16)
    process: Any = SimpleNamespace(
        device=CPU,
        process_index=0,
        num_processes=1,
        distributed_type=None,
        autocast=lambda: autocast,
    )
    with (
        _sizes_of(plan.device.type, plan.target.vocab_size),
        Trace() as trace,
        _blocks_repeat(trace),
    ):
        trainer = Trainer(
            plan.recipe, target, head, packed, accelerator=process, folder=Path(), joint=joint
        )
        trainer.chunk_size = plan.chunk_size
        trainer.module.train()
        batch, objective = trainer.features.batch(range(rows)), trainer._objective

        def counted(*given: Any) -> Any:
            with trace.phase("loss"):
                return objective(*given)

        trainer._objective = counted  # type: ignore[assignment,method-assign]
        with trace.phase("features"):
            features = trainer._features(trainer.features, list(range(rows)), batch)
        features = replace(features, seeds=trainer.step_rows.seeds(range(rows)))
        with trace.phase("drafter"):
            trainer._micro_step(
                features, torch.ones_like(trainer.depth_weights), supervised=torch.ones(())
            )
        trainer.optimizer.zero_grad()
    return trace.phases


@remembered()
def update(plan: Outline) -> tuple[Tally, int]:
    """Counts clipping and the optimizer's step, and the bytes of the states that the optimizer
    keeps."""
    joint, head = _joint(plan), _head(plan)
    others = joint.trainable_parameters() if joint else []
    parameters = head.trainable_parameters() + others
    with Trace() as trace:
        optimizer = make_optimizer(head, plan.recipe.training, others)
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = plan.device.type != "cpu"
        fill_gradients(parameters)
        optimizer.step()  # makes the states
        before = trace.live
        with trace.phase("update"):
            torch.nn.utils.clip_grad_norm_(parameters, plan.recipe.training.max_grad_norm)
            optimizer.step()
        optimizer.zero_grad()
    tally = trace.phases["update"]
    tally.peak -= before
    kept = [
        v for o in optimizers_in(optimizer) for state in o.state.values() for v in state.values()
    ]
    return tally, sum(t.nbytes for t in kept if isinstance(t, Tensor))


def adapter_parameters(plan: Outline) -> int:
    """Parameters of the LoRA on a target that is trained along."""
    joint = _joint(plan)
    return sum(p.numel() for p in joint.trainable_parameters()) if joint else 0


# --------------------------------------------------------------------------------------------- the
# runtime


@remembered()
def prefill(plan: Outline, rows: int, length: int, dtype: torch.dtype) -> Tally:
    """Counts the target's forward over `rows` prompts of `length` tokens."""
    target = _target(plan, dtype)
    with Trace() as trace:
        target(torch.zeros(rows, length, dtype=torch.long))
    return trace.tally


@remembered()
def decode(
    plan: Outline, rows: int, context: int, dtype: torch.dtype, drafts: int = 0, new: int = 1
) -> tuple[Tally, int]:
    """Counts one round over `rows` texts of `context` tokens, sampling included, and the bytes of
    keys and values.

    With `drafts` the target verifies them, the drafter reads the features of `new` tokens per row
    and drafts again."""
    target, drafter = _target(plan, dtype), _served(plan, dtype)
    caches = [
        RaggedCache(rows, 2 * (context + drafts + 1)) for _ in range(2)
    ]  # their capacity doubles
    ids, noise = torch.zeros(rows, drafts + 1, dtype=torch.long), torch.zeros(rows * (drafts + 1))
    for cache in caches:  # texts are hardly ever of one length
        cache.lengths[:] = [context - row % 2 for row in range(rows)]

    def one() -> None:
        mask, places = (
            caches[0].mask(0, rows, drafts + 1),
            caches[0].position_ids(0, rows, drafts + 1),
        )
        taps, last = target(ids, places, mask, caches[0].view(0, rows, drafts + 1))
        inverse_cdf(probabilities(target.logits(last).flatten(0, 1), SamplingParams()), noise)
        if drafts:
            caches[1].lengths[:] = [length - new for length in caches[0].lengths]
            taps, last = (t if t is None else t[:, :new] for t in (taps, last))
            read = DraftInput(caches[1], 0, rows, ids[:, :new], taps, last, [new] * rows)
            drafter.draft(
                read, drafts, lambda logits: probabilities(logits, SamplingParams()).argmax(-1)
            )

    with torch.no_grad(), Trace():
        one()  # makes the caches
        with Trace() as trace:
            one()
    return trace.tally, sum(cache.bytes() for cache in caches)


@remembered()
def replay(plan: Outline, prompt: int, response: int) -> Work:
    """Counts the expected acceptance of one text: features, the unroll, both distributions at every
    depth."""
    target, drafter = _target(plan, plan.target.dtype), _served(plan, plan.target.dtype)
    K = plan.recipe.evaluation.num_speculative_tokens
    texts = [([0] * prompt, [0] * response)] * max(BATCH_TOKENS // (prompt + response), 1)
    with torch.no_grad(), _sizes_of(plan.device.type, plan.target.vocab_size), Trace() as trace:
        features = teacher_forced(target, texts)
        accept_tables(
            target, drafter, features, texts, SamplingParams(), min(K, drafter.max_depth or K)
        )
    return trace.tally.work * (1 / len(texts))


# ---------------------------------------------------------------------------------------------
# models and rows


@remembered()
def _target(plan: Outline, dtype: torch.dtype, trained: bool = False) -> FrozenTarget:
    """`trained`: a copy of its own, which a LoRA is put on."""
    model = copy.deepcopy(plan.target.model)
    nn.Module.to(model, dtype)
    if needs_eager(plan.target.config):
        model.set_attn_implementation("eager")
    return FrozenTarget(without_memory(model), plan.drafter.tap_layers)


@remembered()
def _joint(plan: Outline) -> JointTarget | None:
    if plan.recipe.joint is None:
        return None
    target = _target(plan, plan.target.dtype, True)
    with Trace():
        joint = JointTarget(target, plan.recipe.joint)
    without_memory(target.model)
    return joint


@remembered()
def _head(plan: Outline) -> Drafter:
    """The drafter in training."""
    return without_memory(copy.deepcopy(plan.head)).attach(
        _target(plan, plan.target.dtype, plan.recipe.joint is not None)
    )


@remembered()
def _served(plan: Outline, dtype: torch.dtype) -> Drafter:
    """The drafter as it is exported."""
    with torch.device("meta"):
        drafter = (
            family_class(plan.drafter.family)(plan.drafter).to(dtype).requires_grad_(False).eval()
        )
    return without_memory(drafter).attach(_target(plan, dtype))


@contextmanager
def _sizes_of(kind: str, vocabulary: int) -> Iterator[None]:
    """Gives attention and the objective the kernel and the chunks that they have on a device of
    this kind. Blocks of the objective have at least BLOCK_ROWS rows of a large `vocabulary`, as
    each takes as long to walk."""
    tables: list[dict[str, Any]] = [
        SCORES,
        KERNELS,
        CHUNK_ROWS,
        CHUNK_BYTES,
        SMALLEST_CHUNK,
        BLOCK_BYTES,
        SLAB_BYTES,
    ]
    before = [table["cpu"] for table in tables]
    for table in tables:
        table["cpu"] = table.get(kind, table["cuda"])
    threads = torch.get_num_threads()  # which a block on a CPU is shared among
    block = BLOCK_BYTES["cpu"] * (threads if kind == "cpu" else 1)
    BLOCK_BYTES["cpu"] = max(block, 4 * BLOCK_ROWS * vocabulary) // threads
    try:
        yield
    finally:
        for table, value in zip(tables, before, strict=True):
            table["cpu"] = value


@contextmanager
def _blocks_repeat(trace: Trace) -> Iterator[None]:
    """Lets the trace run two blocks of the objective of each shape, and count them for the
    others."""
    run = chunked.score_block

    def score_block(task: chunked.Task, *tensors: Tensor | None) -> Any:
        reduced = None if task.draft_to_target is None else len(task.draft_to_target)
        return trace.repeated(
            (repr(task.mix), task.temperature, reduced), partial(run, task), tensors, {}
        )

    chunked.score_block = score_block  # type: ignore[assignment]
    try:
        yield
    finally:
        chunked.score_block = run


def packed_rows(plan: Outline, count: int) -> list[PackedRow]:
    """Full rows of texts of the mean length, each with its response at the end; where nothing was
    counted all tokens are supervised, which costs the most."""
    T, rows = plan.recipe.data.max_length, sum(s.rows for s in plan.sources)
    length = min(max(round(plan.tokens / rows), 2), T) if plan.tokens and rows else T

    def text(length: int) -> TokenRow:
        response = max(round(length * plan.supervised_share), 1)
        return TokenRow(np.zeros(length), np.arange(length) >= length - response)

    rest = [text(T % length)] * count if T % length else []
    return pack([text(length)] * (count * (T // length)) + rest, T)
