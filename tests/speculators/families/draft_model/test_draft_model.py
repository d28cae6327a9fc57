"""Draft models: students cut from their target, plain Hugging Face folders, tables of other sizes,
positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.families.draft_model.model import DraftModel, DraftModelOptions
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.recipe.drafter_config import sketch_drafter
from tests.support.cases import OPT
from tests.support.chi2 import SMALL_VOCAB, assert_drafts_leave_the_target_its_text
from tests.support.contract import (
    assert_ragged_rows_draft_as_alone,
    assert_unroll_equals_draft,
    packed,
    random_rows,
)
from tests.support.engines import make_llm
from tests.support.recipes import recipe_of
from tests.support.tokenizers import byte_level

IDS = torch.tensor([[5, 9, 11, 42, 7, 90, 33, 8, 61, 20, 3]])
PROMPTS = [{"prompt_token_ids": [3 + (i * i) % 90 for i in range(n)]} for n in (9, 4)]


def student(target: FrozenTarget, noise: float = 0.0, **options: Any) -> DraftModel:
    """The draft model that a recipe with these options starts with, and some noise."""
    chosen = DraftModelOptions.model_validate(options)
    torch.manual_seed(1)
    drafter = DraftModel(
        config_for_target(target, "draft_model", **chosen.shape({}, target))
    ).attach(target)
    drafter.initialise_from(target, chosen)
    for parameter in drafter.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return drafter.eval()


def drafted(model: Any, drafter: DraftModel, k: int = 3, tokens: int = 21, **options: Any) -> LLM:
    """An LLM that has written greedily, with drafting on, what it also writes with drafting off."""
    model.generation_config.eos_token_id = None
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=k, **options)
    return same_text(llm, tokens)


def same_text(llm: LLM, tokens: int = 21, prompts: Any = PROMPTS) -> LLM:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    off = llm.generate(prompts, params, False, speculate=False)
    llm.reset_metrics()
    on = llm.generate(prompts, params, False)
    assert [o.outputs[0].token_ids for o in on] == [o.outputs[0].token_ids for o in off]
    assert llm.get_metrics().num_drafts > 0
    return llm


# ---------------------------------------------------------------------- cut from the target


@pytest.mark.slow
@pytest.mark.parametrize("kept", [[0, 2], [1, 2]])
@torch.no_grad()
def test_a_cut_student_is_the_target_with_layers_passed_over(
    tiny_model, any_architecture: str, kept
) -> None:
    """Weights, masks and whatever else its configuration says for each layer come along."""
    model = tiny_model(any_architecture)
    target = FrozenTarget(model)
    drafter = student(target, from_target=kept)
    assert drafter.model.config.num_hidden_layers == 2
    (left,) = {0, 1, 2} - set(kept)

    def pass_on(module, args, kwargs, output):
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    handle = target._parts.layers[left].register_forward_hook(pass_on, with_kwargs=True)
    expected = model(IDS).logits
    handle.remove()
    assert not torch.allclose(expected, model(IDS).logits, atol=1e-2)
    torch.testing.assert_close(drafter.model(IDS).logits, expected, atol=1e-5, rtol=1e-4)


COMMON = dict(vocab_size=101, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
GPT2 = dict(COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=256)


@pytest.mark.slow
@pytest.mark.parametrize("kind, fields", [("gpt2", GPT2), ("opt", OPT | {"vocab_size": 101})])
def test_older_architectures_have_names_of_their_own(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """As targets, cut students, students from a configuration, and plain folders."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
    target = FrozenTarget(model)
    metrics = drafted(
        model, student(target, from_target={"first": target.num_layers})
    ).get_metrics()
    assert 1 + metrics.num_accepted_tokens / metrics.num_drafts == 4
    cut = student(target, 0.02, from_target={"last": 1})
    drafted(model, cut)
    folder = export_drafter(cut, tmp_path, dtype=torch.float32)
    assert len(load_drafter(folder, target).runner.layers) == 1
    assert cut.config.describe().startswith(f"a causal LM of its own: {kind}, 1 x ")
    drafted(model, student(target, config={"model_type": kind, **fields}))


@pytest.mark.parametrize("kept", [{"first": 4}, [0, 7]], ids=str)
def test_wrong_cuts_are_refused(tiny_model, kept) -> None:
    with pytest.raises(ConfigError, match="drafter.from_target"):
        student(FrozenTarget(tiny_model("llama")), from_target=kept)


