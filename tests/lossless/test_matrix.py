"""Text is the target's own, whoever drafts, however it is verified: a covering design over
drafters, rules, trees, length policies, processors, rows, targets and devices
(tests/support/configurations.py).

Greedy text is compared token for token with the target's own forward over the whole text, in
float32; sampled text by the χ² of its first tokens with the target's exact probabilities."""

from __future__ import annotations

import pytest

from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.registry import FAMILIES
from tests.support.configurations import GREEDY, SAMPLED, TREES, possible
from tests.support.covering import cover
from tests.support.matrix import check_greedy, check_sampled, greedy_requests


@pytest.mark.slow
@pytest.mark.parametrize("configuration", GREEDY, ids=str)
def test_greedy_text_is_the_targets_own(configuration, request):
    # made before anything claims to be on a device
    greedy_requests(configuration.architecture, configuration.processors)
    if configuration.device != "cpu":
        request.getfixturevalue("claimed_gpu")
    check_greedy(configuration)


# ---------------------------------------------------------------------- temperature > 0


@pytest.mark.slow
@pytest.mark.parametrize("configuration", SAMPLED, ids=str)
def test_sampled_text_is_distributed_as_the_targets(configuration):
    check_sampled(configuration)


# ---------------------------------------------------------------------- the design itself


def test_every_possible_pair_is_covered():
    factors = {"drafter": ["off", "eagle3", "sampled"], "tree": ["chain", "static"], "rows": ["1"]}
    chosen = cover(factors, possible)
    assert {(one["drafter"], one["tree"]) for one in chosen} == {
        ("off", "chain"),
        ("eagle3", "chain"),
        ("eagle3", "static"),
        ("sampled", "chain"),
    }


@pytest.mark.parametrize("design", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_family_proposer_and_kind_of_target_is_in_the_design(design):
    drafters = {one.drafter for one in design}
    assert drafters >= {*FAMILIES, *TRAINING_FREE}
    assert {one.tree for one in design} >= set(TREES)
    assert len({one.architecture for one in design}) > 12
