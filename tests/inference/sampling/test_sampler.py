"""Logits to p, p to tokens: filters against a plain reference, draws against exact frequencies."""

import pytest
import torch

from draftsmith.inference.sampling.sampler import (
    argmax,
    batch_probabilities,
    inverse_cdf,
    make_generator,
    probabilities,
    uniforms,
)
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.errors import DraftsmithError
from tests.support.drafters import draw
from tests.support.errors import raises_at


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Token by token in float64: logits [V] -> p [V]."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    if params.top_k > 0:
        p = torch.where(p >= p.sort(descending=True).values[min(params.top_k, len(p)) - 1], p, 0.0)
    if params.top_p < 1:
        kept, mass = torch.zeros_like(p), 0.0
        for token in p.argsort(descending=True).tolist():
            if mass < params.top_p * p.sum():
                kept[token] = p[token]
            mass += p[token]
        p = kept
    return p / p.sum()


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_match_the_reference(filters):
    """In the order of the reference: temperature, min-p, top-k, top-p; in float32, whatever the
    dtype of the logits."""
    params = SamplingParams(**filters)
    logits = torch.randn(4, 2, 300, generator=torch.Generator().manual_seed(1))
    logits[2:] *= 3.0
    p = probabilities(logits, params)
    assert p.dtype == torch.float32
    expected = torch.stack([reference(row, params) for row in logits.flatten(0, 1)]).view(4, 2, 300)
    assert ((p > 0) == (expected > 0)).all()
    torch.testing.assert_close(p, expected.float(), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(p.sum(-1), torch.ones(4, 2))
    half = logits.bfloat16()
    assert torch.equal(probabilities(half, params), probabilities(half.float(), params))


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_top_p_after_top_k_keeps_what_a_sort_of_the_whole_vocabulary_keeps(claimed, min_p, request):
    """Ties at the ends of both filters included, on a device as on a CPU."""
    device = "cpu"
    if claimed:
        request.getfixturevalue("claimed_gpu")
        device = "cuda"
    # few values, many ties
    logits = torch.randint(-3, 4, (200, 40), generator=torch.Generator().manual_seed(3)) / 2.0
    for top_k in (1, 2, 5, 39):
        for top_p in (0.05, 0.5, 0.9, 1 - 1e-9):
            first = probabilities(logits, SamplingParams(min_p=min_p, top_k=top_k))
            falling = first.sort(descending=True).values.double()
            before = torch.nn.functional.pad(falling.cumsum(-1)[:, :-1], (1, 0))
            kept = before < top_p * falling.sum(-1, keepdim=True) - 1e-12
            floor = falling.masked_fill(~kept, 2.0).amin(-1, keepdim=True).float()
            expected = first * (first >= floor)
            p = probabilities(
                logits.to(device), SamplingParams(min_p=min_p, top_k=top_k, top_p=top_p)
            ).cpu()
            assert torch.equal(p > 0, expected > 0)
            torch.testing.assert_close(p, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_temperature_zero_is_the_first_largest(dtype):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, -1.0, 0.0]], dtype=dtype)
    assert argmax(logits).tolist() == [1, 0]
    assert argmax(logits[0]).item() == 1
    assert argmax(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)).item() == 1
    p = probabilities(logits, SamplingParams(temperature=0, top_p=0.1, top_k=3))
    assert p.dtype == torch.float32
    assert p.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_forbidden_tokens_stay_forbidden():
    logits = torch.randn(2, 50)
    logits[:, 10:] = float("-inf")
    for filters in FILTERS:
        assert probabilities(logits, SamplingParams(**filters))[:, 10:].sum() == 0


def test_a_row_of_a_batch_is_the_row_alone():
    logits = torch.randn(len(FILTERS) + 1, 3, 500) * 2
    params = [SamplingParams(**filters) for filters in FILTERS] + [SamplingParams(temperature=0)]
    together = batch_probabilities(logits, params)
    for row, row_params in enumerate(params):
        alone = batch_probabilities(logits[row : row + 1], [row_params])
        assert torch.equal(together[row], alone[0])
    same = [SamplingParams(top_p=0.9)] * len(params)
    assert torch.equal(batch_probabilities(logits, same)[2], probabilities(logits[2], same[2]))


def test_inverse_cdf_reaches_every_token_and_never_one_of_weight_zero():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    below = 1 - 2**-53
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (below, 4)):
        assert inverse_cdf(weights, torch.tensor([u], dtype=torch.float64)).item() == token
    ragged = torch.rand(1000, 37)
    ragged[:, 30:] = 0
    highest = inverse_cdf(ragged, torch.full((1000,), below, dtype=torch.float64))
    assert (highest < 30).all()


def test_seeds_repeat_and_their_high_bits_count():
    assert uniforms(make_generator(7), 3) == uniforms(make_generator(7), 3)
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**62, -1]
    assert len({uniforms(make_generator(seed), 1)[0] for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_without_probabilities_is_an_error(filters):
    for bad in (float("nan"), float("-inf")):
        p = probabilities(torch.full((1, 8), bad), SamplingParams(**filters))
        with raises_at(DraftsmithError, "sampler"):
            draw(p, [make_generator(0)])