def recipe(drafter: dict[str, Any], **sections: Any) -> Any:
    return recipe_of("draft_model", drafter=drafter, **sections)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"init_from": "a", "config": {}, "from_target": [0]}, "init_from.*from_target.*config"),
        ({"from_target": {"first": 1, "last": 1}}, "from_target"),
    ],
)
def test_one_start_is_given(options, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        recipe(options)


@pytest.mark.parametrize("model_type", ["no such thing", "gemma3"])
def test_what_is_no_causal_lm_is_refused(tiny_model, model_type) -> None:
    with pytest.raises(ConfigError, match=model_type):
        student(FrozenTarget(tiny_model("llama")), config={"model_type": model_type})


# ---------------------------------------------------------------------- plain folders

# architecture, its config, of save_pretrained
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sharded": ("llama", {"vocab_size": 448}, {"max_shard_size": "20KB"}),
    "tied, a short table": ("qwen2", {"vocab_size": 384}, {}),
    "experts": ("mixtral", {}, {}),
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(400)


@pytest.fixture(scope="module")
def target_folder(tiny_model, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=416).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_plain_folder_drafts(
    tiny_model, tokenizer, target_folder: Path, tmp_path: Path, name: str
) -> None:
    """As transformers saves it, without a word of ours; also once it went through our export."""
    architecture, config, how = FOLDERS[name]
    model = tiny_model(architecture, **({"vocab_size": 416} | config))
    model.save_pretrained(tmp_path / "draft", **how)
    tokenizer.save_pretrained(tmp_path / "draft")
    assert len(list((tmp_path / "draft").glob("*.safetensors"))) > 1 or not how
    target = FrozenTarget.from_pretrained(str(target_folder))
    drafter = load_drafter(tmp_path / "draft", target)
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(drafter.model(IDS).logits, expected)
        export_drafter(drafter, tmp_path / "again", dtype=torch.float32)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        torch.testing.assert_close(again(IDS).logits, expected)
    tokenizer.save_pretrained(tmp_path / "again")
    for folder in ("draft", "again"):
        drafting = {
            "method": "draft_model",
            "model": str(tmp_path / folder),
            "num_speculative_tokens": 3,
        }
        same_text(
            LLM(str(target_folder), speculative_config=drafting),
            prompts=["The quick brown", "def add"],
        )


def test_a_tied_table_is_written_once(tiny_model, tmp_path: Path) -> None:
    """Where it is converted, too; and it is read as both."""
    dtype = torch.bfloat16
    model, target = tiny_model("qwen2"), FrozenTarget(tiny_model("llama"))
    model.save_pretrained(tmp_path / "draft")
    export_drafter(load_drafter(tmp_path / "draft", target), tmp_path / "again", dtype=dtype)
    names = [
        set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("draft", "again")
    ]
    assert names[0] == names[1] and "lm_head.weight" not in names[0]
    again = load_drafter(tmp_path / "again", target).model
    assert again.lm_head.weight is again.get_input_embeddings().weight
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight.to(dtype).float())


# ------------------------------------------------------------------- tables padded to other sizes


def small_table(model: Any, size: int, noise: float = 0.1) -> tuple[FrozenTarget, DraftModel]:
    """A target, and a draft model whose table has another size."""
    target = FrozenTarget(model)
    return target, student(target, noise, config={"model_type": "opt", **OPT, "vocab_size": size})


@pytest.mark.parametrize("size", [64, 120])
def test_tables_of_other_sizes_unroll_as_they_draft(tiny_model, size: int) -> None:
    """The target may write tokens that the student has no row for; the student may have rows that
    mean nothing."""
    world = small_table(tiny_model("llama"), size)
    assert world[1].head(torch.zeros(2, 24)).shape == (2, min(size, 101))
    assert_unroll_equals_draft(world, packed([9, 6]), torch.arange(101) < size)
    assert_ragged_rows_draft_as_alone(world, random_rows(5, 9, 7))


def test_tables_of_other_sizes_keep_the_targets_distribution(tiny_model) -> None:
    model = tiny_model("llama", vocab_size=SMALL_VOCAB, max_position_embeddings=64)
    assert_drafts_leave_the_target_its_text(model, small_table(model, 5)[1])


# ---------------------------------------------------------------------- positions


def test_longer_texts_than_the_draft_model_knows_are_refused(tiny_model) -> None:
    model = tiny_model("llama")  # 256 positions
    known = {"model_type": "opt", **OPT, "max_position_embeddings": 64}
    drafter = student(FrozenTarget(model), config=known)
    with pytest.raises(ConfigError, match="max_model_len is 256, .* made for 64 positions"):
        drafted(model, drafter, max_model_len=256)
    assert drafted(model, drafter).engine.max_model_len == 64  # where nothing was asked for
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 65}
    with pytest.raises(ConfigError, match="data.max_length is 65, but .* made for 64 positions"):
        sketch_drafter(recipe({"config": {}}, training={"steps": 1}, data=data), drafter.config)


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_drafting_goes_on_to_the_last_position(tiny_model, kind: str) -> None:
    """Learned positions end there; drafts that will never be verified may be asked for behind
    it."""
    model = tiny_model("llama", max_position_embeddings=32)
    plain = tiny_model("llama", num_hidden_layers=1).config.to_dict()
    fields = {"model_type": "opt", **OPT} if kind == "opt" else plain
    drafter = student(FrozenTarget(model), 0.1, config=fields | {"max_position_embeddings": 32})
    llm = drafted(model, drafter, k=5, tokens=32)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, False)):
        assert len(prompt["prompt_token_ids"]) + len(output.outputs[0].token_ids) in (32, 33)
