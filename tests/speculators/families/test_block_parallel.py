"""Block drafters against a plain reference, and what is theirs alone: anchors, kept chains, whole
blocks.

The reference is written from the published description, for one document and one anchor, over the
exported tensors under their names in the file; it shares no code with the families."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.inference import SamplingParams
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families import autoregressive
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import CASES, make, world_of
from tests.support.contract import draft_logits, drafted, packed
from tests.support.engines import make_llm

WHOLE = [
    "dflash",
    "dflash, causal, window, reduced, qwen3",
    "dspark",
    "dspark, fill in, reduced",
    "dspark, causal, window, gemma3",
    "dflash2",
]


class Reference:
    """A block drafter by its tensors; x [n, H] are states of n slots."""

    def __init__(self, folder: Path, target: FrozenTarget, config) -> None:
        self.w, self.t, self.c = load_file(folder / "model.safetensors"), target, config

    def block(self, taps: Tensor, anchor_id: int, k: int) -> Tensor:
        """taps [a, n·H] before the anchor -> normed states of the k predicting slots."""
        c = self.c
        context = self.norm(taps @ self.w["fc.weight"].T, "hidden_norm.weight")
        ids = [anchor_id] + [c.mask_token_id] * (k - c.sample_from_anchor)
        x = self.t.embed_tokens(torch.tensor(ids))
        for layer in range(c.num_layers):
            p = f"layers.{layer}."
            u = self.norm(x, p + "input_layernorm.weight")
            x = x + self.mixed(p + "attention_conv", u, lambda z, p=p: self.attend(p, context, z))
            u = self.norm(x, p + "post_attention_layernorm.weight")
            x = x + self.mixed(p + "mlp_conv", u, lambda z, p=p: self.mlp(p, z))
        return self.norm(x, "norm.weight")[-k:]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps).rsqrt() * self.w[name]

    def mixed(self, name: str, u: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """part(u), with DFlash 2's convolutions before and after it."""
        if name + ".base_kernel" not in self.w:
            return part(u)
        base, taps = self.w[name + ".base_kernel"], self.c.conv_kernel_size
        dynamic = (u @ self.w[name + ".kernel_projection.weight"].T).unflatten(-1, (2, taps, -1))
        kernels = base + dynamic.repeat_interleave(self.c.conv_group_size, -1)  # [n, 2, taps, H]

        def conv(z: Tensor, side: int) -> Tensor:
            before = torch.cat([z.new_zeros(taps - 1, z.shape[1]), z])
            return sum(
                kernels[:, side, tau] * before[taps - 1 - tau :][: len(z)] for tau in range(taps)
            )

        return conv(part(conv(u, 0)), 1)

    def heads(self, x: Tensor, name: str, positions: Tensor | None = None) -> Tensor:
        """Of a projection [h, n, d]; normed and rotated if positions are given."""
        d = self.c.head_dim
        y = (x @ self.w[f"{name}_proj.weight"].T).unflatten(-1, (-1, d)).transpose(0, 1)
        if positions is None:
            return y
        theta = self.c.rope_parameters["rope_theta"]
        angles = positions[:, None] * theta ** (-2 * torch.arange(d // 2) / d)
        a, b = self.norm(y, f"{name}_norm.weight").chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, p: str, context: Tensor, u: Tensor) -> Tensor:
        a, both, p = len(context), torch.cat([context, u]), p + "self_attn."
        keys = torch.arange(len(both))
        queries = keys[a:, None]
        seen = (keys < a) | (keys <= queries) | torch.tensor(not self.c.is_causal)
        if self.c.sliding_window is not None:
            seen = seen & (queries - keys < self.c.sliding_window)
        q = self.heads(u, p + "q", keys[a:])
        shared = len(q) // self.c.num_key_value_heads
        k, v = self.heads(both, p + "k", keys), self.heads(both, p + "v")
        scores = q @ k.repeat_interleave(shared, 0).mT * self.c.head_dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended = (weights @ v.repeat_interleave(shared, 0)).transpose(0, 1).flatten(1)
        return attended @ self.w[p + "o_proj.weight"].T

    def mlp(self, p: str, u: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{p}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(u @ gate) * (u @ up)) @ down

    def q(self, states: Tensor, anchor_id: int, forced: list[int]) -> Tensor:
        """Distributions of the drafts at temperature 1, when `forced` are the tokens drafted."""
        w, before = self.w, torch.tensor([anchor_id, *forced])[: len(states)]
        head = w.get("lm_head.weight")
        logits = self.t.logits(states) if head is None else states @ head.T
        if self.c.family == "dspark":
            bias = w["markov_head.markov_w1.weight"][before]
            logits = logits + bias @ w["markov_head.markov_w2.weight"].T
        elif self.c.family == "dflash2":
            s = "candidate_selector."
            read = w[s + "predecessor_codebook"][before]
            read = read * (states @ w[s + "hidden_projection.weight"].T)
            scores = logits + read @ w[s + "successor_codebook"].T
            best = logits.topk(self.c.selector_top_k).indices
            logits = torch.full_like(logits, float("-inf"))
            logits = logits.scatter(-1, best, scores.gather(-1, best))
        return logits.softmax(-1)

    def confidence(self, states: Tensor, anchor_id: int, forced: list[int]) -> Tensor:
        """w·[h; W1[y]] + b, or w·h + b; y are the tokens before the drafts."""
        w = self.w["confidence_head.proj.weight"][0]
        before = torch.tensor([anchor_id, *forced])[: len(states)]
        read = torch.cat([states, self.w["markov_head.markov_w1.weight"][before]], -1)
        return read[:, : len(w)] @ w + self.w["confidence_head.proj.bias"]


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_drafts_are_those_of_a_plain_reference(name, tmp_path) -> None:
    target, drafter = world_of(name)
    if name == "dflash2":  # codebooks that change the order of the candidates
        drafter.candidate_selector.successor_codebook.mul_(10)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    reference, depth = Reference(folder, target, drafter.config), drafter.max_depth
    ids = torch.randint(3, 100, (11,), generator=torch.Generator().manual_seed(5))
    taps, _ = target(ids[None, :10])
    states = reference.block(taps[0], int(ids[10]), depth)
    forced = torch.randint(3, 100, (depth,), generator=torch.Generator().manual_seed(6))
    drafts = drafted((target, drafter.freeze()), ids, 9, depth, forced)
    probabilities = torch.cat([step.logits for step in drafts]).softmax(-1)
    expected = reference.q(states, int(ids[10]), forced.tolist())
    torch.testing.assert_close(probabilities, expected, atol=1e-4, rtol=1e-3)
    if "confidence_head.proj.weight" in reference.w:
        sure = reference.confidence(states, int(ids[10]), forced.tolist())
        torch.testing.assert_close(torch.cat([step.confidence for step in drafts]), sure)
    greedy: list[int] = []
    to_target = drafter.draft_to_target
    for j in range(depth):
        best = int(reference.q(states[: j + 1], int(ids[10]), greedy)[-1].argmax())
        greedy.append(best if to_target is None else int(to_target[best]))
    runtime_best = draft_logits((target, drafter), ids, 9, depth, torch.tensor(greedy)).argmax(-1)
    assert (runtime_best if to_target is None else to_target[runtime_best]).tolist() == greedy


def batch(seeds: list[int], length: int = 40) -> SimpleNamespace:
    mask = torch.arange(length) >= 8
    return SimpleNamespace(
        input_ids=torch.zeros(len(seeds), length, dtype=torch.long),
        segment_ids=torch.zeros(len(seeds), length, dtype=torch.long),
        loss_mask=mask.expand(len(seeds), -1),
        seeds=torch.tensor(seeds),
    )


def trained(name: str, **options) -> Drafter:
    _, drafter = world_of(name)
    fields = {**CASES[name].options, **options}
    drafter.prepare_training(type(drafter).options.model_validate(fields))
    return drafter.train()


def test_anchors_follow_from_the_seed_of_their_row() -> None:
    drafter = trained("dflash", anchors_per_row=6)

    def drawn(seeds: list[int], row: int) -> list[int]:
        slots, _, kept = drafter._terms(batch(seeds), 4)
        return slots[row][kept[row]].tolist()

    seventh = drawn([7], 0)
    assert drawn([7, 3], 0) == seventh == drawn([1, 2, 7], 2) and seventh != drawn([3], 0)
    assert len(seventh) == 6 and min(seventh) >= 7  # the anchor x_{t+1} is supervised itself
    assert drafter.count_terms(batch([7]), 4)[0] == 6
    drafter.eval()
    assert drafter.count_terms(batch([7]), 4)[0] == 32  # every slot with a term


def test_p_eagle_keeps_fewer_chains_at_every_depth() -> None:
    """All that its share of the chains is, rounded up, but for those that end before a depth."""
    drafter = trained("peagle", cod_ratio=0.7, cod_floor=0.2)
    terms = drafter.terms(batch([7]), 5)
    for depth, term in enumerate(terms):
        most = math.ceil(32 * max(0.7**depth, 0.2))
        assert most - depth <= term.sum() <= most
    for shallow, deep in itertools.pairwise(terms):
        assert not (deep & ~shallow).any()  # a chain that is left out stays out
    again = drafter.terms(batch([5, 7]), 5)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(terms, again))


