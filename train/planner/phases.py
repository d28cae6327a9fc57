"""The phases of one stage of a run: texts written, features, drafter, loss, optimizer, evaluations,
measurement.

rehearsal.py counts one step, round or replay of each; this file says how often they are done. The
main process alone makes the report; all processes do the rest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

from inference.evaluation.evaluate import EvaluationSettings
from inference.evaluation.suites import load_suite
from train.planner import rehearsal
from train.planner.devices import Work, total
from train.planner.outline import Outline
from train.planner.token_counts import ASSUMED_SHARE, ASSUMED_TOKENS, TokenCount
from train.recipe.sections import EvaluationSection

ASSUMED_TAU = 2.5  # acceptance length of the drafter that is going to be measured
# times regenerate.batch_size: texts that are asked for at once (train/regeneration/regenerate.py)
CHUNK_ROWS = 8
LONGEST = 1.5  # times the mean: the longest response of a chunk
RESPONSES = "responses of the target"  # the phase in which they are written
TRAINING = (
    "features of the target",
    "drafter, forward and backward",
    "logits and loss",
    "optimizer",
)
EVALUATIONS = 10  # of a run that does not say how many


@dataclass(frozen=True)
class Phase:
    """`work` of one device, `times` over."""

    name: str
    work: Work
    times: float = 1.0

    @property
    def whole(self) -> Work:
        return self.work * self.times


@dataclass(frozen=True)
class Texts:
    """`count` texts of `prompt` + `response` tokens, which are means."""

    count: float
    prompt: float
    response: float


def texts_of(sources: list[TokenCount], recipe_length: int, most: int | None = None) -> Texts:
    """The texts of some sources, with responses of at most `most` tokens."""
    count = sum(s.examples or 0 for s in sources)
    tokens, supervised = sum(s.tokens for s in sources), sum(s.supervised for s in sources)
    if not tokens or not count:
        tokens, count = min(ASSUMED_TOKENS, recipe_length), max(count, 1)
        tokens *= count
        supervised = round(tokens * ASSUMED_SHARE)
    response = supervised / count
    return Texts(
        count, max(tokens / count - response, 1), min(response, most) if most else response
    )


def phases(
    plan: Outline, *, steps: int, processes: int = 1, around: bool = False, report: bool = False
) -> list[Phase]:
    """The phases of `steps` optimizer steps. `around`: with the texts that are written for them and
    the evaluations in between; `report`: with what follows the last stage."""
    recipe, shared, found = plan.recipe, plan.step_rows(processes), []
    rows, micro = shared.rows, shared.micro_steps
    if around:
        found += _before(plan, processes)
    if recipe.on_policy is not None:
        found.append(Phase("texts to learn from, on-policy", _on_policy(plan, steps)))
    step = rehearsal.step(plan, rows)
    gathered = Work(sent=_gathered(plan, processes))
    computed = _share_computed(plan, steps, processes)
    found += [
        Phase(TRAINING[0], step["features"].work + gathered, steps * micro * computed),
        Phase(TRAINING[1], step["drafter"].work, steps * micro),
        Phase(TRAINING[2], step["loss"].work, steps * micro),
        Phase(TRAINING[3], rehearsal.update(plan)[0].work + _summed(plan, processes), steps),
    ]
    if around and (texts := _held_out(plan)).count:
        every = recipe.training.eval_every
        times = min(-(-steps // every) if every else EVALUATIONS, steps)
        found.append(Phase("held-out evaluations", _replayed(plan, texts), times))
    if report and recipe.measured:
        found.append(Phase("final measurement", _measurement(plan)))
    return found


def _gathered(plan: Outline, processes: int) -> float:
    """Bytes of a sharded target's layers that one forward gets from the other processes."""
    if plan.recipe.target.sharding == "none":
        return 0.0
    return (processes - 1) / processes * plan.target.num_parameters * plan.target.dtype.itemsize


def _summed(plan: Outline, processes: int) -> Work:
    """The sum of gradients over processes."""
    size = 4 * (plan.trainable + rehearsal.adapter_parameters(plan))
    return (
        Work(traffic=6.0 * size, sent=2 * (processes - 1) / processes * size)
        if processes > 1
        else Work()
    )


def _share_computed(plan: Outline, steps: int, processes: int) -> float:
    """The share of a run's features that is computed, and not kept from an earlier epoch."""
    keep = plan.recipe.training.keep_features_gb * 2**30 * processes
    if plan.recipe.features.mode == "cache":
        keep = math.inf  # on disk
    read = steps * plan.step_rows(processes).rows_per_step
    if not keep or not read or not plan.packed_rows:
        return 1.0
    rows = max(plan.packed_rows, 1.0)
    kept = min(keep / (rows * plan.recipe.data.max_length * plan.feature_bytes), 1.0)
    return max(1 - kept * (1 - min(rows / read, 1.0)), 0.0)


# --------------------------------------------------------------------------------------------- text


def _before(plan: Outline, processes: int) -> list[Phase]:
    """The phases before the first step."""
    recipe, r, found = plan.recipe, plan.recipe.regenerate, []
    if r.enabled:
        texts = _share(texts_of(plan.sources, recipe.data.max_length, r.max_new_tokens), processes)
        found.append(Phase(RESPONSES, generation(plan, texts, r.batch_size, r.max_new_tokens)))
    if (texts := _held_out(plan)).count:
        written = generation(
            plan, _share(texts, processes), r.batch_size, recipe.evaluation.max_tokens
        )
        found.append(Phase("held-out responses", written))
    if wanted := plan.head.start_terms(recipe.drafter):
        B = plan.step_rows().rows
        step = rehearsal.step(plan, B)["features"].work
        rows = wanted / plan.supervised_share / recipe.data.max_length
        found.append(Phase("a start in closed form", step, rows / B))
    return found


