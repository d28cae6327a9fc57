"""A head with a window behind 4k positions: the text is the target's own, memory is bounded. And
drafts beyond the last position that a target has."""

from __future__ import annotations

import torch

from draftsmith.inference import SamplingParams
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import OPT
from tests.support.engines import drafting_llm, make_llm, same_text
from tests.support.memory import Largest

WINDOW, WRITTEN, K = 64, 6, 3
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 4096 + 64,
}


def test_drafting_behind_many_tokens(tiny_model) -> None:
    length = 4096
    model = tiny_model("llama", **SHAPE)
    target = FrozenTarget(model, (0, 1))
    config = config_for_target(
        target, "eagle3", tap_layers=(0, 1), sliding_window=WINDOW, head_dim=16
    )
    torch.manual_seed(0)
    drafter = family_class("eagle3")(config).attach(target)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(1))

    # the text that is drafted is the target's own, and memory is bounded
    llm = make_llm(model, drafter=drafter.eval(), num_speculative_tokens=K, max_num_seqs=1)
    asked = [{"prompt_token_ids": ids[0].tolist()}]
    params = SamplingParams(temperature=0, max_tokens=WRITTEN)
    with Largest() as largest:
        (drafted,) = llm.generate(asked, params, use_tqdm=False)
    (plain,) = llm.generate(asked, params, use_tqdm=False, speculate=False)
    assert llm.get_metrics().num_drafts > 0
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert largest.numel < length * 1024

    # and so is the memory of an unroll over as many
    features = target.features(
        input_ids=ids,
        position_ids=torch.arange(length)[None],
        segment_ids=torch.zeros(1, length, dtype=torch.long),
        loss_mask=(torch.arange(length) >= length - 512)[None],
    )
    with torch.no_grad(), Largest() as largest:
        assert len(list(drafter.unroll(features, K))) == K
    assert largest.numel < length * 1024


def test_drafts_beyond_the_last_position_of_a_target_have_its_last(tiny_model) -> None:
    """Its positions are learned: there is none behind them. The other row drafts on."""
    model = tiny_model("opt", **OPT | {"max_position_embeddings": 32})
    llm = drafting_llm("random", model, max_num_seqs=2)
    prompts = [{"prompt_token_ids": list(range(3, 32))}, {"prompt_token_ids": [5, 6, 7]}]
    same_text(llm, prompts)