def test_a_narrowed_unroll_is_the_whole_one(monkeypatch) -> None:
    drafter = trained("peagle, two layers, own embeddings, fc_norm", cod_ratio=0.5)
    features = drafter.target.features(**packed([19, 16]))
    narrowed = list(drafter.unroll(features, 4))
    monkeypatch.setattr(autoregressive, "WORTH_NARROWING", 0.0)
    whole = list(drafter.unroll(features, 4))
    for a, b in zip(narrowed, whole, strict=True):
        assert torch.equal(a.anchor_index.sort().values, b.anchor_index.sort().values)
        order = a.anchor_index.argsort(), b.anchor_index.argsort()
        torch.testing.assert_close(a.hidden[order[0]], b.hidden[order[1]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "family, shape, drafts",
    [
        ("dflash", {"block_size": 24}, 23),
        ("dspark", {"block_size": 9}, 9),
        ("peagle", {"num_depths": 12}, 12),
    ],
)
def test_as_many_depths_are_trained_as_are_drafted_at_most(family, shape, drafts) -> None:
    assert family_class(family).options.model_validate(shape).unroll_steps == drafts


def test_p_eagle_drafts_no_further_than_its_window() -> None:
    assert world_of("peagle, window")[1].max_depth == 5


def test_a_row_near_its_end_does_not_shorten_the_block_of_its_neighbours(tiny_model) -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    _, drafter = make(CASES["dflash"], model)
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=4, max_num_seqs=2)
    prompts = [{"prompt_token_ids": [5, 9, 2, 7]}, {"prompt_token_ids": [4, 8, 15]}]

    def accepted(prompts, lengths) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return list(outputs[0].metrics.accepted_per_round)

    alone = accepted(prompts[:1], [18])
    assert accepted(prompts, [18, 18]) == alone == accepted(prompts, [18, 3])


