"""Quantised targets give features and are drafted for, or are refused."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.model_runner.plain_decoder import plain_decoder
from draftsmith.speculators.errors import ConfigError, UnsupportedTarget
from draftsmith.speculators.families.draft_model.student import cut_fields
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.probe import is_quantised
from draftsmith.train.recipe.sections import JointSection
from draftsmith.train.trainer.joint_target import JointTarget
from tests.support.engines import ids_of, make_llm
from tests.support.errors import raises_at
from tests.support.quantised import save_quantised

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5][:n]} for n in (7, 1, 5, 3, 6)]
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def uncompiled():
    """BitNet's layers compile themselves, which takes longer than the tests."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def load(model, folder, scheme) -> FrozenTarget:
    save_quantised(model, folder, scheme)
    return FrozenTarget.from_pretrained(str(folder), tap_layers=(1, 3))


def write(llm) -> list[list[int]]:
    return ids_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bitnet", "fp8"])
def test_features_and_drafts_are_those_of_the_quantised_model(tiny_model, tmp_path, scheme):
    target = load(tiny_model("qwen3"), tmp_path, scheme)
    assert is_quantised(target.model) == (scheme == "bitnet") and target.dtype == torch.float32
    ids = torch.arange(5, 16)[None]
    with torch.no_grad():
        outputs = target.model(input_ids=ids, output_hidden_states=True)
        taps, last = target(ids)
        plain = tiny_model("qwen3")(input_ids=ids).logits
    torch.testing.assert_close(target.logits(last), outputs.logits)
    torch.testing.assert_close(taps[..., :32], outputs.hidden_states[1])
    assert (outputs.logits - plain).norm() > 0.02 * plain.norm()  # it is another model
    assert isinstance(plain_decoder(target), str) == (scheme == "bitnet")

    options = dict(max_num_seqs=2, max_model_len=64)
    text = write(make_llm(target, **options))
    with torch.no_grad():
        for prompt, written in zip(PROMPTS, text, strict=True):
            whole = torch.tensor([prompt["prompt_token_ids"] + written])
            logits = target.model(input_ids=whole).logits[0]
            assert logits[-10:-1].argmax(-1).tolist() == written
    config = config_for_target(target, "eagle3", draft_vocab_size=101, tap_layers=(1, 3))
    llm = make_llm(target, drafter=Eagle3(config).eval(), num_speculative_tokens=3, **options)
    assert write(llm) == text and llm.get_metrics().num_draft_tokens > 0


@pytest.mark.parametrize("part", ["input_embeddings", "output_embeddings"])
def test_a_quantised_embedding_or_head_is_refused(tiny_model, part):
    model = tiny_model("qwen3")
    weight = torch.zeros(101, 32, dtype=torch.int8)
    getattr(model, f"set_{part}")(torch.nn.Embedding.from_pretrained(weight))
    with raises_at(UnsupportedTarget, "target Qwen3ForCausalLM"):
        FrozenTarget(model)


def test_what_needs_plain_weights_is_refused(tiny_model, tmp_path):
    target = load(tiny_model("qwen3"), tmp_path, "bitnet")
    with raises_at(ConfigError, "drafter.from_target"):
        cut_fields(target.config, [0, 1], "drafter.from_target")
    with raises_at(UnsupportedTarget, "joint"):
        JointTarget(target, JointSection())
