"""Rollouts: texts that are written with the drafter in training, and the rounds they were written
in.

Speculative decoding gives text of the target's own distribution and, beside it, the drafts of every
round and where verification rejected one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference import LLM, SamplingParams
from inference.engine.engine import EngineOptions
from inference.metrics import SpecDecodeCounters
from inference.requests.request import Request
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.drafter import DraftOptions
from speculators.drafter import Drafter
from speculators.target.frozen_target import FrozenTarget
from train.recipe.recipe import Recipe
from train.regeneration.regenerate import temperatures_of


@dataclass(frozen=True)
class Round:
    """One verification: the text was `length` tokens long, `accepted` of the drafts were kept."""

    length: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Rollout:
    """A prompt, the text that was written, and the rounds it was written in: none where nothing was
    verified."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    rounds: tuple[Round, ...] = ()

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Rollout:
        """The inverse of `asdict`, after JSON."""
        rounds = [Round(r["length"], tuple(r["drafts"]), r["accepted"]) for r in tree["rounds"]]
        return cls(tuple(tree["prompt_ids"]), tuple(tree["output_ids"]), tuple(rounds))

    def counters(self) -> SpecDecodeCounters:
        """Counts its rounds as the engine does: drafts after the end of the text were not
        accepted."""
        counters, end = SpecDecodeCounters(), len(self.prompt_ids) + len(self.output_ids)
        for verified in self.rounds:
            counters.add(len(verified.drafts), min(verified.accepted, end - verified.length))
        return counters


class RoundLog:
    """An `Engine.on_round` callback that keeps the rounds of every request."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Round]] = defaultdict(list)

    def __call__(
        self, requests: Sequence[Request], proposal: Proposal, new_tokens: Sequence[Sequence[int]]
    ) -> None:
        drafted = proposal.token_ids.tolist()
        for request, drafts, count, new in zip(
            requests, drafted, proposal.counts, new_tokens, strict=True
        ):
            logged = Round(len(request.token_ids), tuple(drafts[:count]), len(new) - 1)
            self.rounds[request.request_id].append(logged)


class RolloutWriter:
    """A frozen copy of the drafter, in the target's precision, drafts for the target or writes by
    itself, as only a draft model can."""

    def __init__(self, target: FrozenTarget, recipe: Recipe, tokenizer: Any = None) -> None:
        """`tokenizer`: for the tokens that end a text."""
        if recipe.on_policy is None:
            raise ValueError("the recipe has no on_policy section")
        self.target, self.tokenizer, self.recipe, self.section = (
            target,
            tokenizer,
            recipe,
            recipe.on_policy,
        )

    def write(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        part: tuple[int, int] = (0, 1),
    ) -> list[Rollout]:
        """One text per prompt, in order; it depends on the drafter's weights, prompts and seeds
        alone.

        `drafter` is the one in training; it is left as it is. `part` (i, n): every n-th text from
        the i-th on."""
        log, copy = RoundLog(), drafter.snapshot(self.target.dtype)
        alone, sampling = self.recipe.drafter_writes(), self.recipe.regenerate
        writer = copy.writer if alone else self.target
        assert writer is not None, "the recipe lets a drafter write that cannot"
        drafts = (
            self.section.num_speculative_tokens or self.recipe.evaluation.num_speculative_tokens
        )
        rows = sampling.batch_size
        llm = LLM.from_modules(
            writer,
            tokenizer=self.tokenizer,
            drafter=None if alone else copy,
            drafting=DraftOptions(num_speculative_tokens=drafts),
            on_round=None if alone else log,
            options=EngineOptions(max_num_seqs=rows, max_num_batched_tokens=max(512, 32 * rows)),
        )
        mine = slice(part[0], None, part[1])
        temperatures = temperatures_of(
            self.section.temperatures or sampling.temperatures, len(prompts)
        )[mine]
        prompts, seeds = prompts[mine], seeds[mine]
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=min(
                    self.section.max_new_tokens, self.recipe.data.max_length - len(prompt)
                ),
                seed=seed,
            )
            for prompt, seed, temperature in zip(prompts, seeds, temperatures, strict=True)
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [
            Rollout(
                tuple(prompt),
                tuple(output.outputs[0].token_ids),
                tuple(log.rounds[output.request_id]),
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
