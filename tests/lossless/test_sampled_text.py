"""The production sampler with its random numbers writes what the target would (χ² with fixed
seeds), and a batch writes what its rows would one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from draftsmith.inference.sampling.sampler import make_generator, probabilities, uniforms
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.verification.rejection_sampler import verify_and_sample
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from tests.support.drafters import draw
from tests.support.markov import CASES, TREES, Chains, Trees, assert_written_by_target, make_world


@pytest.mark.slow
@pytest.mark.parametrize("vocab,dense,rule", CASES)
def test_text_is_distributed_as_the_targets(vocab, dense, rule):
    rows = 8_000 if vocab == 16 else 2_000
    assert_written_by_target(Chains(make_world(vocab), dense, rule), rows)


@pytest.mark.slow
@pytest.mark.parametrize("vocab,dense,rule", TREES)
def test_text_of_tree_drafts_is_distributed_as_the_targets(vocab, dense, rule):
    rows = 3_000 if vocab == 16 else 1_000
    assert_written_by_target(Trees(make_world(vocab), dense, rule), rows)


@pytest.mark.parametrize("kind", [Chains, Trees])
def test_matched_drafts_leave_every_seeds_text_as_it_is(kind):
    """The target draws every token itself, from the numbers it would draw it from without
    drafts."""
    world = make_world(16)
    drafted = kind(world, dense=False, rule="sample_match").write(50)
    alone = kind(world, dense=False)
    alone.draft = lambda last, generators: Proposal.empty(len(last))
    assert torch.equal(drafted, alone.write(50))


# ---------------------------------------------------------------------- rows are independent


def drafted_batch(seed: int, rows=6, width=7, vocab=12, *, chains: bool, sampled: bool):
    """Chains or trees of all sizes, unverified behind those that were not sampled, rows of many
    parameters: logits, proposal, params."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, width + 1, vocab, generator=generator)
    counts = [source.randint(0, width) for _ in range(rows)]
    unverified = [0 if chains or sampled else source.randint(0, width - count) for count in counts]
    parents = [[source.randint(-1, k // 2 - 1) for k in range(width)] for _ in range(rows)]
    tokens = torch.randint(vocab, (rows, width), generator=generator)
    q = torch.full((rows, width, vocab), float("nan"))
    for b, count in enumerate(counts):
        left: dict[int, Tensor] = {}  # by parent, what the next sibling is drawn from
        first: dict[int, int] = {}  # by parent, its first child
        for k in range(count):
            above = k - 1 if chains else parents[b][k]
            if above not in left:
                noise = torch.randn(vocab, generator=generator)
                left[above] = torch.softmax(logits[b, above + 1] + 0.7 * noise, -1)
            q[b, k] = q[b, first[above]] if above in first else left[above]
            first.setdefault(above, k)
            tokens[b, k] = int(draw(left[above][None], [generator]))
            left[above] = left[above].clone()
            left[above][tokens[b, k]] = 0
    judged = [
        row[: count + more] for row, count, more in zip(parents, counts, unverified, strict=True)
    ]
    shape = () if chains else (judged, unverified)
    proposal = Proposal(tokens, counts, q if sampled else None, *shape)
    params = [
        SamplingParams(
            temperature=source.choice((0, 0.7, 1.0)),
            top_p=source.choice((0.9, 1)),
            top_k=source.choice((-1, 5)),
        )
        for _ in range(rows)
    ]
    return logits, proposal, params


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rule", "chains", "sampled"),
    [
        ("token", True, True),
        ("token", True, False),
        ("block", True, True),
        ("block", True, False),
        *(
            ("sample_match", chains, sampled)
            for chains in (True, False)
            for sampled in (True, False)
        ),
        ("traversal", True, True),
        ("traversal", False, True),
    ],
)
def test_a_row_writes_the_same_in_a_mixed_batch_and_alone(rule, chains, sampled, seed):
    """The same tokens from the same numbers, and no number more; greedy rows take none, do not read
    q and write the argmax."""
    logits, proposal, params = drafted_batch(seed, chains=chains, sampled=sampled)
    if sampled:
        proposal.q[[b for b, row_params in enumerate(params) if row_params.greedy]] = float("nan")
    generators = [make_generator(b) for b in range(len(params))]
    single = [proposal.select([b]) for b in range(len(params))]
    together = verify_and_sample(logits.clone(), proposal, params, generators, rule)
    for b, row_params in enumerate(params):
        generator, taken = make_generator(b), make_generator(b)
        (kept,) = verify_and_sample(
            logits[b : b + 1].clone(), single[b], [row_params], [generator], rule
        )
        assert together[b] == kept
        assert torch.equal(generator.get_state(), generators[b].get_state())
        if not row_params.greedy and rule in ("token", "block", "sample_match"):
            uniforms(taken, len(kept.tokens) if rule == "sample_match" else proposal.counts[b] + 1)
        if row_params.greedy:
            entries = [0, *(1 + node for node in kept.nodes)]
            assert kept.tokens == logits[b, entries].argmax(-1).tolist()
        if row_params.greedy or rule != "traversal":
            assert torch.equal(taken.get_state(), generator.get_state())


def test_nothing_drafted_is_plain_sampling():
    logits, _, _ = drafted_batch(0, chains=True, sampled=True)
    params = SamplingParams(temperature=0.9)
    kept = verify_and_sample(
        logits[:, :1], Proposal.empty(6), [params] * 6, [make_generator(b) for b in range(6)]
    )
    drawn = draw(probabilities(logits[:, 0], params), [make_generator(b) for b in range(6)])
    assert [row.tokens for row in kept] == [[int(token)] for token in drawn]


def test_refusals():
    logits, proposal, params = drafted_batch(0, chains=True, sampled=True)
    generators = [make_generator(b) for b in range(len(params))]
    with pytest.raises(ConfigError, match="rejection_sample_method"):
        verify_and_sample(logits, proposal, params, generators, "recursive")
    with pytest.raises(DraftsmithError, match="no token of positive probability"):
        verify_and_sample(torch.full_like(logits, float("nan")), proposal, params, generators)
