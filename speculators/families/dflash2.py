"""DFlash 2: a DFlash block with convolutions along its slots and a selector that chooses among the
likeliest tokens.

Before and after the attention and the MLP of a layer, the slots of a block are mixed by a causal
convolution of `taps` slots, z'[t, c] = Σ_τ (base[τ, c] + d[t, τ, c // group]) · z[t - τ, c], whose
dynamic part d is a projection of the normed input. The selector adds to the logits U of the top-k
tokens c a score for following the token before, y: S(c) = U(c) + ⟨A[y] ⊙ H h, B[c]⟩. Drafts are
drawn from softmax(S) on these k tokens, and q is 0 elsewhere. Names and maths as in z-lab's
reference and in vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.drafter import TrainedHead
from draftsmith.speculators.families.dflash import DFlash, DFlashConfig, DFlashOptions
from draftsmith.speculators.layers.decoder import Attend, DecoderLayer, Rotary
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch, layer_bytes
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.draft_vocab import to_target_ids

# The selector gives 0 to all but its candidates: these losses are finite there.
SelectorLoss = dict[
    Literal["cross_entropy", "tv", "neg_log_acceptance"], Annotated[float, Field(gt=0)]
]


class DFlash2Shape(BaseModel):
    """The convolutions and the selector."""

    conv_kernel_size: int = Field(
        2, ge=1, description="slots that a convolution mixes, its own included"
    )
    conv_group_size: int = Field(16, ge=1, description="channels that share a dynamic kernel")
    selector_rank: int = Field(256, ge=1, description="rank of the selector's codebooks")
    selector_top_k: int = Field(16, ge=1, description="tokens that the selector chooses among")


class DFlash2Config(DFlash2Shape, DFlashConfig):
    """The block, its convolutions and its selector."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.hidden_size % self.conv_group_size:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of conv_group_size")
        if self.reduced_vocabulary:
            raise ValueError("draft_vocab_size: the selector's codebooks are over all tokens")
        return self

    @override
    def describe(self) -> str:
        selector = f"selector of rank {self.selector_rank} over the top {self.selector_top_k}"
        return f"{super().describe()}; {selector}"


class DFlash2Options(DFlash2Shape, DFlashOptions):
    """The trained head. Sizes left null are the target's own."""

    block_size: int = Field(8, ge=2, description="slots of a block, the anchor's included")
    selector_loss: SelectorLoss = Field(
        {"cross_entropy": 1.0},
        min_length=1,
        description="loss of the selector that drafts are drawn from, beside the block's `loss`",
    )


class BlockConv(nn.Module):
    """The convolutions before (side 0) and after (side 1) one part of a layer."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        taps = config.conv_kernel_size
        width = config.hidden_size
        self.taps = taps
        self.group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)

    def kernels(self, u: Tensor) -> Tensor:
        """u [B, A, Q, H] -> the kernels of every slot [2, B, A, Q, taps, H]."""
        dynamic = self.kernel_projection(u).unflatten(-1, (2, self.taps, -1)).movedim(-3, 0)
        dynamic = dynamic.repeat_interleave(self.group, dim=-1)
        return self.base_kernel[:, None, None, None] + dynamic

    @staticmethod
    def mix(z: Tensor, kernel: Tensor) -> Tensor:
        """z [B, A, Q, H] with a kernel [B, A, Q, taps, H]; slots before the block's first are 0."""
        mixed = kernel[..., 0, :] * z
        for tap in range(1, kernel.shape[-2]):
            before = nn.functional.pad(z, (0, 0, tap, 0))[:, :, : z.shape[2]]
            mixed = mixed + kernel[..., tap, :] * before
        return mixed


class ConvLayer(DecoderLayer):
    """The decoder layer with convolutions along the `slots` of each block."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def forward(self, state: Tensor, rotary: Rotary, attend: Attend, slots: int) -> Tensor:  # type: ignore[override]
        """state [B, A·slots, H] -> the same of the next layer."""

        def attention(u: Tensor) -> Tensor:
            q, k, v = self.self_attn.project(u.flatten(1, 2), rotary)
            attended = attend(q, k, v, self.self_attn.scale).transpose(1, 2).flatten(2)
            return self.self_attn.o_proj(attended).unflatten(1, u.shape[1:3])

        x = state.unflatten(1, (-1, slots))
        for norm, conv, part in (
            (self.input_layernorm, self.attention_conv, attention),
            (self.post_attention_layernorm, self.mlp_conv, self.mlp),
        ):
            u = norm(x)
            before, after = conv.kernels(u)
            x = x + conv.mix(part(conv.mix(u, before)), after)
        return x.flatten(1, 2)


class Selector(nn.Module):
    """Scores of a token c after y, ⟨A[y] ⊙ H h, B[c]⟩."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        vocabulary = config.vocab_size
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Small codebooks, successors of 0: the selector begins as the block's own choice."""
        nn.init.normal_(self.predecessor_codebook, std=0.25)
        nn.init.zeros_(self.successor_codebook)


