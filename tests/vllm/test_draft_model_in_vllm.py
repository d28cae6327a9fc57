"""Draft models in real vLLM: students cut from their target, and models of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support import cases
from tests.support.cases import student
from tests.support.tokenizers import byte_level
from tests.support.vllm import PROMPTS, WRITTEN, some_accepted

SIZES = {"vocab_size": 128, "hidden_size": 128, "ffn_dim": 96, "word_embed_proj_dim": 128}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = cases.OPT | SIZES | ENDS | {"num_hidden_layers": 3, "init_std": 0.3}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "opt"])
def test_a_cut_student_drafts_the_same(servable_model, same_in_vllm, architecture: str) -> None:
    model = servable_model(architecture, **(OPT if architecture == "opt" else {}))
    drafter = student(FrozenTarget(model), 0.02, from_target=[0, 1, 2])
    assert some_accepted(same_in_vllm(model, drafter))


def test_fewer_layers_draft_the_same(servable_model, same_in_vllm) -> None:
    """The layer that is passed over matters little."""
    model = servable_model("llama")
    with torch.no_grad():
        for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            module.weight.mul_(0.1)
    drafter = student(FrozenTarget(model), from_target={"spread": 2})
    assert some_accepted(same_in_vllm(model, drafter))


def test_a_reduced_vocabulary_drafts_the_same(servable_model, same_in_vllm) -> None:
    """vLLM ranks all tokens, and drafts those of the vocabulary."""
    model = servable_model("qwen2", tie_word_embeddings=True)
    reduced = {"draft_vocab_size": model.config.vocab_size // 2}
    drafter = student(FrozenTarget(model), 0.02, from_target=[0, 1, 2], **reduced)
    drafter.target_ids.add_(model.config.vocab_size // 4)
    assert some_accepted(same_in_vllm(model, drafter))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [124, 136])
def test_a_table_of_another_size_drafts_the_same(
    servable_model, same_in_vllm, tmp_path: Path, rows: int, tied: bool
) -> None:
    """vLLM refuses the model as it is; its export has the target's 128 rows."""
    model = servable_model("qwen2", tie_word_embeddings=tied)
    target = FrozenTarget(model)
    padded = student(target, 0.02, from_target=[0, 1, 2]).model
    padded.resize_token_embeddings(rows, mean_resizing=False)
    padded.save_pretrained(tmp_path / "padded")
    drafter = load_drafter(tmp_path / "padded", target)
    assert drafter.config.vocab_size == rows
    assert some_accepted(same_in_vllm(model, drafter))


def test_another_tokenizer_loads_with_its_map_beside(servable_model, serve, tmp_path: Path) -> None:
    """vLLM makes a map of its own, from the tokenizers' words; the text is the target's all the
    same."""
    tokenizers = [byte_level(size, eos_token="<|end|>") for size in (400, 380)]
    folders = [tmp_path / "target", tmp_path / "plain"]
    for folder, tokenizer, layers in zip(folders, tokenizers, (3, 1)):
        model = servable_model("llama", vocab_size=len(tokenizer), num_hidden_layers=layers)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    drafting = {"method": "draft_model", "use_heterogeneous_vocab": True}
    drafting["num_speculative_tokens"] = 3
    llm = LLM(str(folders[0]), speculative_config=drafting | {"model": str(folders[1])})
    head = export_drafter(llm.engine.proposer._drafter, tmp_path / "head", dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True)
    ours = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    job = {"model": str(folders[0]), "prompts": PROMPTS, "max_tokens": WRITTEN}
    job["options"] = {"skip_tokenizer_init": False}
    theirs = serve(job | {"speculative_config": drafting | {"model": str(head)}})
    assert theirs["token_ids"] == [output.outputs[0].token_ids for output in ours]
    assert theirs["counters"]["vllm:spec_decode_num_drafts"] > 0


def test_a_model_of_its_own_drafts_the_same(servable_model, same_in_vllm) -> None:
    """Of another architecture; it agrees with the target by chance."""
    model = servable_model("llama")
    config = OPT | {"model_type": "opt", "num_hidden_layers": 1}
    drafter = student(FrozenTarget(model), config=config)
    assert same_in_vllm(model, drafter).num_drafts > 0
