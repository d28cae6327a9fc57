"""Multi-token prediction: one more layer of the target, run again and again (DeepSeek-V3, arXiv
2412.19437).

Slot t joins the target's state at t with the embedding of x_{t+1}, runs them through one decoder
layer and a norm, and asks the target's own head for x_{t+2}; the normed state takes the place of
the target's for the next token. One module serves all depths (FastMTP, arXiv 2509.18362). Three
wirings, those of published modules: `mimo` brings a dense layer of its own and can be added to any
target; `deepseek_v3` and `qwen3_next` use a layer of the target's own kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DecoderConfig, TargetShape
from draftsmith.speculators.drafter import Samples
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.autoregressive import ChainDrafter
from draftsmith.speculators.layers.decoder import (
    Asked,
    Attends,
    DecoderLayer,
    RMSNorm,
    Rotary,
    RotaryTable,
)
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch, layer_bytes
from draftsmith.speculators.layers.target_layer import BorrowedLayer, layer_fields
from draftsmith.speculators.options import NonEmptyText, PositiveInt, VocabularyOptions
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.traits import Traits

LayoutName = Literal["mimo", "deepseek_v3", "qwen3_next"]
BORROWED = ("deepseek_v3", "qwen3_next")  # layouts named after the model_type whose layer they use
# what vLLM takes from the target for the mimo layout, whatever the module's own config.json says
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("rms_norm_eps", "rope_parameters")


class MtpConfig(DecoderConfig):
    """The wiring, the state that the target hands over, and the layer."""

    layout: LayoutName = "mimo"
    hidden_state: Literal["normed", "residual"] = Field(
        "normed", description="the state that is read, before or after the final norm; null: normed"
    )
    target_fields: dict[str, Any] | None = Field(
        None,
        description="the target's configuration (`layer_fields`), where the layer is of its kind",
    )

    @override
    @property
    def usual_drafts(self) -> int:
        """One, whatever the depths that it was trained at."""
        return 1

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, fields: Any) -> Any:
        """Fields that follow from others."""
        if not isinstance(fields, dict):
            return fields
        fields = dict(fields)
        if fields.get("hidden_state") == "residual" and not fields.get("tap_layers"):
            fields["tap_layers"] = (fields.get("num_target_layers"),)
        if fields.get("layout", "mimo") not in BORROWED:
            fields["target_fields"] = None
            fields["attention_bias"] = True
        return fields

    @model_validator(mode="after")
    def _fits(self) -> Self:
        taps = (self.num_target_layers,) if self.hidden_state == "residual" else ()
        if self.tap_layers != taps:
            raise ValueError(f"tap_layers: hidden_state {self.hidden_state} reads {list(taps)}")
        kind = (self.target_fields or {}).get("model_type")
        if self.layout in BORROWED and kind != self.layout:
            raise ValueError(f"layout {self.layout}: the target's model_type is {kind}; use mimo")
        return self

    @override
    @classmethod
    def for_target(cls, target: TargetShape, family: str) -> dict[str, Any]:
        c = target.config
        borrowed = c.model_type in BORROWED
        turned = (getattr(c, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1
        if turned != 1 and not borrowed:
            raise ConfigError(
                f"target {target.name_or_path!r} rotates {turned:g} of each"
                " head, as vLLM would an added module; use another family, such as eagle3",
                where="drafter of family mtp",
            )
        fields = cls.completed(super().for_target(target, family))
        return fields | dict(
            layout=c.model_type if borrowed else "mimo",
            target_fields=layer_fields(c) if borrowed else None,
            # as vLLM divides, whatever the target's own head is
            head_dim=target.hidden_size // fields["num_attention_heads"],
        )

    @override
    def describe(self) -> str:
        kind = f"one {self.layout} layer" if self.target_fields else super().describe()
        read = "after" if self.hidden_state == "normed" else "before"
        return f"{kind}; reads the state {read} the final norm"


class MtpOptions(VocabularyOptions):
    """The trained module. Its sizes are the target's."""

    layout: LayoutName | None = Field(
        None, description="wiring and names; null: the target's own kind if it has one, else mimo"
    )
    hidden_state: Literal["normed", "residual"] | None = Field(
        None, description="the state that is read, before or after the final norm; null: normed"
    )
    unroll_steps: PositiveInt = Field(
        3, description="depths trained through the one module; 3 is FastMTP's"
    )
    init_from: NonEmptyText | None = Field(
        None, description="exported module, or `target`: the one in the target's folder; null: new"
    )


