"""Architectures that ask for something of their own: refusals, and frequencies that depend on the
length. That their text is their own is proved in tests/lossless."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.speculators.errors import ConfigError, UnsupportedTarget
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.longrope import original_length
from tests.support.engines import ids_of, make_llm, proposer_of
from tests.support.errors import raises_at
from tests.support.models import make_tiny_model


def prompts(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"prompt_token_ids": torch.randint(3, 101, (n,), generator=generator).tolist()}
        for n in lengths
    ]


def ngram() -> Proposer:
    return proposer_of("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3)


def lookahead() -> Proposer:
    return proposer_of("lookahead", 12, lookahead_num_guesses=4)


def write(llm: TextGenerator, asked: list[dict], max_tokens: int = 14) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return ids_of(llm.generate(asked, params, use_tqdm=False))


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
    with raises_at(UnsupportedTarget, "decoding"):
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
    for proposer in (None, ngram(), lookahead()):
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
    llm = make_llm(target, proposer=ngram())
    assert llm.engine.max_model_len == 64 == original_length(model.config)
    assert "short frequencies" in caplog.text
    assert write(llm, asked, 100) == expected


def test_a_drafter_turns_by_the_frequencies_that_its_target_is_served_with():
    """And so do the positions that it looks up, after another limit too."""
    target = FrozenTarget(phi3_long(), [1, 2, 3])
    config = config_for_target(target, "eagle3", tap_layers=[1, 2, 3])
    drafter = family_class("eagle3")(config).attach(target)
    rotary, places = drafter.positions, torch.arange(80)[None]
    short = 1e4 ** -(torch.arange(4) / 4)
    for limit, factor in ((None, 1.0), (200, 4.0), (64, 1.0)):
        options = EngineOptions(max_model_len=limit)
        TextGenerator.from_modules(target, drafter=drafter, options=options)
        torch.testing.assert_close(rotary.rotary_emb.inv_freq, short / factor)
        looked_up = rotary.lookup(places, 100, torch.zeros(1))
        torch.testing.assert_close(looked_up, rotary(torch.zeros(1), places))


# ---------------------------------------------------------------------- recurrent layers


def test_trees_and_compiled_rounds_of_a_recurrent_target_are_refused(tiny_model) -> None:
    target = FrozenTarget(tiny_model("lfm2"))
    with raises_at(ConfigError, "target Lfm2ForCausalLM"):
        make_llm(target, proposer=lookahead())
    with raises_at(ConfigError, "target Lfm2ForCausalLM"):
        make_llm(target, compilation_config={"mode": 3, "backend": "eager"})


def test_a_target_that_cannot_be_rolled_back_is_refused_with_the_way_out(tiny_model) -> None:
    target = FrozenTarget(tiny_model("rwkv", attention_hidden_size=32))
    with pytest.raises(UnsupportedTarget, match="evaluation.engines"):
        make_llm(target, max_model_len=64)
