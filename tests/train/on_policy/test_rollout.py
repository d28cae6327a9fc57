"""Texts written with the drafter in training: the target's own, by seeds alone."""

from __future__ import annotations

import pytest

from draftsmith.inference import SamplingParams
from draftsmith.train.on_policy.rollout import RolloutWriter
from tests.support.engines import make_llm
from tests.support.training import make_recipe, make_trainer

PROMPTS = [[3 + (i * i) % 90 for i in range(n)] for n in (9, 1, 12, 5)]
DRAFTS, WRITTEN = 3, 21


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_writer_counts_the_drafts_of_its_texts(tiny_model, tmp_path, temperature) -> None:
    """Greedy text is the target's own; seeds decide everything; the drafter goes on training as it
    was."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe())
    drafter, before = trainer.drafter.train(), trainer.drafter.state_dict()
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 25}
    tree = trainer.recipe.model_dump(mode="json") | {
        "on_policy": {"max_new_tokens": WRITTEN},
        "evaluation": {"num_speculative_tokens": DRAFTS},
        "regenerate": {"batch_size": 3, "temperatures": {temperature: 1.0}},
        "data": data,
    }
    writer = RolloutWriter(trainer.target, type(trainer.recipe).model_validate(tree))
    rollouts = writer.write(drafter, PROMPTS, [7, 8, 9, 10])
    for rollout in rollouts:  # a token from prefill, and one with every verification but at the end
        tokens = 1 + rollout.num_drafts + rollout.num_accepted
        assert tokens - 1 <= len(rollout.output_ids) <= tokens
        assert len(rollout.prompt_ids) + len(rollout.output_ids) <= 25
    assert rollouts == writer.write(drafter, PROMPTS, [7, 8, 9, 10])
    if temperature == 0:
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=WRITTEN)
        plain = make_llm(trainer.target).generate(prompts, params, False)
        for rollout, output in zip(rollouts, plain):
            assert rollout.output_ids == output.outputs[0].token_ids[: len(rollout.output_ids)]
    else:
        assert rollouts != writer.write(drafter, PROMPTS, [1, 2, 3, 4])
    assert drafter.training and drafter.target is trainer.target
    assert all((before[name] == tensor).all() for name, tensor in drafter.state_dict().items())
