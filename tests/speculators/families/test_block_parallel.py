"""Block drafters against a plain reference, and what is theirs alone: anchors, kept chains, whole
blocks.

The reference is written from the published description, slot by slot and head by head, over the
exported tensors under their names in the file; it shares no code with the families."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.inference import SamplingParams
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.drafter import Drafter, DraftInput
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.contract import draft_logits, packed
from tests.support.engines import make_llm

WHOLE = [
    "dflash",
    "dflash, causal, window, reduced, qwen3",
    "dspark",
    "dspark, fill in, reduced",
    "dspark, causal, window, gemma3",
    "dflash2",
]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    angle = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)])
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


class Reference:
    """One document, one anchor, one slot after the other."""

    def __init__(self, folder: Path, target: FrozenTarget, config) -> None:
        self.w, self.t, self.c = load_file(folder / "model.safetensors"), target, config

    def block(self, taps: Tensor, anchor_id: int, k: int) -> list[Tensor]:
        """taps [a, n·H] of the positions before the anchor -> normed states of the predicting
        slots, k x [H]."""
        c, w, a = self.c, self.w, len(taps)
        context = [rms(w["fc.weight"] @ g, w["hidden_norm.weight"], c.rms_norm_eps) for g in taps]
        Q = k + (0 if c.sample_from_anchor else 1)
        ids = [anchor_id] + [c.mask_token_id] * (Q - 1)
        x = [self.t.embed_tokens(torch.tensor([i]))[0] for i in ids]
        for layer in range(c.num_layers):
            p = f"layers.{layer}."
            u = [rms(s, w[p + "input_layernorm.weight"], c.rms_norm_eps) for s in x]
            x = self.around(
                p + "attention_conv", x, u, lambda u, p=p: self.attend(p, context, u, a)
            )
            u = [rms(s, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps) for s in x]
            x = self.around(p + "mlp_conv", x, u, lambda u, p=p: [self.mlp(p, s) for s in u])
        x = [rms(s, w["norm.weight"], c.rms_norm_eps) for s in x]
        return x[-k:]

    def around(self, name: str, x: list[Tensor], u: list[Tensor], part) -> list[Tensor]:
        """x + part(u), with DFlash 2's convolutions before and after the part."""
        if name + ".base_kernel" not in self.w:
            return [s + y for s, y in zip(x, part(u), strict=True)]
        taps, group = self.c.conv_kernel_size, self.c.conv_group_size
        base, H = self.w[name + ".base_kernel"], self.c.hidden_size
        d = [(self.w[name + ".kernel_projection.weight"] @ s).view(2, taps, H // group) for s in u]

        def conv(z: list[Tensor], side: int) -> list[Tensor]:
            out = []
            for t in range(len(z)):
                total = torch.zeros(H)
                for tau in range(taps):
                    if t - tau >= 0:
                        for channel in range(H):
                            kernel = base[side, tau, channel] + d[t][side, tau, channel // group]
                            total[channel] += kernel * z[t - tau][channel]
                out.append(total)
            return out

        return [s + y for s, y in zip(x, conv(part(conv(u, 0)), 1), strict=True)]

    def attend(self, p: str, context: list[Tensor], u: list[Tensor], a: int) -> list[Tensor]:
        c, w, d = self.c, self.w, self.c.head_dim
        theta = c.rope_parameters["rope_theta"]

        def project(name: str, s: Tensor, heads: int) -> Tensor:
            return (w[f"{p}self_attn.{name}_proj.weight"] @ s).view(heads, d)

        def key(s: Tensor, position: int) -> Tensor:
            k = rms(
                project("k", s, c.num_key_value_heads),
                w[p + "self_attn.k_norm.weight"],
                c.rms_norm_eps,
            )
            return torch.stack([rotated(head, position, theta) for head in k])

        sources = [*context, *u]  # at positions 0 .. a - 1, a ..
        keys = [key(s, i) for i, s in enumerate(sources)]
        values = [project("v", s, c.num_key_value_heads) for s in sources]
        out = []
        for j, s in enumerate(u):
            q = rms(
                project("q", s, c.num_attention_heads),
                w[p + "self_attn.q_norm.weight"],
                c.rms_norm_eps,
            )
            seen = [
                i
                for i in range(len(sources))
                if (i < a or not c.is_causal or i <= a + j)
                and (c.sliding_window is None or a + j - i < c.sliding_window)
            ]
            heads = []
            for h in range(c.num_attention_heads):
                g = h // (c.num_attention_heads // c.num_key_value_heads)
                turned = rotated(q[h], a + j, theta)
                scores = torch.tensor(
                    [float(turned @ keys[i][g]) / math.sqrt(d) for i in seen]
                ).softmax(0)
                heads.append(sum(scores[n] * values[i][g] for n, i in enumerate(seen)))
            out.append(w[p + "self_attn.o_proj.weight"] @ torch.cat(heads))
        return out

    def mlp(self, p: str, s: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.w[p + "mlp.gate_proj.weight"] @ s)
        return self.w[p + "mlp.down_proj.weight"] @ (gate * (self.w[p + "mlp.up_proj.weight"] @ s))

    def base(self, h: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ h if "lm_head.weight" in self.w else self.t.logits(h)

    def q(self, states: list[Tensor], anchor_id: int, forced: list[int]) -> list[Tensor]:
        """Distributions of the drafts at temperature 1, when `forced` are the tokens drafted."""
        c, w, before, found = self.c, self.w, [anchor_id, *forced], []
        for j, h in enumerate(states):
            logits, y = self.base(h), before[j]
            if c.family == "dspark":
                e = w["markov_head.markov_w1.weight"][y]
                logits = logits + w["markov_head.markov_w2.weight"] @ e
            elif c.family == "dflash2":
                scores = {}
                for token in logits.argsort(descending=True)[: c.selector_top_k].tolist():
                    s = "candidate_selector."
                    left = w[s + "predecessor_codebook"][y] * (
                        w[s + "hidden_projection.weight"] @ h
                    )
                    scores[token] = float(logits[token]) + float(
                        left @ w[s + "successor_codebook"][token]
                    )
                logits = torch.tensor(
                    [scores.get(token, -math.inf) for token in range(len(logits))]
                )
            found.append(logits.softmax(-1))
        return found


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_drafts_are_those_of_a_plain_reference(
    name, all_cases, make_drafter, tiny_model, tmp_path
) -> None:
    """q of every draft, to 1e-4, and the tokens of a greedy chain."""
    case = all_cases[name]
    target, drafter = make_drafter(case, tiny_model(case.architecture))
    if name == "dflash2":  # codebooks that change the order of the candidates
        drafter.candidate_selector.successor_codebook.mul_(10)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    reference, depth = Reference(folder, target, drafter.config), drafter.max_depth
    ids = torch.randint(3, 100, (11,), generator=torch.Generator().manual_seed(5))
    taps, _ = target(ids[None, :10])
    states = reference.block(taps[0], int(ids[10]), depth)
    forced = torch.randint(3, 100, (depth,), generator=torch.Generator().manual_seed(6))
    got = draft_logits((target, drafter.freeze()), ids, 9, depth, forced).softmax(-1)
    expected = torch.stack(reference.q(states, int(ids[10]), forced.tolist()))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
    greedy: list[int] = []
    to_target = drafter.draft_to_target
    for j in range(depth):
        best = int(reference.q(states[: j + 1], int(ids[10]), greedy)[-1].argmax())
        greedy.append(best if to_target is None else int(to_target[best]))
    own = draft_logits((target, drafter), ids, 9, depth, torch.tensor(greedy)).argmax(-1)
    assert (own if to_target is None else to_target[own]).tolist() == greedy


@pytest.mark.parametrize("name", ["dspark", "dspark, causal, window, gemma3"])
@torch.no_grad()
def test_confidences_of_drafts_are_those_of_training(
    name, all_cases, make_drafter, tiny_model
) -> None:
    """`draft_steps` gives that of the state that `unroll` has on the same text: w·[h; W1[y]] + b,
    or w·h + b."""
    case = all_cases[name]
    target, drafter = make_drafter(case, tiny_model(case.architecture))
    ids, anchor, depth = torch.randint(3, 90, (1, 16)), 6, drafter.max_depth
    zeros = torch.zeros_like(ids)
    features = target.features(ids, torch.arange(16)[None], zeros, torch.ones_like(ids).bool())
    w, b = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias[0]
    expected = []
    for step in drafter.unroll(features, depth):
        assert torch.equal(drafter.confidence(step.hidden), step.hidden[:, : len(w)] @ w + b)
        expected.append(
            drafter.confidence(step.hidden)[(step.anchor_index == anchor).nonzero().item()]
        )
    inputs = DraftInput(
        RaggedCache(1, 64), 0, 1, ids[:, 1 : anchor + 2], features.taps[:, : anchor + 1], None, [7]
    )
    steps, found, token = drafter.freeze().draft_steps(inputs, depth), [], None
    for k in range(depth):
        found.append(steps.send(token).confidence[0])
        token = ids[:, anchor + 2 + k]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert torch.stack(found).std() > 1e-3


def batch(seeds: list[int], length: int = 40) -> SimpleNamespace:
    mask = torch.arange(length) >= 8
    return SimpleNamespace(
        input_ids=torch.zeros(len(seeds), length, dtype=torch.long),
        segment_ids=torch.zeros(len(seeds), length, dtype=torch.long),
        loss_mask=mask.expand(len(seeds), -1),
        seeds=torch.tensor(seeds),
    )


def trained(name: str, all_cases, make_drafter, tiny_model, **options) -> Drafter:
    case = all_cases[name]
    _, drafter = make_drafter(case, tiny_model(case.architecture))
    drafter.prepare_training(type(drafter).options.model_validate({**case.options, **options}))
    return drafter.train()


def test_anchors_follow_from_the_seed_of_their_row(all_cases, make_drafter, tiny_model) -> None:
    """The blocks of a row are drawn anew for another seed, and are the same beside other rows and
    in longer batches."""
    drafter = trained("dflash", all_cases, make_drafter, tiny_model, anchors_per_row=6)

    def drawn(seeds: list[int], row: int) -> list[int]:
        slots, _, kept = drafter._terms(batch(seeds), 4)
        return slots[row][kept[row]].tolist()

    seventh = drawn([7], 0)
    assert drawn([7, 3], 0) == seventh == drawn([1, 2, 7], 2) and seventh != drawn([3], 0)
    assert len(seventh) == 6 and min(seventh) >= 7  # the anchor x_{t+1} is supervised itself
    assert drafter.count_terms(batch([7]), 4)[0] == 6
    drafter.eval()
    assert drafter.count_terms(batch([7]), 4)[0] == 32  # every slot with a term


def test_p_eagle_keeps_fewer_chains_at_every_depth(all_cases, make_drafter, tiny_model) -> None:
    drafter = trained("peagle", all_cases, make_drafter, tiny_model, cod_ratio=0.5, cod_floor=0.2)
    terms = drafter.terms(batch([7]), 5)
    assert [int(each.sum()) for each in terms[:3]] == pytest.approx([32, 16, 8], abs=3)
    for shallow, deep in itertools.pairwise(terms):
        assert not (deep & ~shallow).any()  # a chain that is left out stays out
    again = drafter.terms(batch([5, 7]), 5)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(terms, again))


def test_a_narrowed_unroll_is_the_whole_one(all_cases, make_drafter, tiny_model) -> None:
    """Slots of chains that were left out are dropped on the way; the states of the others do not
    change."""
    from draftsmith.speculators.families import autoregressive

    case = all_cases["peagle, two layers, own embeddings, fc_norm"]
    target, drafter = make_drafter(case, tiny_model(case.architecture))
    drafter.prepare_training(type(drafter).options.model_validate({"cod_ratio": 0.5}))
    features = target.features(**packed([19, 16]))
    drafter.train()
    narrowed = list(drafter.unroll(features, 4))
    worth, autoregressive.WORTH_NARROWING = autoregressive.WORTH_NARROWING, 0.0
    try:
        whole = list(drafter.unroll(features, 4))
    finally:
        autoregressive.WORTH_NARROWING = worth
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
    """Without unroll_steps in the recipe, every depth that serving may draft is trained."""
    assert family_class(family).options.model_validate(shape).unroll_steps == drafts


def test_a_row_near_its_end_does_not_shorten_the_block_of_its_neighbours(
    all_cases, make_drafter, tiny_model
) -> None:
    """In a block that is not causal every draft depends on the number of slots: it is the same for
    every row."""
    case = all_cases["dflash"]
    model = tiny_model(case.architecture, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    _, drafter = make_drafter(case, model)
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=4, max_num_seqs=2)
    prompts = [{"prompt_token_ids": [5, 9, 2, 7]}, {"prompt_token_ids": [4, 8, 15]}]

    def accepted(prompts, lengths) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return list(outputs[0].metrics.accepted_per_round)

    alone = accepted(prompts[:1], [18])
    assert accepted(prompts, [18, 18]) == alone == accepted(prompts, [18, 3])


def test_dflash2_selector_learns_by_the_loss_that_is_asked_for(
    all_cases, make_drafter, tiny_model
) -> None:
    case = all_cases["dflash2"]
    _, drafter = make_drafter(case, tiny_model(case.architecture))
    options = family_class("dflash2").options
    assert drafter.trained_heads({"tv": 1.0})[-1].loss == {"cross_entropy": 1.0}
    drafter.prepare_training(options.model_validate({"selector_loss": {"tv": 0.9}}))
    assert [head.loss for head in drafter.trained_heads({"forward_kl": 1.0})] == [
        {"forward_kl": 1.0},
        {"tv": 0.9},
    ]
    with pytest.raises(ValidationError):  # infinite where the selector gives 0
        options.model_validate({"selector_loss": {"forward_kl": 1.0}})