class Mtp(ChainDrafter):
    """One module: two norms, their projection, a layer, a final norm; the head is the target's."""

    config_class = MtpConfig
    options = MtpOptions
    traits = Traits(
        reads_last_hidden=True,
        # FastMTP's
        defaults={
            "position_weights": {"step_decay": 0.6},
            "training": {"learning_rate": 5e-5, "warmup_ratio": 0.05},
        },
    )
    reads_start_text = True  # the final norm's start is fitted on it

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        residual = config.hidden_state == "residual"
        self.traits = replace(
            self.traits,
            reads_taps=residual,
            reads_last_hidden=not residual,
            selects_queries=config.target_fields is None,
        )
        self.hidden_first = config.layout == "mimo"  # of what input_proj reads
        self.blind_first = config.layout != "qwen3_next"  # at position 0 the embedding is zero
        width = config.hidden_size
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer: DecoderLayer | BorrowedLayer
        if config.target_fields is None:
            self.layer = DecoderLayer(config)
            self.positions = RotaryTable(config)
            norms = [RMSNorm(width, eps=config.rms_norm_eps) for _ in range(3)]
        else:
            self.layer = BorrowedLayer(config.target_fields)
            self.positions = RotaryTable(config, self.layer.rotary_embedding())
            norms = [self.layer.norm() for _ in range(3)]
        self.embed_norm, self.hidden_norm, self.final_norm = norms
        self._reset()

    @override
    @property
    def attention_layers(self) -> int:
        """One, which every depth runs."""
        return 1

    @override
    @property
    def borrowed_head(self) -> TargetHead:
        """The target's: a module has no output head."""
        return self.target

    def attach(self, target: TargetHead) -> Mtp:
        """See `Drafter.attach`. ConfigError also for a layer that vLLM would build otherwise."""
        super().attach(target)
        for name, expected in target_sizes(target, self.config.layout).items():
            if (value := getattr(self.config, name)) != expected:
                raise ConfigError(
                    f"{name} is {value}, but an MTP module for target"
                    f" {target.name_or_path!r} has {expected}; use the target it was made for",
                    where="drafter of family mtp",
                )
        return self

    # -------------------------------------------------------------- memory of training

    @override
    @property
    def state_size(self) -> int:
        """The final norm's."""
        return EXACT

    @override
    def once_kept(self, batch: Batch) -> int:
        """The state that is read, in float32."""
        return batch.tokens * EXACT * self.config.hidden_size

    @override
    def depth_kept(self, slots: int, batch: Batch) -> int:
        """Three norms, in float32 as their states are; what is projected; the layer."""
        width = self.config.hidden_size
        read = slots * (3 * EXACT + 2 * batch.size) * width
        compiles = isinstance(self.layer, DecoderLayer)
        shape = {"stream": batch.size, "compiles": compiles}
        return read + layer_bytes(self.config, slots, batch, **shape)

    # -------------------------------------------------------------- starting weights

    @torch.no_grad()
    def _reset(self) -> None:
        """Random matrices, small where the residual stream is written; norms as they are."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = "o_proj" in name or "down_proj" in name
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * (0.1 if last else 0.5))
            elif name.endswith(".bias"):
                parameter.zero_()

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Mtp:
        """The target's state passes through, so that a new module says what the target just said,
        one token late. The final norm's weight is fitted channel by channel to give that state back
        its size."""
        self._reset()
        width = self.config.hidden_size
        hidden = slice(0, width) if self.hidden_first else slice(width, None)
        self.input_proj.weight[:, hidden] *= 0.1
        self.input_proj.weight[:, hidden] += torch.eye(width, device=self.input_proj.weight.device)
        if self.traits.reads_taps and tuple(target.tap_layers) != tuple(self.config.tap_layers):
            raise ConfigError(
                f"the target taps layers {list(target.tap_layers)}; load it with"
                f" the module's, {list(self.config.tap_layers)}",
                where="initialise_from",
            )
        taps, last = target(target.start_text())
        state = (taps if self.traits.reads_taps else last)[0].float()  # [T, H]
        x = state / state.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        scale = (last[0].float() * x).sum(0) / x.square().sum(0).clamp(min=1e-6)  # [H]
        shifted = self.config.layout == "qwen3_next"  # its norms scale by 1 + weight
        self.final_norm.weight.copy_(scale - 1 if shifted else scale)
        return self

    # -------------------------------------------------------------- shared by training and drafting

    def first_state(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The one of the two that the module reads [B, T, H]."""
        state = cast(Tensor, taps if self.traits.reads_taps else last_hidden)
        return state.to(dtype_of(self.input_proj))

    @override
    def embed(self, token_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        embeds = super().embed(token_ids, position_ids)
        if not self.blind_first or position_ids is None:
            return embeds
        return embeds.masked_fill((position_ids == 0)[..., None], 0)

    def run(
        self, embeds: Tensor, state: Tensor, rotary: Rotary, attends: Attends, queries: Asked = None
    ) -> Tensor:
        """The normed state, which is fed back and read by the target's head."""
        parts = [self.embed_norm(embeds.to(state.dtype)), self.hidden_norm(state)]
        joined = torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)
        return self.final_norm(self.layer(self.input_proj(joined), rotary, attends[0], queries))

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, H] states -> [N, V_draft], the target's own logits of them."""
        return self.borrowed_logits(hidden)


def target_sizes(target: TargetShape, layout: str) -> dict[str, Any]:
    """The fields of an MTP module's config that this target settles."""
    fields = MtpConfig.for_target(target, "mtp")
    return {name: fields[name] for name in (("target_fields",) if layout in BORROWED else SIZES)}
