"""What a rollout says of its rounds is what the engine did, and its rows hold each rejected suffix
once."""

from __future__ import annotations

import numpy as np
import pytest

from inference import SamplingParams
from speculators.errors import DataError
from tests.inference.conftest import StubProposer
from tests.inference.modules import make_llm
from tests.train.trainer.test_loop import make_recipe, make_rows, make_trainer
from train.data.packing import collate
from train.on_policy.branches import branching_row, rollout_rows
from train.on_policy.rollout import Rollout, RolloutWriter, Round, RoundLog

PROMPTS = [[3 + (i * i) % 90 for i in range(n)] for n in (9, 1, 12, 5)]
DRAFTS, WRITTEN = 3, 21


def checked(rollout: Rollout) -> Rollout:
    """Whose rounds follow one another, each keeping the drafts that are the text."""
    text, at = [*rollout.prompt_ids, *rollout.output_ids], len(rollout.prompt_ids) + 1
    for each in rollout.rounds:
        assert each.length == at and 0 <= each.accepted <= len(each.drafts)
        kept = list(each.drafts[: each.accepted])
        assert text[at : at + each.accepted] == kept[: max(len(text) - at, 0)]
        at += each.accepted + 1
    assert at >= len(text)
    return rollout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_writer_logs_the_rounds_of_its_text(tiny_model, tmp_path, temperature) -> None:
    """Greedy text is the target's own; seeds decide everything; the drafter goes on training as it
    was."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe())
    drafter, before = trainer.drafter.train(), trainer.drafter.state_dict()
    sizes = {
        "num_speculative_tokens": DRAFTS,
        "max_new_tokens": WRITTEN,
        "temperatures": temperature,
    }
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 25}
    tree = trainer.recipe.model_dump(mode="json") | {
        "on_policy": sizes,
        "regenerate": {"batch_size": 3},
        "data": data,
    }
    writer = RolloutWriter(trainer.target, type(trainer.recipe).model_validate(tree))
    found = [checked(each) for each in writer.write(drafter, PROMPTS, [7, 8, 9, 10])]
    assert found == writer.write(drafter, PROMPTS, [7, 8, 9, 10])
    assert [len(each.prompt_ids) + len(each.output_ids) <= 25 for each in found] == [True] * 4
    if temperature == 0:
        plain = make_llm(trainer.target).generate(
            [{"prompt_token_ids": p} for p in PROMPTS],
            SamplingParams(temperature=0, max_tokens=WRITTEN),
            False,
        )
        for rollout, output in zip(found, plain):
            assert (
                list(rollout.output_ids) == output.outputs[0].token_ids[: len(rollout.output_ids)]
            )
    else:
        assert found != writer.write(drafter, PROMPTS, [1, 2, 3, 4])
    assert (
        drafter.training
        and all(p.requires_grad for p in drafter.parameters())
        and drafter.target is trainer.target
    )
    assert all((before[name] == tensor).all() for name, tensor in drafter.state_dict().items())


def stubbed(model, kind: str) -> list[Rollout]:
    """Texts drafted by a proposer that is always right, or always wrong."""
    model.generation_config.eos_token_id = None
    asked, params = (
        [{"prompt_token_ids": p} for p in PROMPTS],
        SamplingParams(temperature=0, max_tokens=WRITTEN),
    )
    plain = make_llm(model).generate(asked, params, False)
    texts = {tuple(p): list(o.outputs[0].token_ids) + [5] * DRAFTS for p, o in zip(PROMPTS, plain)}
    log = RoundLog()
    llm = make_llm(
        model, proposer=StubProposer(kind, DRAFTS, 101, texts), max_num_seqs=2, on_round=log
    )
    outputs = llm.generate(asked, params, False)
    found = [
        checked(Rollout(tuple(p), tuple(o.outputs[0].token_ids), tuple(log.rounds[o.request_id])))
        for p, o in zip(PROMPTS, outputs)
    ]
    totals = llm.get_metrics()
    assert sum(each.counters().num_accepted_tokens for each in found) == totals.num_accepted_tokens
    assert sum(each.counters().num_drafts for each in found) == totals.num_drafts
    return found


@pytest.mark.parametrize("depths", [1, 2, 3, 5])
def test_suffixes_are_as_many_as_were_rejected(tiny_model, depths) -> None:
    """All drafts rejected: each round leaves what its later depths read. All accepted: nothing."""
    model = tiny_model("llama")
    for kind, branch in (("right", 0), ("wrong", min(DRAFTS, depths) - 1)):
        for rollout in stubbed(model, kind):
            row = branching_row(rollout, depths, 256)
            N = len(rollout.prompt_ids) + len(rollout.output_ids)
            assert len(row) == N + branch * len(rollout.rounds) and (row.forks[:N] < 0).all()
            into = row.paths >= N
            assert into.sum() == len(row) - N and len(np.unique(row.paths[into])) == into.sum()
            assert (row.forks[N:] >= len(rollout.prompt_ids)).all()
    ordinary = rollout_rows(stubbed(model, "wrong"), depths=depths, max_length=256, branches=False)
    assert all(row.paths is None for row in ordinary)


def test_what_the_end_cut_off_and_what_does_not_fit_has_no_branch() -> None:
    drafts = (50, 51, 52)
    cut = Rollout(
        (1, 2), (3, 50, 4), (Round(3, drafts, 1), Round(5, drafts, 0))
    )  # the second's bonus was not kept
    row = branching_row(cut, 3, 64)
    assert row.input_ids.tolist() == [1, 2, 3, 50, 4, 51] and row.forks.tolist() == [-1] * 5 + [3]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 4]
    assert row.paths[1].tolist() == [
        2,
        3,
        5,
    ]  # the slot that drafted: x_2, the accepted 50, the rejected 51
    assert len(branching_row(cut, 3, 5)) == 5 and branching_row(cut, 3, 5).paths[1].tolist() == [
        2,
        3,
        -1,
    ]
    assert branching_row(cut, 2, 64).forks.max() == -1  # nobody reads 51 there


def test_rows_with_branches_go_with_their_like_only() -> None:
    (branching,) = rollout_rows([Rollout((1, 2), (3, 4, 5), ())], depths=2, max_length=8)
    assert branching.paths is not None
    batch = collate([branching, branching], length=9)
    assert batch["paths"].shape == (2, 9, 2) and (batch["paths"][:, 5:] == -1).all()
    with pytest.raises(DataError, match="rows with branches"):
        collate([branching, make_rows(1)[0]])
