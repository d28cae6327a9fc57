"""The held-out evaluation of a training: the exact expected acceptance length of its drafter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence

from accelerate import Accelerator

from draftsmith.inference.evaluation.expected_acceptance import WrittenText, expected_acceptance
from draftsmith.inference.spec_decode.replay import ReplayResult, standard_error
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.processes import gather_in_turn, in_turn
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.regeneration.store import Response
from draftsmith.train.trainer.step_records import ERROR, EXPECTED
from draftsmith.train.trainer.trainer import Evaluate


def held_out_measure(recipe: Recipe, held_out: dict[float, list[Response]]) -> str:
    """A hash of all that `held_out_evaluation` depends on beside the drafter."""
    e = recipe.evaluation
    texts = {t: [(r.prompt_ids, r.output_ids) for r in rs] for t, rs in held_out.items()}
    settings = [e.num_speculative_tokens, e.top_p, e.top_k, texts]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def held_out_evaluation(
    recipe: Recipe,
    target: TargetHead,
    held_out: dict[float, list[Response]],
    accelerator: Accelerator | None = None,
) -> Evaluate:
    """Expected acceptance length (exact replay) on texts the target wrote, per temperature, and
    their mean, each with its standard error. `held_out` was written with the filters of
    `evaluation` and is replayed under them, as the report's runtime does. `accelerator`: its
    processes share the texts, and all have the results; None: this one replays all."""
    e = recipe.evaluation

    def replayed(drafter: Drafter, texts: Sequence[WrittenText], t: float) -> list[ReplayResult]:
        return expected_acceptance(
            target, drafter, texts, t, e.num_speculative_tokens, top_p=e.top_p, top_k=e.top_k
        )

    def evaluate(drafter: Drafter) -> dict[str, float]:
        figures: dict[str, float] = {}
        samples = []
        lengths = []
        for t, responses in held_out.items():
            texts = [(r.prompt_ids, r.output_ids) for r in responses]
            if accelerator is None:
                results = replayed(drafter, texts, t)
            else:
                part = replayed(drafter, in_turn(accelerator, texts), t)
                results = gather_in_turn(accelerator, part, len(texts))
            sample: dict[Hashable, ReplayResult] = {}
            for (prompt, _), result in zip(texts, results, strict=True):
                sample[prompt] = sample.get(prompt, ReplayResult()) + result
            samples.append(sample)
            lengths.append(sum(results, ReplayResult()).expected_acceptance_length)
            figures[f"{EXPECTED}_t{t:g}"] = lengths[-1]
            figures[f"{ERROR}_t{t:g}"] = standard_error([sample])
        mean = sum(lengths) / len(lengths)
        return figures | {EXPECTED: mean, ERROR: standard_error(samples)}

    return evaluate
