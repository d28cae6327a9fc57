"""The acceptance report through real vLLM: the counters of this runtime, in float32."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from draftsmith.inference.evaluation.evaluate import EvaluationSettings, evaluate
from draftsmith.inference.report.build import lay_beside
from draftsmith.inference.vllm_bridge.vllm_engine import VllmOptions
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.tokenizers import byte_level
from tests.support.vllm import PROMPTS
from tests.support.vllm_heads import BLOCK, FITTED, LEAST_SQUARES, trained

K = 3
SETTINGS = EvaluationSettings(
    temperatures=(0.0,),
    num_speculative_tokens=K,
    max_tokens=41,
    prompts_per_workload=4,
    timed_prompts=1,
    repeats=1,
    lossless_prompts=0,
)
SHAPES = {"eagle3": (FITTED, LEAST_SQUARES), "dflash": ({"num_layers": 2, **BLOCK}, {})}
WORKLOADS = {"one": PROMPTS[:2], "two": PROMPTS[2:]}


@pytest.fixture(scope="module")
def folders_of(servable_model, own_texts, tmp_path_factory):
    """`folders_of(family, shape, options)`: a target and a head fitted to its texts, which it does
    not quite reach."""

    def make(family: str, shape: dict, options: dict) -> tuple[str, str]:
        root, tokenizer = tmp_path_factory.mktemp("evaluate"), byte_level(400, eos_token="<|end|>")
        model = servable_model("llama", vocab_size=len(tokenizer))
        tokenizer.save_pretrained(root / "target")
        target = FrozenTarget(model, (1, 2, 3))
        drafter = trained(family, target, own_texts(target), shape, options)
        model.save_pretrained(root / "target")
        head = export_drafter(drafter, root / "head", dtype=torch.float32)
        return str(root / "target"), str(head)

    return make


@pytest.fixture(scope="module")
def folders(folders_of) -> tuple[str, str]:
    return folders_of("eagle3", FITTED, LEAST_SQUARES)


@pytest.fixture(scope="module")
def ours(folders):
    return evaluate(*folders, WORKLOADS, SETTINGS)


COUNTED = "prompts output_tokens num_drafts num_draft_tokens num_accepted_tokens_per_pos"
COUNTED += " acceptance_length acceptance_by_position"


def same_in_both(ours, theirs) -> None:
    counted = attrgetter(*COUNTED.split())
    for cell in ours.results:
        assert counted(theirs.cell(cell.workload, 0)) == counted(cell)
    assert ours.cell("all", 0).num_drafts / 8 < ours.cell("all", 0).num_accepted_tokens
    assert ours.cell("all", 0).num_accepted_tokens < K * ours.cell("all", 0).num_drafts
    joined = lay_beside(ours, theirs)
    assert joined.summary["vllm_gap"] == 0 and joined.engines() == ["draftsmith", "vllm"]


@pytest.fixture(scope="module")
def offline(vllm_python: str) -> VllmOptions:
    return VllmOptions(vllm_python, {"kv_cache_memory_bytes": 64 << 20})


def test_offline_counts_what_this_runtime_counts(folders, ours, offline) -> None:
    theirs = evaluate(*folders, WORKLOADS, SETTINGS, engine=offline)
    same_in_both(ours, theirs)
    cell = theirs.cell("all", 0)
    assert [check.mismatches for check in cell.lossless] == [0]
    assert cell.expected.relative_difference == pytest.approx(0, abs=1e-9)
    assert cell.speedup_vs_autoregressive is not None
    assert theirs.provenance.engines[0].draft_sample_method == "probabilistic"


def test_a_matcher_without_a_checkpoint_is_measured(folders, offline) -> None:
    """Rounds without a proposal are among its rounds: what was committed follows from the steps."""
    theirs = evaluate(
        folders[0], None, WORKLOADS, replace(SETTINGS, repeats=0), method="ngram", engine=offline
    )
    cell = theirs.cell("all", 0)
    assert [check.mismatches for check in cell.lossless] == [0]
    assert 0 < cell.num_drafts < cell.num_rounds
    assert cell.output_tokens <= cell.prompts + cell.num_rounds + cell.num_accepted_tokens


@pytest.mark.parametrize("family", SHAPES)
def test_sampled_drafts_are_accepted_as_expected(folders_of, offline, family) -> None:
    """Verification at temperature 1, which the CPU build does with uninitialised memory and the
    worker repairs."""
    shape, options = SHAPES[family]
    sampled = replace(SETTINGS, temperatures=(1.0,), repeats=0, max_tokens=96)
    report = evaluate(*folders_of(family, shape, options), WORKLOADS, sampled, engine=offline)
    expected = report.cell("all", 1).expected
    assert abs(expected.relative_difference) < 4 * expected.standard_error
