"""Architectures whose attention has ways of its own: rows side by side and drafted trees write what
one row writes."""

from __future__ import annotations

import pytest
import torch

from inference import LLM, SamplingParams
from inference.spec_decode.proposers.lookahead import LookaheadProposer
from inference.spec_decode.proposers.ngram import NgramProposer
from speculators.errors import UnsupportedTarget
from speculators.target.frozen_target import FrozenTarget
from speculators.target.longrope import original_length
from tests.conftest import make_tiny_model
from tests.inference.modules import make_llm

OWN_WAYS = {
    "falcon": {},  # own attention, which asks the configuration for "sdpa"
    "doge": {},  # a mask of its own for each head
    "afmoe": dict(
        head_dim=8,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),  # views, not reshapes
    "xglm": dict(
        d_model=32, ffn_dim=48, num_layers=3, attention_heads=4, init_std=0.3
    ),  # masks for each row
}
LENGTHS = (17, 1, 9, 30)


def prompts(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"prompt_token_ids": torch.randint(3, 101, (n,), generator=generator).tolist()}
        for n in lengths
    ]


def lookahead() -> LookaheadProposer:
    return LookaheadProposer(12, window_size=5, ngram_size=4, num_guesses=4, pool_from_prompt=True)


def write(llm: LLM, asked: list[dict], max_tokens: int = 14) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [
        list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_WAYS)
def test_rows_and_trees_write_what_transformers_writes(name):
    model, asked = make_tiny_model(name, **OWN_WAYS[name]), prompts(LENGTHS)
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
        )
        expected.append(written[0, ids.shape[1] :].tolist())
    for proposer in (None, NgramProposer(4, 1, 3), lookahead()):
        for rows in (1, 4):
            llm = make_llm(model, proposer=proposer, max_model_len=200, max_num_seqs=rows)
            assert write(llm, asked) == expected


def test_a_window_inside_the_attention_is_refused():
    """GPT-Neo cuts its local layers' masks by slots, which are not positions where rows differ in
    length."""
    model = make_tiny_model(
        "gpt_neo",
        num_layers=2,
        num_hidden_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
    )
    with pytest.raises(UnsupportedTarget, match="local"):
        make_llm(model)


def phi3_long() -> torch.nn.Module:
    rope = dict(
        rope_type="longrope",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=64,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
    )
    return make_tiny_model(
        "phi3", sliding_window=None, original_max_position_embeddings=64, rope_parameters=rope
    )


@pytest.mark.slow
def test_longrope_does_not_depend_on_neighbours_or_drafts():
    asked = prompts((10, 40, 70, 25))
    alone = write(make_llm(phi3_long(), max_model_len=256, max_num_seqs=1), asked, 40)
    for proposer in (None, NgramProposer(4, 1, 3), lookahead()):
        for rows in (1, 4):
            llm = make_llm(phi3_long(), proposer=proposer, max_model_len=256, max_num_seqs=rows)
            assert write(llm, asked, 40) == alone


def test_longrope_up_to_its_original_length_is_transformers_own(caplog):
    """Also where drafts reach beyond it, and after a longer limit."""
    model, asked = phi3_long(), prompts((10, 40, 25))
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_length=64,
            do_sample=False,
            eos_token_id=None,
        )
        expected.append(written[0, ids.shape[1] :].tolist())
    target = FrozenTarget(model)
    make_llm(target, max_model_len=200)
    llm = make_llm(target, proposer=NgramProposer(4, 1, 3))
    assert (
        llm.engine.max_model_len == 64 == original_length(model.config)
        and "short frequencies" in caplog.text
    )
    assert write(llm, asked, 100) == expected
