"""`draft_vocab_size` and `draft_token_ids` of speculative_config: what is proposed, what is
refused."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.token_counts import FILE
from tests.support.cases import student
from tests.support.engines import byte_tokenizer, ids_of
from tests.support.errors import raises_at

END = 257  # of the target of `folders`
PROMPT = [{"prompt_token_ids": [65, 66, 67, 68]}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def counted(folders, tmp_path_factory) -> tuple[str, str]:
    """The target, and a draft model that was supervised most on tokens of large ids."""
    target = FrozenTarget.from_pretrained(folders[0])
    drafter = student(target, from_target={"last": 2})
    drafter.tokenizer = byte_tokenizer()
    drafter.token_counts = torch.arange(target.vocab_size)
    drafter.token_counts[END] = 0
    folder = tmp_path_factory.mktemp("counted") / "drafter"
    return folders[0], str(export_drafter(drafter, folder, dtype=torch.float32))


def llm(target: str, drafter: str, **options) -> LLM:
    config = {"model": drafter, "num_speculative_tokens": 3, **options}
    return LLM(target, speculative_config=config, max_num_seqs=2)


def proposed(small: LLM) -> list[int]:
    return small.engine.proposer._drafter.draft_to_target.tolist()


def test_size_keeps_the_most_supervised_tokens_and_the_end(counted):
    small = llm(*counted, draft_vocab_size=10)
    assert proposed(small) == [249, 250, 251, 252, 253, 254, 255, 256, END, 258]
    assert ids_of(small.generate(PROMPT, GREEDY)) == ids_of(
        LLM(counted[0]).generate(PROMPT, GREEDY)
    )


def test_ids_of_a_file_are_proposed_or_the_first_of_them(counted, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([70, END, 66, 90]))
    assert proposed(llm(*counted, draft_token_ids=str(file))) == [66, 70, 90, END]
    assert proposed(llm(*counted, draft_token_ids=str(file), draft_vocab_size=2)) == [70, END]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "there are no ids"),
        ([END, 4, 4], "twice"),
        ([END, 259], "no tokens that the drafter proposes"),
        ([END, -1], "no tokens that the drafter proposes"),
        ([4, 5], "ends a response"),
        ({"ids": [END]}, "JSON list"),
        ([END, 4.5], "JSON list"),
    ],
)
def test_ids_that_make_no_draft_vocabulary_are_refused(ids, says, counted, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    with pytest.raises(ConfigError, match=says) as error:
        llm(*counted, draft_token_ids=str(file))
    assert error.value.where == "draft_token_ids"


def test_file_that_is_not_there_is_refused(counted, tmp_path):
    with raises_at(ConfigError, "draft_token_ids"):
        llm(*counted, draft_token_ids=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "options", [{"draft_vocab_size": 260}, {"draft_vocab_size": 3, "draft_token_ids": [END, 4]}]
)
def test_size_beyond_the_tokens_there_are_is_refused(options, counted):
    with raises_at(ConfigError, "draft_vocab_size"):
        llm(*counted, **options)


def test_size_without_recorded_counts_says_what_to_give(folders):
    with pytest.raises(ConfigError, match="give draft_token_ids"):
        llm(*folders, draft_vocab_size=10)


def test_counts_that_cannot_be_read_are_refused(counted, tmp_path):
    target = FrozenTarget.from_pretrained(counted[0])
    folder = export_drafter(load_drafter(counted[1], target), tmp_path / "d", dtype=torch.float32)
    assert (folder / FILE).exists()  # an export keeps them
    (folder / FILE).write_bytes(b"nothing")
    with raises_at(CheckpointError, folder / FILE):
        load_drafter(folder, target)
