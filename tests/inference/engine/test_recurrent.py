"""Targets with recurrent layers: with drafts accepted in part, ragged rows and any batch, each row
is as if alone."""

from __future__ import annotations

import pytest
import torch

from inference import SamplingParams
from inference.spec_decode.proposers.lookahead import LookaheadProposer
from inference.spec_decode.tree_shape import StaticTree
from speculators.errors import ConfigError, UnsupportedTarget
from speculators.families.eagle3 import Eagle3
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget
from speculators.target.recurrent import RecurrentStates
from tests.conftest import RECURRENT
from tests.inference.conftest import StubProposer
from tests.inference.engine.test_engine import SMALL_PROMPT, WRITTEN, check_joint, exact_joint
from tests.inference.modules import make_llm

LENGTHS = (11, 1, 9, 14, 4)
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class PartlyRight(StubProposer):
    """Three drafts, or fewer; the first 0 to 3 are right, another number in each round and row."""

    def __init__(self, asked, texts) -> None:
        super().__init__(
            "ragged", 3, 101, {tuple(prompt): text for prompt, text in zip(asked, texts)}
        )

    def propose(self, requests, limits):
        proposal = super().propose(requests, limits)
        for row, request in enumerate(requests):
            right = (len(request.token_ids) + request.token_ids[0]) % 4
            proposal.token_ids[row, right:] = (proposal.token_ids[row, right:] + 1) % 101
        return proposal


@pytest.fixture(scope="module", params=sorted(RECURRENT))
def target(request, tiny_model) -> FrozenTarget:
    return FrozenTarget(tiny_model(request.param))


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    source = torch.Generator().manual_seed(3)
    return [torch.randint(3, 101, (n,), generator=source).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(target, asked) -> list[list[int]]:
    """What the model itself writes, without a cache."""
    written = []
    for prompt in asked:
        ids = list(prompt)
        for _ in range(PARAMS.max_tokens):
            with torch.no_grad():
                ids.append(
                    int(
                        target.model(input_ids=torch.tensor([ids]), use_cache=False)
                        .logits[0, -1]
                        .argmax()
                    )
                )
        written.append(ids[len(prompt) :])
    return written


def write(llm, prompts, params=PARAMS) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_text_is_the_models_own(target, asked, alone, rows) -> None:
    """Prefill in chunks of 8 tokens, rows that come and go, drafts of which any number is accepted,
    and none."""
    for proposer in (None, PartlyRight(asked, alone)):
        llm = make_llm(
            target,
            proposer=proposer,
            max_model_len=200,
            max_num_seqs=rows,
            max_num_batched_tokens=8 * rows,
        )
        assert write(llm, asked) == alone
        counters = llm.get_metrics()
        if proposer is not None:
            assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_a_state_that_keeps_rejected_drafts_is_noticed(asked, tiny_model, monkeypatch) -> None:
    """The power of the test above."""
    target = FrozenTarget(tiny_model("lfm2"))
    text = write(make_llm(target), asked)
    monkeypatch.setattr(
        RecurrentStates, "_again", lambda self, made, rows, count: self._load(rows, True)
    )
    assert write(make_llm(target, proposer=PartlyRight(asked, text)), asked) != text


def test_a_head_drafts_from_the_features_of_a_recurrent_target(tiny_model, asked) -> None:
    model = tiny_model("qwen3_next")
    config = config_for_target(FrozenTarget(model), "eagle3", draft_vocab_size=101)
    drafter = Eagle3(config).eval()
    llm = make_llm(
        model, drafter=drafter, num_speculative_tokens=3, max_num_seqs=3, max_num_batched_tokens=12
    )
    assert write(llm, asked) == write(make_llm(model), asked)
    assert llm.get_metrics().num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_joint_of_the_first_four_tokens(name, tiny_model) -> None:
    model = tiny_model(name, vocab_size=4, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    params = SamplingParams(temperature=1.0, max_tokens=WRITTEN, n=400)
    options = dict(max_num_seqs=200, max_num_batched_tokens=4000, max_model_len=32, seed=11)
    llm = make_llm(model, proposer=StubProposer("sampled", 3, 4), **options)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint(output, exact_joint(model, params))
    assert 60 < llm.get_metrics().num_accepted_tokens < llm.get_metrics().num_draft_tokens


def test_trees_and_compiled_rounds_are_refused_by_name(tiny_model) -> None:
    target = FrozenTarget(tiny_model("lfm2"))
    lookahead = LookaheadProposer(
        6, window_size=3, ngram_size=3, num_guesses=2, pool_from_prompt=True
    )
    with pytest.raises(ConfigError, match="recurrent layers.*tree cannot be verified"):
        make_llm(target, proposer=lookahead)
    with pytest.raises(ConfigError, match="recurrent layers.*enforce_eager=True"):
        make_llm(target, compilation_config={"mode": 3, "backend": "eager"})
    config = config_for_target(target, "eagle3", draft_vocab_size=101)
    tree = StaticTree.parse([(0,), (1,), (0, 0)])
    with pytest.raises(ConfigError, match="recurrent layers.*tree cannot be verified"):
        make_llm(target, drafter=Eagle3(config), tree=tree)


def test_a_target_that_cannot_be_rolled_back_is_refused_with_the_way_out(tiny_model) -> None:
    target = FrozenTarget(tiny_model("rwkv", attention_hidden_size=32))
    with pytest.raises(UnsupportedTarget, match="outside.*evaluation.engines"):
        make_llm(target, max_model_len=64)
