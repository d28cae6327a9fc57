"""Draft models: students cut from their target, plain folders, tables of other sizes, positions."""

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
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.recipe.drafter_config import sketch_drafter
from tests.support.cases import OPT, World, student
from tests.support.chi2 import SMALL_VOCAB, assert_drafts_leave_the_target_its_text
from tests.support.contract import (
    assert_ragged_rows_draft_as_alone,
    assert_unroll_equals_draft,
    packed,
    random_rows,
)
from tests.support.engines import make_llm, same_text
from tests.support.tokenizers import byte_level
from tests.support.training import recipe_of

FILE = "model.safetensors"
IDS = torch.tensor([[5, 9, 11, 42, 7, 90, 33, 8, 61, 20, 3]])
PROMPTS = [{"prompt_token_ids": [3 + (i * i) % 90 for i in range(n)]} for n in (9, 4)]


def drafted(model: Any, drafter: DraftModel, k: int = 3, tokens: int = 21, **options: Any) -> LLM:
    """An LLM that has written greedily, with drafting on, what it also writes with drafting off."""
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=k, **options)
    return same_text(llm, PROMPTS, tokens)


# ---------------------------------------------------------------------- cut from the target


@pytest.mark.slow
@pytest.mark.parametrize("kept", [[0, 2], [1, 2]])
@torch.no_grad()
def test_a_cut_student_is_the_target_with_layers_passed_over(
    tiny_model, any_architecture: str, kept
) -> None:
    model = tiny_model(any_architecture)
    target = FrozenTarget(model)
    drafter = student(target, from_target=kept)
    assert drafter.model.config.num_hidden_layers == 2
    (left,) = {0, 1, 2} - set(kept)

    def pass_on(module, args, kwargs, output):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        return (hidden_states, *output[1:]) if isinstance(output, tuple) else hidden_states

    handle = target._parts.layers[left].register_forward_hook(pass_on, with_kwargs=True)
    expected = model(IDS).logits
    handle.remove()
    assert not torch.allclose(expected, model(IDS).logits, atol=1e-2)
    torch.testing.assert_close(drafter.model(IDS).logits, expected, atol=1e-5, rtol=1e-4)


COMMON = dict(vocab_size=101, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
GPT2 = dict(COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=256)


@pytest.mark.slow
@pytest.mark.parametrize("kind, fields", [("gpt2", GPT2), ("opt", COMMON | OPT)])
def test_older_architectures_have_names_of_their_own(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
    target = FrozenTarget(model)
    whole = student(target, from_target={"first": target.num_layers})
    metrics = drafted(model, whole).get_metrics()
    assert 1 + metrics.num_accepted_tokens / metrics.num_drafts == 4
    cut = student(target, 0.02, from_target={"last": 1})
    drafted(model, cut)
    folder = export_drafter(cut, tmp_path, dtype=torch.float32)
    assert len(load_drafter(folder, target).runner.layers) == 1
    assert cut.config.describe().startswith(f"a causal LM of its own: {kind}, 1 x ")
    drafted(model, student(target, config={"model_type": kind, **fields}))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"from_target": {"first": 4}}, "drafter.from_target"),
        ({"from_target": [0, 7]}, "drafter.from_target"),
        ({"config": {"model_type": "no such thing"}}, "no such thing"),
        ({"config": {"model_type": "gemma3"}}, "gemma3"),
        ({"init_from": "a", "config": {}, "from_target": [0]}, "init_from.*from_target.*config"),
        ({"from_target": {"first": 1, "last": 1}}, "from_target"),
    ],
)
def test_start_that_is_none_is_refused(tiny_model, options, named: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=named):
        student(FrozenTarget(tiny_model("llama")), **options)


@torch.no_grad()
def test_engines_that_read_an_export_whole_draft_the_tokens_it_was_trained_for(
    tiny_model, tmp_path: Path
) -> None:
    """The head in the file is not the embedding, to which it is tied again when it is read here."""
    target = FrozenTarget(tiny_model("qwen2", tie_word_embeddings=True))
    drafter = student(target, 0.02, from_target={"last": 2}, draft_vocab_size=20)
    drafter.target_ids.copy_(torch.arange(3, 63, 3))
    folder = export_drafter(drafter, tmp_path, dtype=torch.float32)
    expected = drafter.model(IDS).logits[..., drafter.target_ids].argmax(-1)
    in_engines = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(in_engines(IDS).logits.argmax(-1), drafter.target_ids[expected])
    again = load_drafter(folder, target)
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert again.config == drafter.config
    torch.testing.assert_close(again.model.state_dict(), drafter.model.state_dict())


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
        logits = again(IDS).logits
        assert logits.shape[-1] == target.vocab_size
        known = min(logits.shape[-1], expected.shape[-1])
        torch.testing.assert_close(logits[..., :known], expected[..., :known])
    tokenizer.save_pretrained(tmp_path / "again")
    for folder in ("draft", "again"):
        drafting = {"method": "draft_model", "model": str(tmp_path / folder)}
        llm = LLM(str(target_folder), speculative_config=drafting)
        same_text(llm, prompts=["The quick brown", "def add"])


