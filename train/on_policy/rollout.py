"""Rollouts: texts of the drafter in training, by speculative decoding or by it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.inference import SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.recipe.data_sections import deal_temperatures
from draftsmith.train.recipe.recipe import Recipe


@dataclass(frozen=True)
class Rollout:
    """A prompt, the text that was written, and the fate of drafts: none where the drafter wrote
    it."""

    prompt_ids: list[int]
    output_ids: list[int]
    num_drafts: int = 0  # verifications
    num_accepted: int = 0  # draft tokens


class RolloutWriter:
    """A frozen copy of the drafter, in the target's precision, drafts for the target or writes by
    itself, as only a draft model can."""

    def __init__(self, target: FrozenTarget, recipe: Recipe, tokenizer: Any = None) -> None:
        """`tokenizer`: for the tokens that end a text."""
        if recipe.on_policy is None:
            raise ValueError("the recipe has no on_policy section")
        self.target = target
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.section = recipe.on_policy

    def write(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        part: tuple[int, int] = (0, 1),
    ) -> list[Rollout]:
        """One text per prompt; it depends on the drafter's weights, prompts and seeds alone.

        `drafter` is the one in training; it is left as it is. `part` (i, n): every n-th text from
        the i-th on."""
        llm = self._llm(drafter.snapshot(self.target.dtype))
        sampling = self.recipe.regenerate
        own_part = slice(part[0], None, part[1])
        temperatures = deal_temperatures(sampling.temperatures, len(prompts))[own_part]
        prompts = prompts[own_part]
        most = self.section.max_new_tokens
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=min(most, self.recipe.data.max_length - len(prompt)),
                seed=seed,
            )
            for prompt, seed, temperature in zip(prompts, seeds[own_part], temperatures)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        rollouts = []
        for output in llm.generate(requests, params, use_tqdm=False):
            text = output.outputs[0]
            counts = output.outputs[0].spec_decode_metrics
            ids = list(output.prompt_token_ids), list(text.token_ids)
            rollouts.append(Rollout(*ids, counts.num_drafts, counts.num_accepted_tokens))
        return rollouts

    def _llm(self, copy: Drafter) -> TextGenerator:
        """The engine in which `copy` drafts for the target, or writes alone."""
        alone = self.recipe.drafter_writes()
        writer = copy.writer if alone else self.target
        assert writer is not None, "the recipe lets a drafter write that cannot"
        drafts = self.recipe.evaluation.num_speculative_tokens
        rows = self.recipe.regenerate.batch_size
        return TextGenerator.from_modules(
            writer,
            tokenizer=self.tokenizer,
            drafter=None if alone else copy,
            drafting={"num_speculative_tokens": drafts},
            options=EngineOptions(max_num_seqs=rows, max_num_batched_tokens=max(512, 32 * rows)),
        )
