"""Parts of an LLM: what ends a response, where a model runs, what a loaded one cannot become."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import GenerationConfig

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import (
    default_device,
    end_of_sequence_ids,
    load_tokenizer,
)
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at
from tests.support.targets import TOKENIZER

ENDS = [7, 9]


@pytest.fixture
def target(model, tmp_path) -> Path:
    """A folder whose generation config names other ends than its config does."""
    folder = tmp_path / "target"
    model.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=ENDS).save_pretrained(folder)
    return folder


def test_end_of_sequence_of_an_adapter_is_that_of_its_model(target, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    fields = {"base_model_name_or_path": str(target), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    assert end_of_sequence_ids(str(target), None) == frozenset(ENDS)
    assert end_of_sequence_ids(str(adapter), None) == frozenset(ENDS)


def test_tokenizer_of_an_adapter_without_one_is_that_of_its_model(tmp_path):
    fields = {"base_model_name_or_path": str(TOKENIZER), "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    of_model = load_tokenizer(str(TOKENIZER), None)
    assert load_tokenizer(str(tmp_path), None).get_vocab() == of_model.get_vocab()
    of_model.add_tokens(["<extra>"])
    of_model.save_pretrained(tmp_path)
    assert "<extra>" in load_tokenizer(str(tmp_path), None).get_vocab()


def test_end_of_sequence_of_an_adapter_is_that_of_its_models_revision(target, hub_cache, tmp_path):
    hub_cache("org/target", target, "v1")
    main = tmp_path / "main"
    shutil.copytree(target, main)
    GenerationConfig(eos_token_id=3).save_pretrained(main)
    hub_cache("org/target", main)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    fields = {"base_model_name_or_path": "org/target", "revision": "v1", "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    assert end_of_sequence_ids(str(adapter), None) == frozenset(ENDS)


@pytest.mark.parametrize(
    ("name", "source"), [("org/target@v1", {}), ("org/target", {"revision": "v1"})]
)
def test_end_of_sequence_of_a_revision_is_read_there(name, source, target, hub_cache, tmp_path):
    hub_cache("org/target", target, "v1")
    main = tmp_path / "main"
    shutil.copytree(target, main)
    GenerationConfig(eos_token_id=3).save_pretrained(main)
    hub_cache("org/target", main)
    assert end_of_sequence_ids(name, None, **source) == frozenset(ENDS)


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99", "mps"])
def test_device_that_is_not_there_or_not_supported_is_refused(device):
    with raises_at(ConfigError, "device"):
        default_device(device)


@pytest.mark.parametrize(
    ("options", "where"), [({"dtype": "bfloat16"}, "dtype"), ({"device": "meta"}, "device")]
)
def test_llm_of_a_loaded_model_refuses_another_dtype_or_device(options, where, model):
    with raises_at(ConfigError, where):
        LLM(model, **options)


def test_llm_of_a_loaded_model_takes_the_dtype_and_device_it_has(model):
    llm = LLM(model, dtype="float32", device="cpu")
    assert llm.engine.target.model is model