class DFlash2(DFlash):
    """`head` reads [h; A[y] ⊙ H h]."""

    config_class = DFlash2Config
    options = DFlash2Options
    traits = replace(
        DFlash.traits,
        reads_drafts=True,
        defaults={
            "loss": {"cross_entropy": 1.0},
            "position_weights": {"gamma": 4.0},
            "training": {"learning_rate": 6e-4},
        },
    )

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = Selector(config)
        self.selector_loss: dict[str, Any] = {"cross_entropy": 1.0}

    @override
    def make_layer(self, config: DFlash2Config) -> ConvLayer:
        return ConvLayer(config)

    @override
    @property
    def read_width(self) -> int:
        return self.config.hidden_size + self.config.selector_rank

    @override
    def layer_kept(self, slots: int, batch: Batch) -> int:
        """Of each part's convolutions: both kernels of a slot and what they mix in front of the
        part, in float32, what they mix behind it, both shifted once for each further tap, and what
        kernels are projected from."""
        config = self.config
        b = batch.size
        taps = config.conv_kernel_size
        conv = 2 * taps * EXACT + EXACT + b + (taps - 1) * (EXACT + b) + b  # for each of H numbers
        layer = layer_bytes(config, slots, batch, stream=EXACT, compiles=False)
        return layer + 2 * slots * conv * config.hidden_size

    @override
    def prepare_training(self, options: DFlash2Options) -> DFlash2:
        self.selector_loss = dict(options.selector_loss)
        return super().prepare_training(options)

    @torch.no_grad()
    def start_weights(self, target: TargetHead) -> None:
        """As DFlash; convolutions start as the identity."""
        super().start_weights(target)
        for layer in self.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.base_kernel.zero_()
                conv.base_kernel[:, 0] = 1.0
                nn.init.zeros_(conv.kernel_projection.weight)
        self.candidate_selector.start()

    @override
    def run_layer(
        self, layer: ConvLayer, state: Tensor, rotary: Rotary, attend: Attend, slots: int
    ) -> Tensor:
        return layer(state, rotary, attend, slots)

    @override
    def read(self, state: Tensor, token_ids: Tensor) -> Tensor:
        selector = self.candidate_selector
        before = nn.functional.embedding(token_ids, selector.predecessor_codebook)
        return torch.cat([state, before * selector.hidden_projection(state)], -1)

    def unary_logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, D] -> logits before the selector [N, V_draft]."""
        return self.base_logits(hidden[..., : self.config.hidden_size])

    def head(self, hidden: Tensor, depth: int = 0, base: Tensor | None = None) -> Tensor:
        """[N, D] -> [N, V_draft], minus infinity outside the top k of `unary_logits`."""
        unary = (self.unary_logits(hidden) if base is None else base).float()
        k = min(self.config.selector_top_k, unary.shape[-1])
        best, candidates = unary.topk(k, dim=-1)  # [N, k]
        codebook = self.candidate_selector.successor_codebook
        tokens = to_target_ids(candidates, self.draft_to_target)
        following = nn.functional.embedding(tokens, codebook).float()  # [N, k, r]
        read = hidden[..., self.config.hidden_size :, None].float()
        with torch.autocast(unary.device.type, enabled=False):  # which would round to bfloat16
            scores = best + (following @ read).squeeze(-1)
        return torch.full_like(unary, float("-inf")).scatter(-1, candidates, scores)

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        return [self.candidate_selector.successor_codebook]

    def weight_matrices(self) -> list[nn.Parameter]:
        """Codebooks are embeddings, and the base kernels of convolutions no matrices."""
        tables = {id(self.candidate_selector.predecessor_codebook)}
        return [p for p in super().weight_matrices() if p.ndim == 2 and id(p) not in tables]

    def trained_heads(self, loss: Any) -> list[TrainedHead]:
        """The block's own logits by the recipe's loss, the selector by `selector_loss`."""
        chosen = TrainedHead(self.head, self.selector_loss)
        return [TrainedHead(self.unary_logits, loss), chosen]
