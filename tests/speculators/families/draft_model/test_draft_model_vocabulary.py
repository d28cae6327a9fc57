"""Draft models with another tokenizer: refused, or drafting what both have, still lossless."""

from __future__ import annotations

import shutil

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.speculators.export.convert import convert
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.token_map import FILE
from tests.support.cases import OPT
from tests.support.chi2 import SMALL_VOCAB, assert_drafts_leave_the_target_its_text
from tests.support.contract import (
    DEPTHS,
    assert_ragged_rows_draft_as_alone,
    assert_unroll_equals_draft,
    draft_logits,
    packed,
    random_rows,
)
from tests.support.engines import ids_of, same_text
from tests.support.other_tokenizers import (  # noqa: F401 (fixtures)
    NOTHING,
    draft_folder,
    drafting,
    other_tokens,
    target_folder,
)

PROMPTS = ["The quick brown fox", "def add(left, right):", "läuft über die 日本語 🙂"]


OPENINGS = pytest.mark.parametrize("opening", [[], [4, 7]], ids=["no opening", "two"])


def starting_with(row: torch.Tensor, *ids: int) -> torch.Tensor:
    return torch.cat([torch.tensor(ids), row[len(ids) :]])


@OPENINGS
def test_unroll_equals_draft(tiny_model, opening) -> None:
    world = other_tokens(tiny_model("llama"), 90, opening)
    batch = packed([9, 7, 8])
    ids = batch["input_ids"][0]
    ids[:2], ids[9], ids[12], ids[20:23] = NOTHING, 8, 13, NOTHING
    known = torch.isin(torch.arange(101), world[1].draft_to_target)
    assert_unroll_equals_draft(world, batch, known)


def test_texts_that_are_longer_in_the_draft_models_tokens(tiny_model) -> None:
    world = other_tokens(tiny_model("llama"), 90, [4], max_position_embeddings=8)
    batch = packed([9, 7])
    batch["input_ids"][0, :6] = 8
    known = torch.isin(torch.arange(101), world[1].draft_to_target)
    assert_unroll_equals_draft(world, batch, known)


def test_a_token_that_is_spelt_by_nothing_changes_nothing(tiny_model) -> None:
    world = other_tokens(tiny_model("llama"), 90, [4])
    forced = torch.tensor([3, 4, 0])
    ids = torch.tensor([3, 8, 9, 1, 10, 5, 7])
    expected = draft_logits(world, ids, 5, DEPTHS, forced)
    silent = torch.tensor([NOTHING, 3, 8, NOTHING, 13, 9, 1, 10, 5, 7, NOTHING])
    torch.testing.assert_close(draft_logits(world, silent, 9, DEPTHS, forced), expected)


@OPENINGS
def test_ragged_rows_draft_as_alone(tiny_model, opening) -> None:
    world = other_tokens(tiny_model("llama"), 90, opening)
    rows = random_rows(5, 9, 7, 1, 3)
    rows += [torch.tensor([NOTHING, NOTHING]), torch.tensor([NOTHING, 3])]
    rows[0] = starting_with(rows[0], NOTHING, 8)
    assert_ragged_rows_draft_as_alone(world, rows)


@OPENINGS
def test_sampled_text_is_distributed_as_the_targets(tiny_model, opening) -> None:
    model = tiny_model("llama", vocab_size=SMALL_VOCAB, max_position_embeddings=64)
    assert_drafts_leave_the_target_its_text(model, other_tokens(model, 9, opening)[1])


def test_only_shared_tokens_are_drafted(tiny_model) -> None:
    """q is the model's own distribution over them, renormalised (TLI)."""
    _, drafter = other_tokens(tiny_model("llama"), 90, [4])
    hidden = torch.randn(3, OPT["hidden_size"])
    whole = drafter.runner.logits(hidden).softmax(-1)[:, drafter.token_map.draft_ids]
    renormalised = whole / whole.sum(-1, keepdim=True)
    torch.testing.assert_close(drafter.head(hidden).softmax(-1), renormalised)


# ------------------------------------------------------------------ real tokenizers, real folders


def test_another_tokenizer_is_refused_with_the_reason(
    target_folder: str, draft_folder: str
) -> None:
    reason = "tokenizer is not the target's: .*use_heterogeneous_vocab: true"
    with pytest.raises(ConfigError, match=reason):
        LLM(target_folder, speculative_config=drafting(draft_folder))


def test_a_draft_model_without_its_tokenizer_is_refused_with_the_place_for_it(
    target_folder: str, draft_folder: str, tmp_path
) -> None:
    bare = shutil.copytree(draft_folder, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="bare: .*of the draft model beside its config.json"):
        LLM(target_folder, speculative_config=drafting(str(bare)))


@pytest.mark.slow
def test_an_intersection_drafts_and_is_exported_with_its_map(
    target_folder: str, draft_folder: str, tmp_path
) -> None:
    llm = same_text(
        LLM(target_folder, speculative_config=drafting(draft_folder, use_heterogeneous_vocab=True)),
        prompts=PROMPTS,
    )
    drafter = llm.engine.proposer._drafter
    assert isinstance(drafter, DraftModel) and len(drafter.token_map.opening_ids) == 1
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    assert read_drafter_config(folder) == drafter.config
    converted = convert(folder, tmp_path / "converted")  # without a target at hand
    assert (converted / FILE).read_bytes() == (folder / FILE).read_bytes()
    again = LLM(target_folder, speculative_config=drafting(folder))
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=5)
    texts = [ids_of(engine.generate(PROMPTS, params, False)) for engine in (llm, again)]
    assert texts[0] == texts[1]
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=FILE):
        load_drafter(folder, FrozenTarget.from_pretrained(target_folder))
