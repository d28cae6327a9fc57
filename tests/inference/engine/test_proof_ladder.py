"""Ladder d and f as one product: every drafter, under every lossless rule that it can be judged by,
with processors on, in batches of one and of five. What each case proves alone is in test_engine.py
and test_logits_processors.py."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from inference import LLM, SamplingParams
from inference.spec_decode.tree_shape import DynamicTree, StaticTree
from tests.inference.engine.test_engine import (  # noqa: F401 (a fixture among them)
    SMALL_PROMPT,
    TRAINING_FREE,
    WRITTEN,
    check_joint,
    ids_of,
    small,
)
from tests.inference.modules import make_llm
from tests.inference.sampling.test_logits_processors import (  # noqa: F401 (fixtures among them)
    JOINT,
    mixed,
    model,
    processed_joint,
    texts,
)
from tests.support.cases import Case, make

FAMILIES = {
    "draft_model": Case("draft_model", options={"from_target": {"last": 1}}, noise=0.05),
    "eagle": Case("eagle", options={"init": "pass_through"}, noise=0.12),
    "eagle3": Case("eagle3", taps=(1, 2)),
    "medusa": Case("medusa", {"num_heads": 3}),
    "mlp": Case("mlp", options={"unroll_steps": 3}),
    "mtp": Case("mtp"),
}
STATIC = StaticTree.parse([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
DYNAMIC = DynamicTree(topk=3, depth=3, budget=7)
WAYS: dict[str, dict[str, Any]] = {
    "token": {"rejection_sample_method": "token"},
    "block": {"rejection_sample_method": "block"},
    "sample_match": {"rejection_sample_method": "sample_match", "draft_sample_method": "greedy"},
    "traversal": {"rejection_sample_method": "traversal", "tree": STATIC},
    "traversal, grown": {"rejection_sample_method": "traversal", "tree": DYNAMIC},
    "sample_match, tree": {
        "rejection_sample_method": "sample_match",
        "draft_sample_method": "greedy",
        "tree": DYNAMIC,
    },
}
OF_A_LIST = ("token", "block", "sample_match")  # what texts that were looked up can be judged by
SAMPLES = 400


@dataclass(frozen=True)
class Combination:
    drafter: str
    way: str

    def llm(self, model: Any, tokenizer: Any, **options: Any) -> LLM:
        options |= {
            "tokenizer": tokenizer,
            "max_num_batched_tokens": options.get("max_num_batched_tokens", 16),
        }
        if self.drafter in TRAINING_FREE:
            config = {
                "method": self.drafter,
                "num_speculative_tokens": 3,
                **TRAINING_FREE[self.drafter],
            }
            if (
                self.drafter == "suffix" and self.way != "sample_match"
            ):  # the others draw by the drafts, and with
                config["suffix_decoding_max_cached_requests"] = (
                    0  # earlier responses these depend on who was first
                )
            if self.drafter != "lookahead":
                return LLM(
                    model,
                    speculative_config=config | {"rejection_sample_method": self.way},
                    **options,
                )
            return LLM(model, speculative_config=config, **options)
        target, drafter = make(FAMILIES[self.drafter], model)
        return make_llm(
            target, drafter=drafter.freeze(), num_speculative_tokens=3, **WAYS[self.way], **options
        )


COMBINATIONS = [Combination(drafter, way) for drafter in FAMILIES for way in WAYS]
COMBINATIONS += [Combination(drafter, way) for drafter in ("ngram", "suffix") for way in OF_A_LIST]
COMBINATIONS += [Combination("lookahead", "sample_match")]


@pytest.fixture(params=COMBINATIONS, ids=lambda each: f"{each.drafter}-{each.way}")
def combination(request) -> Combination:
    return request.param


@pytest.fixture(scope="module")
def double(model):
    """The model in float64: a float32 product of another width may round a draw across a token's
    edge."""
    return copy.deepcopy(model).double()


@pytest.mark.slow
def test_greedy_text_is_the_targets_and_no_text_depends_on_the_batch(
    combination, double, byte_tokenizer, texts
):
    """Every other request is greedy, those of the next combination are the others."""
    prompts, params = mixed(seed=3)
    greedy = range(COMBINATIONS.index(combination) % 2, len(params), 2)
    for i in greedy:
        params[i] = replace(params[i], temperature=0)
    found = []
    for rows in (1, 5):
        llm = combination.llm(double, byte_tokenizer, max_num_seqs=rows)
        found.append(ids_of(llm.generate(prompts, params, False)))
        assert llm.get_metrics().num_drafts > 0
    assert [found[0][i] for i in greedy] == [list(texts.values())[i] for i in greedy]
    assert found[0] == found[1]


@pytest.mark.slow
def test_joint_of_the_first_four_tokens(combination, small):
    """χ² with processors; in which batch the rows were does not matter, by the test above."""
    setting = JOINT[COMBINATIONS.index(combination) % len(JOINT)]
    params = SamplingParams(**{"temperature": 1.0, **setting}, max_tokens=WRITTEN, n=SAMPLES)
    llm = combination.llm(small, None, seed=11, max_num_seqs=500, max_num_batched_tokens=8000)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint(output, processed_joint(small, params))
    assert llm.get_metrics().num_accepted_tokens > 20
