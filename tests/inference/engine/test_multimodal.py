"""Language models of multimodal targets: loaded, read, and decoded with drafts as they write text
themselves."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.info import sketch_target
from tests.support.engines import ids_of
from tests.support.models import MULTIMODAL
from tests.support.tokenizers import byte_level

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (11, 1, 9, 14, 4)]


@pytest.fixture(scope="module", params=sorted(MULTIMODAL))
def folder(request, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    return folder


def write(llm) -> list[list[int]]:
    return ids_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.slow
def test_text_with_drafts_is_the_whole_models_own(folder, tmp_path):
    """A head, trained or not, drafts for it from its export; a plan has the sizes without loading
    anything."""
    target = FrozenTarget.from_pretrained(str(folder), tap_layers=(1, 2))
    sketch = sketch_target(str(folder))
    for name in ("hidden_size", "num_layers", "vocab_size"):
        assert getattr(sketch, name) == getattr(target, name), name
    assert sketch.num_parameters == sum(p.numel() for p in target.model.parameters())
    torch.manual_seed(0)
    config = config_for_target(sketch, "eagle3", draft_vocab_size=101, tap_layers=(1, 2))
    drafter = Eagle3(config).eval().attach(target)
    export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert fields["hidden_size"] == 32 and not any(
        "mrope" in name for name in fields["rope_parameters"]
    )
    assert fields["draftsmith"]["target"]["architectures"] == [type(target.model).__name__]
    options = dict(
        tokenizer=byte_level(101), max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16
    )
    speculative = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    drafting = LLM(str(folder), speculative_config=speculative, **options)
    text = write(drafting)
    assert drafting.get_metrics().num_draft_tokens > 0
    assert text == write(LLM(str(folder), **options))
    for prompt, written in zip(PROMPTS, text, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"] + written])
        with torch.no_grad():
            logits = target.model(input_ids=ids, use_cache=False).logits[0, -10:-1]
        assert logits.argmax(-1).tolist() == written


def test_images_are_refused_by_name(tiny_model):
    llm = LLM(tiny_model("mistral3"), tokenizer=byte_level(101), max_model_len=64)
    with pytest.raises(ConfigError, match="prompt 0: multi_modal_data: images.* only text"):
        llm.generate({"prompt": "What is this?", "multi_modal_data": {"image": object()}})
