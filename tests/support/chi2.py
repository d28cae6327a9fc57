"""χ² of what was written against what the target would write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.sampling.sampler import probabilities
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.drafter import Drafter
from tests.support.engines import make_llm

FAMILY_ALPHA = 1e-6  # of a family of tests: each gets its share


def p_value(observed: Tensor, expected: Tensor) -> float:
    """χ² of counts against expected counts [N] float64. Rare cells are pooled until each pool
    expects ten; a count where none is possible has p-value 0."""
    if (observed[expected == 0] > 0).any():
        return 0.0
    order = expected.argsort()
    pools = (expected[order].cumsum(0) / 10).floor().clamp(max=10**9)
    _, pools = pools.unique_consecutive(return_inverse=True)
    pooled = torch.zeros(int(pools.max()) + 1, dtype=torch.float64)
    pooled_expected = pooled.index_add(0, pools, expected[order].double())
    pooled_observed = pooled.index_add(0, pools, observed[order].double())
    kept = pooled_expected > 1
    statistic = ((pooled_observed - pooled_expected)[kept] ** 2 / pooled_expected[kept]).sum()
    freedom = torch.tensor(float(kept.sum() - 1), dtype=torch.float64)
    assert freedom >= 3, f"χ² of {int(freedom) + 1} cells has no power"
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def assert_fits(observed: Tensor, expected: Tensor, alpha: float, what: str) -> None:
    value = p_value(observed, expected)
    assert value > alpha, f"{what}: χ² p-value {value:.3g}"


def target_joint(
    model: torch.nn.Module,
    prompt: Sequence[int],
    length: int,
    params: SamplingParams,
    process: Callable[[Tensor, tuple[int, ...]], Tensor] = lambda logits, text: logits,
) -> Tensor:
    """[V] * length, float64: the target's own probability of every text of so many tokens, by a
    forward without a cache. process(logits [V], text) -> logits [V] that p is made of."""
    vocab = model.config.get_text_config().vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    for written in range(length):
        texts = list(itertools.product(range(vocab), repeat=written))
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *text] for text in texts])
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        logits = torch.stack([process(row, text) for row, text in zip(logits, texts, strict=True)])
        joint = (joint[:, None] * probabilities(logits, params).double()).flatten()
    return joint.view([vocab] * length)


def assert_joint_fits(texts: Sequence[Sequence[int]], joint: Tensor, alpha: float) -> None:
    """χ² of whole texts and of every pair of neighbouring tokens against the target's joint."""
    length = joint.dim()
    vocab = joint.shape[0]
    codes = torch.tensor(texts) @ vocab ** torch.arange(length - 1, -1, -1)
    observed = torch.bincount(codes, minlength=joint.numel()).double().view(joint.shape)
    expected = joint * len(texts)
    tests = [tuple(range(length)), *((i, i + 1) for i in range(length - 1))]
    for kept in tests:
        others = [i for i in range(length) if i not in kept]
        sums = [table.sum(others) if others else table for table in (observed, expected)]
        counts = [table.flatten() for table in sums]
        assert_fits(*counts, alpha / len(tests), f"tokens {kept}")


SMALL_VOCAB = 4


def assert_drafts_leave_the_target_its_text(model: torch.nn.Module, drafter: Drafter) -> None:
    """χ² of the first three tokens of 800 responses; `model` has SMALL_VOCAB tokens."""
    prompt = [1, 3, 2, 0]
    length = 3
    # a temperature at which no text is rare
    params = SamplingParams(temperature=1.5, max_tokens=length, n=800)
    limits = {"max_num_seqs": 500, "max_num_batched_tokens": 8000}
    drafting = {"drafter": drafter.freeze(), "num_speculative_tokens": 2}
    llm = make_llm(model, seed=11, **drafting, **limits)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, False)
    texts = [completion.token_ids for completion in output.outputs]
    assert_joint_fits(texts, target_joint(model, prompt, length, params), FAMILY_ALPHA)
    assert llm.get_metrics().num_accepted_tokens > 45