def _share(texts: Texts, processes: int) -> Texts:
    """Those that one of the processes writes."""
    return replace(texts, count=math.ceil(texts.count / processes))


def generation(plan: Outline, texts: Texts, rows: int, most: int) -> Work:
    """The target writes texts without drafting: prompts in portions, then rounds with as many rows
    as are left."""
    prompt, per_call = (
        max(round(texts.prompt), 1),
        max(512, 32 * rows),
    )  # tokens of a prefill (pipeline/data_stage.py)
    together = max(min(per_call // prompt, math.ceil(texts.count)), 1)
    prefill = rehearsal.prefill(plan, together, prompt, plan.target.dtype).work * (
        texts.count / together
    )
    chunk = min(CHUNK_ROWS * rows, texts.count)
    longest = min(most, LONGEST * texts.response)
    rounds = (
        longest if chunk <= rows else chunk * texts.response / rows + (longest - texts.response) / 2
    )
    left = max(round(chunk * texts.response / max(rounds, 1)), 1)
    one, _ = rehearsal.decode(plan, left, _middle(texts), plan.target.dtype)
    return prefill + one.work * (rounds * texts.count / chunk)


def _middle(texts: Texts) -> int:
    """Tokens of a text that is half written."""
    return max(round(texts.prompt + texts.response / 2), 2)


def _on_policy(plan: Outline, steps: int) -> Work:
    """On-policy texts, as if the target wrote them without drafting, which costs the most."""
    section, recipe = plan.recipe.on_policy, plan.recipe
    if section is None or not (section.share.end or section.share.start):
        return Work()
    known = texts_of(plan.sources, recipe.data.max_length, section.max_new_tokens)
    texts = Texts(section.prompts, known.prompt, known.response)
    one = generation(
        plan, texts, min(recipe.regenerate.batch_size, section.prompts), section.max_new_tokens
    )
    return one * (steps / section.refresh_every)


# ---------------------------------------------------------------------------------------------
# measuring


def _held_out(plan: Outline) -> Texts:
    """The texts that every evaluation reads."""
    recipe = plan.recipe
    found = texts_of(plan.validation, recipe.data.max_length, recipe.evaluation.max_tokens)
    wanted = recipe.held_out_prompts if plan.validation else 0
    prompts = min(wanted, sum(s.examples or wanted for s in plan.validation))
    return Texts(prompts * len(recipe.evaluation.temperatures), found.prompt, found.response)


def _replayed(plan: Outline, texts: Texts) -> Work:
    return (
        rehearsal.replay(plan, max(round(texts.prompt), 1), max(round(texts.response), 1))
        * texts.count
    )


def _measurement(plan: Outline) -> Work:
    """The acceptance report: with drafting and without, replayed, timed, and compared in
    float32."""
    e, usual = plan.recipe.evaluation, EvaluationSettings()
    known = texts_of(plan.validation or plan.sources, plan.recipe.data.max_length, e.max_tokens)
    own = max(sum(s.workloads for s in plan.validation), len(e.prompts), 0 if e.suites else 1)
    turns = suite_turns(e)
    workloads = own + len(turns)
    rows, cells = max(usual.rows, e.batch_size), workloads * len(e.temperatures)

    def written(
        count: int,
        rows: int,
        dtype: torch.dtype = plan.target.dtype,
        ways: tuple[bool, ...] = (False, True),
    ):
        return total(_written(plan, replace(known, count=count), rows, way, dtype) for way in ways)

    asked = own * e.prompts_per_workload + round(sum(turns.values()))
    done = (written(asked, rows) + _replayed(plan, replace(known, count=asked))) * len(
        e.temperatures
    )
    if e.repeats:
        done += written(max(e.timed_prompts, e.batch_size), e.batch_size) * (e.repeats * cells)
        if e.baseline_transformers:
            timed = written(max(e.timed_prompts, e.batch_size), e.batch_size, ways=(False,))
            done += timed * (e.repeats * cells)
    if e.lossless_check:
        done += written(workloads * usual.lossless_prompts, rows, torch.float32)
    return done


def suite_turns(evaluation: EvaluationSection) -> dict[tuple[str, str], float]:
    """Turns that are asked of each category of each suite."""
    turns: dict[tuple[str, str], float] = {}
    for name, path in evaluation.suite_paths.items():
        read = load_suite(name, path)
        counts = Counter(one.category for one in read)
        for one in read:
            share = min(1.0, (evaluation.suite_prompts or math.inf) / counts[one.category])
            turns[name, one.category] = turns.get((name, one.category), 0.0) + share * len(
                one.turns
            )
    return turns


def _written(plan: Outline, texts: Texts, rows: int, drafting: bool, dtype: torch.dtype) -> Work:
    """Rounds of the engine, `rows` texts at once; with drafting a round verifies K + 1 tokens and
    commits some."""
    K, rows = plan.recipe.evaluation.num_speculative_tokens, min(rows, round(texts.count))
    rounds, kept = texts.count / rows * texts.response, min(ASSUMED_TAU, K + 1)
    one, _ = rehearsal.decode(
        plan, rows, _middle(texts), dtype, *((K, round(kept)) if drafting else ())
    )
    return one.work * (rounds / kept if drafting else rounds)
