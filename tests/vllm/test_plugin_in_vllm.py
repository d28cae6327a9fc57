"""The plugin in real vLLM: MLP speculators served again.

The environment that DRAFTSMITH_VLLM_PYTHON names must have the project, too: `pip install --no-deps
-e .`."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference.sampling.sampler import probabilities
from inference.sampling_params import SamplingParams
from speculators.export import export_drafter
from speculators.families.mlp import MLPSpeculator
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget
from tests.inference.spec_decode.verification.test_rejection_sampler import p_value
from tests.speculators.families.test_mlp import every_copy, published
from tests.vllm.conftest import PROMPTS, WRITTEN
from tests.vllm.process import VLLMError
from tests.vllm.test_families_in_vllm import _train

METHOD = "mlp_speculator"
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {  # architecture, shape, tokens drafted
    "three heads": ("llama", {}, 3),
    "tied, narrow, qwen3": ("qwen3", {"n_predict": 4, "inner_dim": 64, "tie_weights": True}, 4),
    "wide, scaled": ("llama", {"n_predict": 2, "inner_dim": 192, "scale_input": True}, 2),
    "fewer tokens than heads": ("llama", {"n_predict": 3}, 2),
}


@pytest.fixture(autouse=True)
def _project_in_vllm(vllm_python: str) -> None:
    code = (
        "from importlib.metadata import entry_points as e;"
        " e(group='vllm.general_plugins')['draftsmith']"
    )
    found = subprocess.run([vllm_python, "-c", code], capture_output=True)
    assert found.returncode == 0, (
        f"{vllm_python} does not have the project: pip install --no-deps -e . there"
    )


@pytest.fixture
def vllm_plugins() -> str:
    return "draftsmith"


def trained(target: FrozenTarget, features: list[Any], **shape: Any) -> MLPSpeculator:
    torch.manual_seed(0)
    drafter = MLPSpeculator(config_for_target(target, "mlp", **shape)).attach(target)
    drafter.initialise_from(target)
    _train(target, drafter, features)
    return drafter.eval()


# ---------------------------------------------------------------------- MLP speculators


@pytest.mark.parametrize("architecture, shape, k", SHAPES.values(), ids=SHAPES.keys())
def test_trained_heads_draft_the_same(
    servable_model, own_texts, same_in_vllm, architecture, shape, k
) -> None:
    model = servable_model(architecture)
    target = FrozenTarget(model)
    counters = same_in_vllm(model, trained(target, own_texts(target), **shape), k, method=METHOD)
    assert counters.num_drafts / 8 < counters.num_accepted_tokens < k * counters.num_drafts


def write_published(
    folder: Path, *, width: int, inner: int, heads: int, tied: bool, scale: bool
) -> dict[str, Any]:
    """A random speculator as IBM publishes them, with every copy of what is tied; returns its
    tensors."""
    torch.manual_seed(5)
    shared = 1 if tied else heads
    tensors = {"speculator.proj.0.weight": torch.randn(inner, width) / width**0.5}
    for i in range(1, 2 if tied else heads):
        tensors[f"speculator.proj.{i}.weight"] = torch.randn(inner, inner) / inner**0.5
    for i in range(shared):
        tensors |= {
            f"speculator.emb.{i}.weight": torch.randn(128, inner) / inner**0.5,
            f"speculator.head.{i}.weight": torch.randn(128, inner) / inner**0.5,
            f"speculator.ln.{i}.weight": 1 + 0.3 * torch.randn(inner),
            f"speculator.ln.{i}.bias": 0.3 * torch.randn(inner),
        }
    tensors = every_copy(tensors, heads) if tied else tensors
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = dict(
        architectures=["MLPSpeculatorPreTrainedModel"],
        model_type="mlp_speculator",
        vocab_size=128,
        emb_dim=width,
        inner_dim=inner,
        n_predict=heads,
        n_candidates=5,
        top_k_tokens_per_head=[5] * heads,
        tie_weights=tied,
        scale_input=scale,
        torch_dtype="float16",
        transformers_version="4.38.2",
    )
    (folder / "config.json").write_text(json.dumps(fields))
    return tensors


@torch.no_grad()
@pytest.mark.parametrize(
    "tied, scale, inner", [(False, False, 128), (True, True, 96)], ids=["plain", "tied, scaled"]
)
def test_published_speculators_draft_by_the_published_formula(
    servable_model, serve, tmp_path: Path, tied, scale, inner
) -> None:
    """Every draft of every round, from the checkpoint's tensors and transformers' hidden states
    alone."""
    model, heads = servable_model("llama"), 3
    model.save_pretrained(tmp_path / "target")
    tensors = write_published(
        tmp_path / "head", width=128, inner=inner, heads=heads, tied=tied, scale=scale
    )
    job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN}
    plain = serve(job)
    drafting = {"method": METHOD, "model": str(tmp_path / "head"), "num_speculative_tokens": heads}
    theirs = serve(job | {"speculative_config": drafting})
    assert theirs["token_ids"] == plain["token_ids"]
    for prompt, text, rounds in zip(PROMPTS, theirs["token_ids"], theirs["drafts"], strict=True):
        states = model(torch.tensor([prompt + text]), output_hidden_states=True).hidden_states[-1][
            0
        ]
        at = 1
        for row in rounds[:-1]:  # behind the end of the text there may be one more
            newest = text[at - 1]
            read = [newest, *row[:-1]]
            logits = published(tensors, heads, scale, states[len(prompt) + at - 2], read)
            assert row == [int(each.argmax()) for each in logits]
            at += 1 + next(
                (i for i, token in enumerate(row) if text[at + i : at + i + 1] != [token]), len(row)
            )
        assert at >= WRITTEN - heads - 1


@pytest.mark.parametrize("k", [4, 6])
def test_more_tokens_than_heads_are_refused(servable_model, serve, tmp_path: Path, k: int) -> None:
    """A multiple of the heads too, which vLLM itself would let pass."""
    servable_model("llama").save_pretrained(tmp_path / "target")
    write_published(tmp_path / "head", width=128, inner=128, heads=3, tied=False, scale=False)
    drafting = {"method": METHOD, "model": str(tmp_path / "head"), "num_speculative_tokens": k}
    job = {
        "model": str(tmp_path / "target"),
        "prompts": PROMPTS,
        "max_tokens": 4,
        "speculative_config": drafting,
    }
    with pytest.raises(
        VLLMError, match=f"num_speculative_tokens is {k}, but this MLP speculator has 3 heads"
    ):
        serve(job)


def test_a_missing_tensor_is_named(servable_model, serve, tmp_path: Path) -> None:
    servable_model("llama").save_pretrained(tmp_path / "target")
    tensors = write_published(
        tmp_path / "head", width=128, inner=128, heads=3, tied=False, scale=False
    )
    del tensors["speculator.ln.1.bias"]
    save_file(tensors, tmp_path / "head" / "model.safetensors", metadata={"format": "pt"})
    drafting = {"method": METHOD, "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    job = {
        "model": str(tmp_path / "target"),
        "prompts": PROMPTS,
        "max_tokens": 4,
        "speculative_config": drafting,
    }
    with pytest.raises(VLLMError, match=r"speculator\.ln\.1\.bias is missing"):
        serve(job)


# ---------------------------------------------------------------------- sampled text

VOCAB, PROMPT, LENGTH, SAMPLES = 12, [3, 9, 4, 7], 3, 4000
SAMPLED = [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}]
ALPHA = 1e-6


@torch.no_grad()
def joint(model: Any, params: SamplingParams) -> torch.Tensor:
    """Probability of every text of LENGTH tokens [VOCAB ** LENGTH]."""
    found = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = [[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=length)]
        p = probabilities(model(torch.tensor(prefixes)).logits[:, -1], params)
        found = (found[:, None] * p.double()).flatten()
    return found


@pytest.fixture
def sampled(servable_model, serve, tmp_path: Path):
    """`sampled(sampling, **config)`: p-value of the joint of the first tokens against the target's
    own."""
    model = servable_model("llama", vocab_size=VOCAB, initializer_range=0.1)
    model.save_pretrained(tmp_path / "target")
    target = FrozenTarget(model)

    def run(sampling: dict[str, Any], **config: Any) -> float:
        torch.manual_seed(3)
        drafter = MLPSpeculator(config_for_target(target, "mlp", n_predict=2)).attach(target)
        drafter.initialise_from(target)
        with torch.no_grad():
            for norm, head in zip(drafter.ln, drafter.heads):
                norm.bias.fill_(1)
                head.weight[4] += 0.02  # the token that the target likes best
        folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
        drafting = {"method": METHOD, "model": str(folder), "num_speculative_tokens": 2}
        job = {"model": str(tmp_path / "target"), "prompts": [PROMPT], "max_tokens": LENGTH}
        job |= {"sampling": sampling | {"n": SAMPLES}, "options": {"max_num_seqs": 128, "seed": 7}}
        result = serve(job | {"speculative_config": drafting | config, "probe": "without_faults"})
        assert (
            min(result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]) > SAMPLES / 40
        )
        texts = torch.tensor(result["samples"])
        codes = texts @ torch.tensor([VOCAB**i for i in reversed(range(LENGTH))])
        observed = torch.bincount(codes, minlength=VOCAB**LENGTH)
        return p_value(observed, SAMPLES * joint(model, SamplingParams(**sampling)))

    return run


@pytest.mark.parametrize("sampling", SAMPLED, ids=["temperature", "temperature and top-p"])
def test_sampled_text_is_the_targets(sampled, sampling) -> None:
    assert sampled(sampling) > ALPHA


def test_sampled_drafts_leave_the_text_as_it_is(sampled) -> None:
    assert sampled(SAMPLED[0], draft_sample_method="probabilistic") > ALPHA
