"""The phases of one stage of a run as work: texts written, features, head, objective, optimizer, evaluations, report.

Follows the loop (train/trainer/trainer.py), the objective (train/losses/chunked.py) and the report
(inference/evaluation/evaluate.py) in what they compute, and in which process: texts are written and the report is made
by the main process, the rest by all. Knows sizes and counts; no device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from inference.evaluation.evaluate import EvaluationSettings
from inference.evaluation.expected_acceptance import BATCH_TOKENS
from speculators.drafter import Drafter
from speculators.sizes import Products, products
from train.planner import work
from train.planner.memory import adapter_parameters, checkpointed, chunk_size, recomputed_scores, sharded
from train.planner.outline import Outline
from train.planner.token_counts import ASSUMED_SHARE, ASSUMED_TOKENS, TokenCount
from train.planner.work import Work
from train.trainer.optimizers import Together, make_optimizer

ASSUMED_TAU = 2.5  # acceptance length of the drafter that is going to be measured
CHUNK_ROWS = 8  # times regenerate.batch_size: texts that are asked for at once (train/regeneration/regenerate.py)
LONGEST = 1.5  # times the mean: the longest response of a chunk
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
    """Means: `count` texts of `prompt` + `response` tokens."""

    count: float
    prompt: float
    response: float

    @property
    def length(self) -> float:
        return self.prompt + self.response


def texts_of(sources: list[TokenCount], recipe_length: int, most: int | None = None) -> Texts:
    """What sources hold; with `most`, responses are no longer than that."""
    count = sum(s.examples or 0 for s in sources)
    tokens, supervised = sum(s.tokens for s in sources), sum(s.supervised for s in sources)
    if not tokens or not count:
        tokens, count = min(ASSUMED_TOKENS, recipe_length), max(count, 1)
        tokens *= count
        supervised = round(tokens * ASSUMED_SHARE)
    response = supervised / count
    return Texts(count, max(tokens / count - response, 1), min(response, most) if most else response)


def phases(
    plan: Outline, *, steps: int, processes: int = 1, device: str = "cpu", around: bool = False, report: bool = False
) -> list[Phase]:
    """Of `steps` optimizer steps. `around`: with the texts that are written for them and the evaluations in between;
    `report`: with what follows the last stage."""
    recipe, (_, micro), found = plan.recipe, plan.micro_steps(processes), []
    if around:
        found += _before(plan)
    if recipe.on_policy is not None:
        found.append(Phase("texts to learn from, on-policy", _on_policy(plan, steps)))
    computed = _share_computed(plan, steps, processes)
    found += [
        Phase("features of the target", features(plan, processes), steps * micro * computed),
        Phase("drafter, forward and backward", drafter(plan, processes), steps * micro),
        Phase("logits and loss", objective(plan, processes, device), steps * micro),
        Phase("optimizer", optimizer(plan, processes), steps),
    ]
    if around and (texts := _held_out(plan)).count:
        every = recipe.training.eval_every
        times = min(-(-steps // every) if every else EVALUATIONS, steps)
        found.append(Phase("held-out evaluations", replayed(plan, texts), times))
    if report and (recipe.evaluation.prompts or plan.validation):
        found.append(Phase("final measurement", measurement(plan)))
    return found


def _before(plan: Outline) -> list[Phase]:
    """What is computed before the first step."""
    recipe, found = plan.recipe, []
    r = recipe.regenerate
    if r.enabled:
        texts = texts_of(plan.sources, recipe.data.max_length, r.max_new_tokens)
        found.append(Phase("responses of the target", generation(plan, texts, r.batch_size, r.max_new_tokens)))
    if (texts := _held_out(plan)).count:
        written = generation(plan, texts, r.batch_size, recipe.evaluation.max_tokens)
        found.append(Phase("held-out responses", written))
    if wanted := plan.head.start_terms(recipe.drafter):
        found.append(Phase("a start in closed form", _features(plan, wanted / plan.supervised_share, 1)))
    return found


# --------------------------------------------------------------------------------------------- text


def generation(plan: Outline, texts: Texts, rows: int, most: int) -> Work:
    """Text the target writes without drafting: prompts in portions, then rounds with as many rows as are left."""
    target, per_call = plan.target, max(512, 32 * rows)  # tokens of one prefill (pipeline/data_stage.py)
    asked = texts.count * texts.prompt
    prefills = max(asked / per_call, 1.0)
    prefill = work.forward(
        target.products, asked / prefills, target.dtype, attention=target.attention, keys=texts.prompt
    )
    chunk = min(CHUNK_ROWS * rows, texts.count)
    longest = min(most, LONGEST * texts.response)
    rounds = longest if chunk <= rows else chunk * texts.response / rows + (longest - texts.response) / 2
    decode = _round(plan, max(chunk * texts.response / max(rounds, 1), 1), texts.prompt + texts.response / 2)
    return prefill * prefills + decode * (rounds * texts.count / chunk)


def _round(plan: Outline, rows: float, context: float, each: float = 1.0, dtype: torch.dtype | None = None) -> Work:
    t = plan.target
    return work.decode(
        t.products,
        t.attention,
        t.hidden_size,
        t.vocab_size,
        dtype or t.dtype,
        rows=rows,
        context=context,
        each=each,
    )


def _on_policy(plan: Outline, steps: int) -> Work:
    """As if the target wrote them without drafting, which is the most it can cost."""
    section, recipe = plan.recipe.on_policy, plan.recipe
    if section is None:
        return Work()
    known = texts_of(plan.sources, recipe.data.max_length, section.max_new_tokens)
    texts = Texts(section.prompts, known.prompt, known.response)
    one = generation(plan, texts, min(recipe.regenerate.batch_size, section.prompts), section.max_new_tokens)
    used = steps if section.share.end or section.share.start else 0
    return one * (used / section.refresh_every)


# --------------------------------------------------------------------------------------------- a step


def features(plan: Outline, processes: int) -> Work:
    """The target's forward over one micro-step; under a packed mask every score is computed. A target that is trained
    along goes backward too, for the gradients of its inputs."""
    rows, _ = plan.micro_steps(processes)
    joint = plan.recipe.joint is not None
    return _features(plan, rows * plan.recipe.data.max_length, processes, products=2.0 if joint else 1.0)


def _features(plan: Outline, tokens: float, processes: int, products: float = 1.0) -> Work:
    t = plan.target
    done = work.forward(
        t.products,
        tokens,
        t.dtype,
        attention=t.attention,
        keys=plan.recipe.data.max_length,
        products=products,
        passes=products,
    )
    if processes > 1 and sharded(plan):  # every layer comes from the others
        done += Work(sent=(processes - 1) / processes * t.num_parameters * t.dtype.itemsize)
    return done


def _share_computed(plan: Outline, steps: int, processes: int) -> float:
    """Of the features of a run, those that are not kept from an earlier epoch."""
    keep = plan.recipe.training.keep_features_gb * 2**30 * processes
    if plan.recipe.features.mode == "cache":
        keep = math.inf  # on disk
    read = steps * plan.rows_per_step(processes)
    if not keep or not read or not plan.packed_rows:
        return 1.0
    rows = max(plan.packed_rows, 1.0)
    kept = min(keep / (rows * plan.recipe.data.max_length * plan.feature_bytes), 1.0)
    return max(1 - kept * (1 - min(rows / read, 1.0)), 0.0)


def drafter(plan: Outline, processes: int) -> Work:
    """Every depth of the unroll, forward and backward, and its recomputation where it is not kept."""
    rows, _ = plan.micro_steps(processes)
    T, dtype = plan.recipe.data.max_length, plan.autocast
    slots, attention = float(rows * T), plan.drafter.attention
    used = plan.used_share * slots
    again, matrices = checkpointed(plan), plan.head.weight_matrices()
    whole = sum(p.numel() for p in matrices)
    backward = 1 + sum(p.numel() for p in matrices if p.requires_grad) / max(whole, 1)  # frozen ones pass gradients on
    done = Work(traffic=6 * whole if dtype != torch.float32 else 0)  # cast by autocast
    for depth, (everywhere, asked) in enumerate(depth_products(plan.head, plan.depths)):
        for parts, tokens, attends in ((everywhere, slots, not asked), (asked, used, bool(asked))):
            if not parts.count:
                continue
            recomputed = 1.0 if again and depth else 0.0
            done += work.forward(parts, tokens, dtype, products=1 + backward + recomputed, passes=3 + recomputed)
            if attends and attention.width:
                scores = 4.0 if recomputed_scores(plan, rows, used / rows) or recomputed else 3.0
                done += _scores(tokens, T, attention.width, attention.heads, dtype, scores)
    return done


def _scores(queries: float, keys: float, width: int, heads: int, dtype: torch.dtype, products: float) -> Work:
    """Attention that makes its scores in float32 (speculators/layers/attention.py)."""
    return Work(
        (work.Product(products * 2 * queries * keys * width, 0.0, dtype),),
        traffic=products * 3 * 4 * queries * keys * heads,
        calls=20 * products,
    )


def depth_products(head: Drafter, depths: int) -> list[tuple[Products, Products]]:
    """Of each depth: the products with every slot, and with those that have a term."""
    names = {id(p): name for name, p in head.named_parameters()}
    config = getattr(head, "model_config", None)
    return [
        tuple(products(((names[id(p)], p) for p in part), config) for part in head.multiplied(depth))  # type: ignore[misc]
        for depth in range(depths)
    ]


def objective(plan: Outline, processes: int, device: str) -> Work:
    """The draft head with its gradients, and the target's, in chunks; a distribution that several depths match is made
    once where they share a head."""
    rows, _ = plan.micro_steps(processes)
    t, d, K, head = plan.target, plan.drafter, plan.depths, plan.head
    per_depth = rows * plan.recipe.data.max_length * plan.supervised_share
    terms, together = per_depth * K, head.one_head
    chunks = max(terms / chunk_size(plan, device), 1.0 if together else float(K))
    distinct = (per_depth + chunks) if together else terms
    dtype = plan.autocast
    parameters = sum(p.numel() for p in head.head_parameters())
    trained = parameters / (1 if together or not parameters else max(K, 1))
    products = 2.0 + bool(parameters)
    vocabulary = min(d.draft_vocab_size, t.vocab_size)
    done = work.head(distinct, t.hidden_size, t.vocab_size, dtype, calls=chunks)
    done += work.head(terms, d.hidden_size, vocabulary, dtype, calls=chunks, products=products)
    done += work.over_logits(distinct, t.vocab_size, work.TARGET_PASSES)
    done += work.over_logits(terms, vocabulary, work.DRAFT_PASSES)
    return done + Work(traffic=chunks * trained * 16, calls=chunks * work.HEAD_CALLS)  # gradients, chunk by chunk


def optimizer(plan: Outline, processes: int) -> Work:
    """The update, clipping, and the sum of gradients over processes."""
    made, t = make_optimizer(plan.head, plan.recipe.training), plan.trainable + adapter_parameters(plan)
    done = Work(traffic=4 * t * 4)
    for each in made.optimizers if isinstance(made, Together) else [made]:
        parameters = [p for group in each.param_groups for p in group["params"]]
        if isinstance(each, torch.optim.Muon):
            done += work.muon((p.shape[0], p.shape[1]) for p in parameters)
        else:
            done += work.adamw(sum(p.numel() for p in parameters), len(parameters))
    if processes > 1:
        done += Work(traffic=4 * t * 6, sent=2 * (processes - 1) / processes * 4 * t)
    return done


# --------------------------------------------------------------------------------------------- measuring


def _held_out(plan: Outline) -> Texts:
    """The texts that every evaluation reads."""
    recipe = plan.recipe
    found = texts_of(plan.validation, recipe.data.max_length, recipe.evaluation.max_tokens)
    wanted = recipe.held_out_prompts if plan.validation else 0
    each = min(wanted, sum(s.examples or wanted for s in plan.validation))
    return Texts(each * len(recipe.evaluation.temperatures), found.prompt, found.response)


def replayed(plan: Outline, texts: Texts) -> Work:
    """Expected acceptance of texts: one forward of the target, an unroll, and both distributions at every depth."""
    t, d, head = plan.target, plan.drafter, plan.head
    tokens, K = texts.count * texts.length, plan.recipe.evaluation.num_speculative_tokens
    K = min(K, head.max_depth or K)
    calls = max(tokens / BATCH_TOKENS, 1.0)
    done = work.forward(t.products, tokens / calls, t.dtype, attention=t.attention, keys=texts.length) * calls
    for both in depth_products(head, K):
        for parts in both:
            done += work.forward(parts, tokens / calls, torch.float32) * calls
    done += work.head(texts.count * texts.response, t.hidden_size, t.vocab_size, t.dtype, calls=calls)
    vocabulary = min(d.draft_vocab_size, t.vocab_size)
    terms = K * texts.count * texts.response
    done += work.head(terms, d.hidden_size, vocabulary, torch.float32, calls=calls)
    done += work.over_logits(texts.count * texts.response, t.vocab_size, work.SAMPLING_PASSES)
    return done + work.over_logits(terms, t.vocab_size, work.SAMPLING_PASSES)


def measurement(plan: Outline) -> Work:
    """The acceptance report: with drafting and without, replayed, timed, and compared in float32."""
    e, usual = plan.recipe.evaluation, EvaluationSettings()
    known = texts_of(plan.validation or plan.sources, plan.recipe.data.max_length, e.max_tokens)
    workloads = max(sum(s.workloads for s in plan.validation), len(e.prompts), 1)
    texts = Texts(workloads * e.prompts_per_workload, known.prompt, known.response)
    rows, cells = max(usual.rows, e.batch_size), workloads * len(e.temperatures)
    acceptance = written(plan, texts, rows) + written(plan, texts, rows, drafting=True) + replayed(plan, texts)
    done = acceptance * len(e.temperatures)
    if e.repeats:
        timed = Texts(max(e.timed_prompts, e.batch_size), known.prompt, known.response)
        passes = written(plan, timed, e.batch_size) + written(plan, timed, e.batch_size, drafting=True)
        done += passes * (e.repeats * cells)
        if e.baseline_transformers:
            few = Texts(e.batch_size, known.prompt, known.response)
            done += written(plan, few, e.batch_size) * (usual.transformers_repeats * cells)
    if e.lossless_check:
        few = Texts(workloads * usual.lossless_prompts, known.prompt, known.response)
        for drafting in (False, True):
            done += written(plan, few, rows, drafting=drafting, dtype=torch.float32)
    return done


def written(
    plan: Outline, texts: Texts, rows: int, *, drafting: bool = False, dtype: torch.dtype | None = None
) -> Work:
    """Rounds of the engine, `rows` texts at once; with drafting a round verifies K + 1 tokens and commits some."""
    K, rows = plan.recipe.evaluation.num_speculative_tokens, min(rows, round(texts.count))
    rounds = texts.count / rows * texts.response
    context = texts.prompt + texts.response / 2
    if not drafting:
        return _round(plan, rows, context, dtype=dtype) * rounds
    d, exact = plan.drafter, dtype or plan.target.dtype
    each = _round(plan, rows, context, K + 1, dtype)
    for both in depth_products(plan.head, min(K, plan.head.max_depth or K)):
        for parts in both:
            each += work.forward(parts, rows, exact)
        each += work.head(rows, d.hidden_size, min(d.draft_vocab_size, d.vocab_size), exact)
        each += Work(calls=work.HEAD_CALLS)
    return each * (rounds / min(ASSUMED_TAU, K + 1))
