"""The computations of a run, each done once on tensors without memory, at the recipe's shapes (see trace.py).

The training step is the Trainer's own, rounds and replays are the runtime's, and so a family, a loss or an architecture
of a target is counted as it is written, with nothing said about it here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inference.evaluation.expected_acceptance import BATCH_TOKENS, accept_tables, teacher_forced
from inference.kv_cache.ragged_cache import RaggedCache
from inference.sampling.sampler import inverse_cdf, probabilities
from inference.sampling_params import SamplingParams
from speculators.drafter import Drafter, DraftInput
from speculators.layers.attention import SCORES
from speculators.registry import family_class
from speculators.target.frozen_target import FrozenTarget
from speculators.target.probe import needs_eager
from train.data.loss_mask import TokenRow
from train.data.packing import PackedRow, pack
from train.planner.trace import CPU, Tally, Trace, without_memory
from train.planner.work import Work
from train.trainer.joint_target import JointTarget
from train.trainer.optimizers import make_optimizer, optimizers_in
from train.trainer.parallel import fill_gradients
from train.trainer.trainer import Trainer

if TYPE_CHECKING:
    from train.planner.outline import Outline


@dataclass(frozen=True)
class Served:
    """Of rows in the runtime. `cache`: bytes of keys and values; `peak`: of what else is there at a time."""

    work: Work
    cache: int = 0
    peak: int = 0


class Rehearsal:
    """Target and drafter of one stage without memory. What is asked for twice is computed once, and recipes that differ
    in sizes only may share a rehearsal."""

    def __init__(self) -> None:
        self._known: dict[tuple, Any] = {}

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # -------------------------------------------------------------- training

    def step(self, plan: Outline, rows: int) -> dict[str, Tally]:
        """One micro-step over `rows` rows: "features", "drafter" and "loss"."""
        t = plan.recipe.training
        key = ("step", rows, plan.recipe.data.max_length, plan.chunk_size, t.activation_checkpointing)
        return self._once(key, lambda: self._step(plan, rows))

    def _step(self, plan: Outline, rows: int) -> dict[str, Tally]:
        chunk = {"training": plan.recipe.training.model_copy(update={"loss_chunk_size": plan.chunk_size})}
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast == torch.bfloat16)
        process = SimpleNamespace(
            device=CPU, process_index=0, num_processes=1, distributed_type=None, autocast=lambda: autocast
        )
        packed, joint = _rows(plan, rows), self._joint(plan)
        target, head = self._target(plan, plan.target.dtype), self._head(plan)
        with _as_on(plan.device.type), Trace() as trace:
            trainer = Trainer(
                plan.recipe.model_copy(update=chunk),
                target,
                head,
                packed,
                accelerator=process,  # type: ignore[arg-type]
                folder=Path(),
                joint=joint,
            )
            trainer.module.train()
            batch, objective = trainer.features.batch(range(rows)), trainer._objective

            def counted(*given: Any) -> Any:
                with trace.phase("loss"):
                    return objective(*given)

            trainer._objective = counted  # type: ignore[method-assign]
            with trace.phase("features"):
                features = trainer._features(trainer.features, list(range(rows)), batch)
            with trace.phase("drafter"):
                trainer._micro_step(features, torch.ones_like(trainer.depth_weights), supervised=1.0)
            trainer.optimizer.zero_grad()
        return trace.phases

    def update(self, plan: Outline) -> tuple[Tally, int]:
        """Clipping and the optimizer's step, and the bytes of the states that it keeps."""
        return self._once(("update",), lambda: self._update(plan))

    def _update(self, plan: Outline) -> tuple[Tally, int]:
        joint = self._joint(plan)
        others = joint.trainable_parameters() if joint else []
        head = self._head(plan)
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
        kept = [v for o in optimizers_in(optimizer) for state in o.state.values() for v in state.values()]
        return tally, sum(t.numel() * t.element_size() for t in kept if isinstance(t, Tensor))

    def adapter_parameters(self, plan: Outline) -> int:
        """Of the LoRA of a target that is trained along."""
        joint = self._joint(plan)
        return sum(p.numel() for p in joint.trainable_parameters()) if joint else 0

    # -------------------------------------------------------------- the runtime

    def prefill(self, plan: Outline, rows: int, length: int, dtype: torch.dtype | None = None) -> Served:
        """Prompts of `length` tokens, side by side."""
        dtype = dtype or plan.target.dtype

        def make() -> Served:
            target = self._target(plan, dtype)
            with Trace() as trace:
                target(torch.zeros(rows, length, dtype=torch.long))
            return Served(trace.tally.work, peak=trace.tally.peak)

        return self._once(("prefill", rows, length, dtype), make)

    def round(
        self, plan: Outline, rows: int, context: int, dtype: torch.dtype | None = None, *, drafts: int = 0, new: int = 1
    ) -> Served:
        """One round over texts of `context` tokens, sampling included. With `drafts` the drafter reads the features of
        `new` tokens per row and drafts, and the target verifies."""
        dtype = dtype or plan.target.dtype
        return self._once(
            ("round", rows, context, dtype, drafts, new), lambda: self._round(plan, rows, context, dtype, drafts, new)
        )

    def _round(self, plan: Outline, rows: int, context: int, dtype: torch.dtype, drafts: int, new: int) -> Served:
        target, drafter = self._target(plan, dtype), self._served(plan, dtype)
        caches = [RaggedCache(rows, 2 * (context + drafts + 1)) for _ in range(2)]  # their capacity doubles
        ids, noise = torch.zeros(rows, drafts + 1, dtype=torch.long), torch.zeros(rows * (drafts + 1))
        for cache in caches:  # texts are hardly ever of one length
            cache.lengths[:] = [context - row % 2 for row in range(rows)]

        def one() -> None:
            mask, places = caches[0].mask(0, rows, drafts + 1), caches[0].position_ids(0, rows, drafts + 1)
            taps, last = target(ids, places, mask, caches[0].view(0, rows, drafts + 1))
            inverse_cdf(probabilities(target.logits(last).flatten(0, 1), SamplingParams()), noise)
            if drafts:
                caches[1].lengths[:] = [length - new for length in caches[0].lengths]
                taps, last = (t if t is None else t[:, :new] for t in (taps, last))
                sample = lambda logits: probabilities(logits, SamplingParams()).argmax(-1)
                drafter.draft(DraftInput(caches[1], 0, rows, ids[:, :new], taps, last, [new] * rows), drafts, sample)

        with torch.no_grad(), Trace():
            one()  # makes the caches
            with Trace() as trace:
                one()
        return Served(trace.tally.work, sum(cache.bytes() for cache in caches), trace.tally.peak)

    def replay(self, plan: Outline, prompt: int, response: int) -> Work:
        """Expected acceptance of one text: teacher-forced features, the unroll, both distributions at every depth."""
        return self._once(("replay", prompt, response), lambda: self._replay(plan, prompt, response))

    def _replay(self, plan: Outline, prompt: int, response: int) -> Work:
        target, drafter = self._target(plan, plan.target.dtype), self._served(plan, plan.target.dtype)
        K = plan.recipe.evaluation.num_speculative_tokens
        texts = [([0] * prompt, [0] * response)] * max(BATCH_TOKENS // (prompt + response), 1)
        params = SamplingParams(temperature=1.0)
        with torch.no_grad(), _as_on(plan.device.type), Trace() as trace:
            features = teacher_forced(target, texts)
            accept_tables(target, drafter, features, texts, params, min(K, drafter.max_depth or K))
        return trace.tally.work * (1 / len(texts))

    # -------------------------------------------------------------- models

    def _target(self, plan: Outline, dtype: torch.dtype) -> FrozenTarget:
        def make() -> FrozenTarget:
            model = copy.deepcopy(plan.target.model).to(dtype)
            if plan.recipe.target.attn_implementation == "eager" or needs_eager(plan.target.config):
                model.set_attn_implementation("eager")
            return FrozenTarget(without_memory(model), plan.drafter.tap_layers)

        return self._once(("target", dtype), make)

    def _joint(self, plan: Outline) -> JointTarget | None:
        section = plan.recipe.joint
        if section is None:
            return None

        def make() -> JointTarget:
            target = self._target(plan, plan.target.dtype)
            with Trace():
                joint = JointTarget(target, section)
            without_memory(target.model)
            return joint

        return self._once(("joint",), make)

    def _head(self, plan: Outline) -> Drafter:
        """The drafter in training."""

        def make() -> Drafter:
            return without_memory(copy.deepcopy(plan.head)).attach(self._target(plan, plan.target.dtype))

        return self._once(("head",), make)

    def _served(self, plan: Outline, dtype: torch.dtype) -> Drafter:
        """The drafter as it is exported."""

        def make() -> Drafter:
            with torch.device("meta"):
                drafter = family_class(plan.drafter.family)(plan.drafter).to(dtype).requires_grad_(False).eval()
            return without_memory(drafter).attach(self._target(plan, dtype))

        return self._once(("served", dtype), make)


@contextmanager
def _as_on(kind: str) -> Iterator[None]:
    """Attention in chunks of the size that it would have on a device of this kind."""
    before = SCORES["cpu"]
    SCORES["cpu"] = SCORES.get(kind, SCORES["cuda"])
    try:
        yield
    finally:
        SCORES["cpu"] = before


def _rows(plan: Outline, count: int) -> list[PackedRow]:
    """Full rows of texts of the mean length, a response behind each prompt; where nothing was counted all tokens are
    supervised, which costs the most."""
    T, packing, rows = plan.recipe.data.max_length, plan.recipe.data.packing, sum(s.rows for s in plan.sources)
    length = min(max(round(plan.tokens / rows), 2), T) if packing and plan.tokens and rows else T

    def text(length: int) -> TokenRow:
        response = max(round(length * plan.supervised_share), 1)
        return TokenRow(np.zeros(length), np.arange(length) >= length - response)

    rest = [text(T % length)] * count if T % length else []
    return pack([text(length)] * (count * (T // length)) + rest, T, packing=packing)