def test_a_tied_table_is_written_once(tiny_model, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model, target = tiny_model("qwen2"), FrozenTarget(tiny_model("llama"))
    model.save_pretrained(tmp_path / "draft")
    export_drafter(load_drafter(tmp_path / "draft", target), tmp_path / "again", dtype=dtype)
    names, written = (set(load_file(tmp_path / n / FILE)) for n in ("draft", "again"))
    assert written == names and "lm_head.weight" not in names
    again = load_drafter(tmp_path / "again", target).model
    assert again.lm_head.weight is again.get_input_embeddings().weight
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight.to(dtype).float())


# ------------------------------------------------------------------- tables padded to other sizes


def small_table(model: Any, size: int) -> World:
    """A target, and a draft model whose table has another size."""
    target = FrozenTarget(model)
    return target, student(target, 0.1, config={"model_type": "opt", **OPT, "vocab_size": size})


@pytest.mark.parametrize("size", [64, 120])
def test_tables_of_other_sizes_unroll_as_they_draft(tiny_model, size: int) -> None:
    """Tokens that the student has no row for, and rows that mean nothing."""
    world = small_table(tiny_model("llama"), size)
    assert world[1].head(torch.zeros(2, 24)).shape == (2, min(size, 101))
    assert_unroll_equals_draft(world, packed([9, 6]), torch.arange(101) < size)
    assert_ragged_rows_draft_as_alone(world, random_rows(5, 9, 7))


def test_tables_of_other_sizes_keep_the_targets_distribution(tiny_model) -> None:
    model = tiny_model("llama", vocab_size=SMALL_VOCAB, max_position_embeddings=64)
    assert_drafts_leave_the_target_its_text(model, small_table(model, 5)[1])


@pytest.mark.parametrize("size", [64, 120])
@pytest.mark.parametrize("reduced", [False, True])
def test_an_export_has_a_table_of_the_targets_size(
    tiny_model, tmp_path: Path, size: int, reduced: bool
) -> None:
    """vLLM refuses another; what is drafted is the same."""
    options = {"draft_vocab_size": 32} if reduced else {}
    target = FrozenTarget(tiny_model("llama"))
    config = {"model_type": "opt", **OPT, "vocab_size": size}
    drafter = student(target, 0.1, config=config, **options)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    again = load_drafter(folder, target)
    assert again.config.vocab_size == 101 and again.config.reduced_vocabulary == reduced
    known = min(size, 101)
    ids = torch.randint(0, known, (1, 9))
    expected = drafter.model(ids).logits
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert logits.shape[-1] == 101
    if not reduced:
        torch.testing.assert_close(logits[..., :known], expected[..., :known])
        assert (logits[..., known:] <= expected.amax(-1, keepdim=True)).all()
    hidden = torch.randn(2, 24)
    drafted_before = drafter.head(hidden).argmax(-1)
    assert torch.equal(again.head(hidden).argmax(-1), drafted_before)


def test_an_export_names_no_token_that_its_target_lacks(tiny_model, tmp_path: Path) -> None:
    """As a model whose only further row is a padding token."""
    target = FrozenTarget(tiny_model("llama"))
    config = {"model_type": "opt", **OPT, "vocab_size": 102, "pad_token_id": 101, "bos_token_id": 1}
    folder = export_drafter(student(target, config=config), tmp_path / "head", dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(folder).config
    assert (exported.vocab_size, exported.pad_token_id, exported.bos_token_id) == (101, None, 1)


# ---------------------------------------------------------------------- positions


def test_longer_texts_than_the_draft_model_knows_are_refused(tiny_model) -> None:
    model = tiny_model("llama")  # 256 positions
    known = {"model_type": "opt", **OPT, "max_position_embeddings": 64}
    drafter = student(FrozenTarget(model), config=known)
    with pytest.raises(ConfigError, match="max_model_len is 256, .* made for 64 positions"):
        drafted(model, drafter, max_model_len=256)
    assert drafted(model, drafter).engine.max_model_len == 64  # where nothing was asked for
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 65}
    recipe = recipe_of("draft_model", drafter={"config": {}}, training={"steps": 1}, data=data)
    with pytest.raises(ConfigError, match="data.max_length is 65, but .* made for 64 positions"):
        sketch_drafter(recipe, drafter.config)


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_drafting_goes_on_to_the_last_position(tiny_model, kind: str) -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    plain = tiny_model("llama", num_hidden_layers=1).config.to_dict()
    fields = {"model_type": "opt", **OPT} if kind == "opt" else plain
    drafter = student(FrozenTarget(model), 0.1, config=fields | {"max_position_embeddings": 32})
    llm = drafted(model, drafter, k=5, tokens=32)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, False)):
        assert len(prompt["prompt_token_ids"]) + len(output.outputs[0].token_ids) in (32, 33)