def test_dflash2_selector_learns_by_the_loss_that_is_asked_for() -> None:
    _, drafter = world_of("dflash2")
    options = family_class("dflash2").options
    assert drafter.trained_heads({"tv": 1.0})[-1].loss == {"cross_entropy": 1.0}
    drafter.prepare_training(options.model_validate({"selector_loss": {"tv": 0.9}}))
    losses = [head.loss for head in drafter.trained_heads({"forward_kl": 1.0})]
    assert losses == [{"forward_kl": 1.0}, {"tv": 0.9}]
    with pytest.raises(ValidationError):  # infinite where the selector gives 0
        options.model_validate({"selector_loss": {"forward_kl": 1.0}})


def test_confidence_and_selector_scores_are_float32_under_autocast(tiny_model) -> None:
    target = FrozenTarget(tiny_model("llama"), [1, 2, 3])
    shape = dict(tap_layers=[1, 2, 3], mask_token_id=100, block_size=4)
    generator = torch.Generator().manual_seed(1)
    for family, method in (("dspark", "confidence"), ("dflash2", "head")):
        drafter = family_class(family)(config_for_target(target, family, **shape)).attach(target)
        for parameter in drafter.parameters():
            parameter.data.normal_(std=0.3, generator=generator)
        width = drafter.config.hidden_size
        width += drafter.config.markov_rank if family == "dspark" else drafter.config.selector_rank
        hidden = torch.randn(8, width, generator=generator)
        options = {"base": drafter.unary_logits(hidden)} if family == "dflash2" else {}
        plain = getattr(drafter, method)(hidden, **options)
        with torch.autocast("cpu", torch.bfloat16):
            cast = getattr(drafter, method)(hidden, **options)
        torch.testing.assert_close(cast, plain, atol=1e-6, rtol=1e-6)
