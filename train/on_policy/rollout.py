"""Texts that the drafter in training had a part in, and who writes them.

Real speculative decoding gives text of the target's own distribution and, beside it, what the drafter proposed in every
round and where verification ended it. Knows no loss, no loop and no rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference import LLM, SamplingParams
from inference.metrics import SpecDecodeCounters
from inference.requests.request import Request
from inference.spec_decode.proposal import Proposal
from speculators.drafter import Drafter
from speculators.target.frozen_target import FrozenTarget
from train.recipe.data_sections import RegenerateSection
from train.regeneration.regenerate import temperatures_of


@dataclass(frozen=True)
class Round:
    """One verification: the text was `length` tokens long, `accepted` of the drafts were kept."""

    length: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Rollout:
    """A prompt, the text that was written, and the rounds it was written in: none where nothing was verified."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    rounds: tuple[Round, ...] = ()

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Rollout:
        """Of what `asdict` made of one, after JSON."""
        rounds = [Round(each["length"], tuple(each["drafts"]), each["accepted"]) for each in tree["rounds"]]
        return cls(tuple(tree["prompt_ids"]), tuple(tree["output_ids"]), tuple(rounds))

    def counters(self) -> SpecDecodeCounters:
        """Of its rounds, as the engine counts them: drafts after the end of the text were not accepted."""
        found, end = SpecDecodeCounters(), len(self.prompt_ids) + len(self.output_ids)
        for each in self.rounds:
            found.add(len(each.drafts), min(each.accepted, end - each.length))
        return found


class Writer(Protocol):
    """Writes texts to prompts; what it writes depends on the weights of `drafter`, prompts and seeds alone."""

    def write(
        self, drafter: Drafter, prompts: Sequence[Sequence[int]], seeds: Sequence[int], share: tuple[int, int] = (0, 1)
    ) -> list[Rollout]:
        """One text per prompt, in order. `drafter` is the one in training; it is left as it is. `share` (i, n): the
        part of the i-th of n writers, every n-th text."""
        ...


class RoundLog:
    """What `Engine.on_round` is told, kept by request."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Round]] = defaultdict(list)

    def __call__(self, requests: Sequence[Request], proposal: Proposal, new_tokens: Sequence[Sequence[int]]) -> None:
        drafted = proposal.token_ids.tolist()
        for request, drafts, count, new in zip(requests, drafted, proposal.counts, new_tokens, strict=True):
            logged = Round(len(request.token_ids), tuple(drafts[:count]), len(new) - 1)
            self.rounds[request.request_id].append(logged)


class LLMWriter:
    """A frozen copy of the drafter, in the target's precision, drafts for the target or writes by itself.

    num_speculative_tokens: drafts per verification; None: the drafter writes by itself, as only a draft model can.
    """

    def __init__(
        self,
        target: FrozenTarget,
        *,
        num_speculative_tokens: int | None,
        sampling: RegenerateSection,
        max_new_tokens: int,
        max_length: int,
        batch_size: int,
        tokenizer: Any = None,
    ) -> None:
        """`sampling`: temperatures, top_p and top_k; `max_length`: of prompt and text together; `tokenizer`: for the
        tokens that end a text."""
        self.target, self.tokenizer, self.num_speculative_tokens = target, tokenizer, num_speculative_tokens
        self.sampling, self.max_new_tokens, self.max_length = sampling, max_new_tokens, max_length
        self.batch_size = batch_size

    def write(
        self, drafter: Drafter, prompts: Sequence[Sequence[int]], seeds: Sequence[int], share: tuple[int, int] = (0, 1)
    ) -> list[Rollout]:
        """See `Writer.write`."""
        log, copy = RoundLog(), drafter.snapshot(self.target.dtype)
        alone = self.num_speculative_tokens is None
        writer = copy.writer if alone else self.target
        assert writer is not None, "the recipe lets a drafter write that cannot"
        llm = LLM._assemble(
            writer,
            tokenizer=self.tokenizer,
            drafter=None if alone else copy,
            num_speculative_tokens=self.num_speculative_tokens or 1,
            max_num_seqs=self.batch_size,
            max_num_batched_tokens=max(512, 32 * self.batch_size),
            on_round=None if alone else log,
        )
        mine = slice(share[0], None, share[1])
        temperatures = temperatures_of(self.sampling.temperatures, len(prompts))[mine]
        prompts, seeds = prompts[mine], seeds[mine]
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                max_tokens=min(self.max_new_tokens, self.max_length - len(prompt)),
                seed=seed,
            )
            for prompt, seed, temperature in zip(prompts, seeds, temperatures, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [
            Rollout(tuple(prompt), tuple(output.outputs[0].token_ids), tuple(log.rounds[output.request_id]))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
