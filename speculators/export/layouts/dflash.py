"""The layouts of block drafters that vLLM and SGLang load: DFlash, DSpark, DFlash 2.

Both engines take the attention in a block from `is_causal`, vLLM from `dflash_config.causal` as
well; without either a sliding layer is causal and a full one is not, so both are always written.
Taps are numbered by layer outputs, one less than ours. DSpark's fields lie at the top, DFlash's
below `dflash_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.config import DrafterConfig
from speculators.errors import ConfigError
from speculators.export.layouts.base import (
    COMMON_MEANINGS,
    FULL,
    LAYER_MEANINGS,
    SLIDING,
    Fields,
    Layout,
    Table,
    architecture_of,
    head_fields,
    layer_rows,
    own_fields,
    require,
    same_names,
    window_of,
)
from speculators.registry import build_config

SECTION = "dflash_config"
ANCHOR = (  # read for every family, so that a layout that none but DSpark has is refused
    "sample_from_anchor"
)
ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}

_BACKBONE_MEANINGS = {
    "model_type": "`qwen3`, the kind of the layers",
    "vocab_size": "the target's vocabulary",
    "draft_vocab_size": (
        "tokens the head can propose; below vocab_size there are `lm_head` and `d2t`"
    ),
    "target_hidden_size": "width of the target's states",
    **LAYER_MEANINGS,
    "attention_bias": "false",
    "tie_word_embeddings": "false",
    "layer_types": f"`{FULL}`, or `{SLIDING}` for all layers",
    "sliding_window": "positions that a slot reads, its own included; null: all",
    "use_sliding_window": "true with a window, which transformers' config would drop otherwise",
    "is_causal": "a slot sees only those before it in its block",
    "block_size": "slots of a block as trained, the anchor's included",
    "num_target_layers": "layers of the target",
}


class DFlashLayout(Layout):
    """The backbone: taps, mask token and causality below `dflash_config`."""

    family = "dflash"
    architecture: ClassVar[str] = "DFlashDraftModel"
    nested: ClassVar[tuple[str, ...]] = (
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "causal",
    )
    own: ClassVar[
        tuple[str, ...]
    ] = ()  # fields of the family's config, written under the same names
    meanings: ClassVar[Mapping[str, str]] = {
        "architectures": "`DFlashDraftModel`",
        **_BACKBONE_MEANINGS,
        f"{SECTION}.mask_token_id": "token whose embedding fills the slots without a known token",
        f"{SECTION}.target_layer_ids": (
            "taps by layer outputs: i is the output of layer i, one less than ours"
        ),
        f"{SECTION}.block_size": "the same again",
        f"{SECTION}.causal": "`is_causal` again: vLLM reads either, SGLang the other alone",
        **COMMON_MEANINGS,
    }
    ignored = ("t2d",)

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return architecture_of(fields) == self.architecture

    def check(self, config: Any) -> None:
        if 0 in config.tap_layers:
            raise ConfigError(
                f"drafter.tap_layers {list(config.tap_layers)}: engines read outputs of layers for"
                " block drafters, and 0 is the embedding; choose from 1"
            )

    # -------------------------------------------------------------- tensors

    def tensors(self, config: Any) -> Table:
        H = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (H, len(config.tap_layers) * config.target_hidden_size),
            "hidden_norm.weight": (H,),
            "norm.weight": (H,),
        }
        for i in range(config.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self.layer(config).items()}
        if config.reduced_vocabulary:
            shapes["lm_head.weight"] = (config.draft_vocab_size, H)
        shapes |= self.more(config)
        return same_names(shapes)

    def layer(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer."""
        return layer_rows(config)

    def more(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Tensors beside the backbone's."""
        return {}

    def canonical(self, found: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        names = {}
        for name in found:
            plain = name.removeprefix("model.")
            alias = next((short for short in ALIASES if plain.startswith(short)), None)
            names[name] = plain if alias is None else ALIASES[alias] + plain.removeprefix(alias)
        return {names[name]: tensor for name, tensor in found.items()}

    # -------------------------------------------------------------- fields

    def to_config(self, config: Any) -> dict[str, Any]:
        window = config.sliding_window
        section = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.tap_layers],
            "block_size": config.block_size,
            "causal": config.is_causal,
            **{name: getattr(config, name) for name in self.own},
        }
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **config.llama_fields(),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": [FULL if window is None else SLIDING] * config.num_layers,
            "sliding_window": window,
            "use_sliding_window": (
                window is not None
            ),  # or transformers' Qwen3Config forgets the window
            "is_causal": config.is_causal,
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            **{name: value for name, value in section.items() if name not in self.nested},
            SECTION: {name: section[name] for name in self.nested},
            "dtype": config.dtype,
            **own_fields(config),
        }

    def from_config(
        self, fields: Fields, names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        fields = self.plain(fields, where)
        section = {**fields, **(fields.get(SECTION) or {})}
        require(
            section,
            ("mask_token_id", "target_layer_ids"),
            where,
            f"a drafter of family {self.family}",
        )
        layers = fields.get("num_target_layers") or num_target_layers
        return build_config(
            where,
            self.family,
            **head_fields(fields, layers, where, self.family),
            tap_layers=tuple(layer + 1 for layer in section["target_layer_ids"]),
            block_size=fields.get("block_size") or section.get("block_size", 16),
            mask_token_id=section["mask_token_id"],
            sliding_window=_window(fields, where),
            is_causal=is_causal(fields),
            **{
                name: section[name] for name in (*self.own, ANCHOR) if section.get(name) is not None
            },
        )


class DSparkLayout(DFlashLayout):
    """With the Markov and confidence heads. Engines read nothing of it below `dflash_config` but
    `causal`."""

    family = "dspark"
    architecture = "Qwen3DSparkModel"
    nested = ("causal",)
    own = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "sample_from_anchor",
    )
    meanings: ClassVar = {
        "architectures": "`Qwen3DSparkModel`",
        **_BACKBONE_MEANINGS,
        "mask_token_id": "token whose embedding fills the slots without a known token",
        "target_layer_ids": "taps by layer outputs: i is the output of layer i, one less than ours",
        "sample_from_anchor": (
            "slot j predicts the token after its position; engines take true where nothing is said"
        ),
        "markov_rank": "rank of the bias of the token before",
        "markov_head_type": "`vanilla`, which vLLM runs; `gated` and `rnn` are SGLang's as well",
        "enable_confidence_head": "there is a confidence head",
        "confidence_head_with_markov": "it reads the token before, too",
        f"{SECTION}.causal": "`is_causal` again",
        **COMMON_MEANINGS,
    }

    def more(self, config: Any) -> dict[str, tuple[int, ...]]:
        H, r = config.hidden_size, config.markov_rank
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (config.vocab_size, r),
            "markov_head.markov_w2.weight": (config.draft_vocab_size, r),
        }
        if config.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, H + r)
        elif config.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + H)
        if config.enable_confidence_head:
            shapes["confidence_head.proj.weight"] = (
                1,
                H + (r if config.confidence_head_with_markov else 0),
            )
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes


class DFlash2Layout(DFlashLayout):
    """With convolutions and the selector, whose codebooks have no `.weight`."""

    family = "dflash2"
    architecture = "DFlash2DraftModel"
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    nested = (*DFlashLayout.nested, *own)
    meanings: ClassVar = {
        **DFlashLayout.meanings,
        "architectures": "`DFlash2DraftModel`",
        f"{SECTION}.conv_kernel_size": "slots that a convolution mixes",
        f"{SECTION}.conv_group_size": "channels that share a dynamic kernel",
        f"{SECTION}.selector_rank": "rank of the codebooks",
        f"{SECTION}.selector_top_k": "tokens that the selector chooses among",
    }

    def layer(self, config: Any) -> dict[str, tuple[int, ...]]:
        H, taps = config.hidden_size, config.conv_kernel_size
        rows = layer_rows(config)
        for conv in ("attention_conv", "mlp_conv"):
            rows[f"{conv}.base_kernel"] = (2, taps, H)
            rows[f"{conv}.kernel_projection.weight"] = (2 * taps * (H // config.conv_group_size), H)
        return rows

    def more(self, config: Any) -> dict[str, tuple[int, ...]]:
        r = config.selector_rank
        return {
            "candidate_selector.predecessor_codebook": (config.vocab_size, r),
            "candidate_selector.successor_codebook": (config.vocab_size, r),
            "candidate_selector.hidden_projection.weight": (r, config.hidden_size),
        }


class _SGLang:
    """SGLang shares the target's embedding and head without looking into the file."""

    format = "sglang"

    def check(self, config: Any) -> None:
        super().check(config)  # type: ignore[misc]
        if config.reduced_vocabulary or config.hidden_size != config.target_hidden_size:
            raise ConfigError(
                f"export format sglang: SGLang drafts {config.family} over the target's whole"
                " vocabulary and at its width, and ignores `lm_head` and `d2t`; serve this one"
                " with vLLM, or train without draft_vocab_size"
            )
        if config.num_target_layers in config.tap_layers:
            raise ConfigError(
                f"export format sglang: tap_layers {list(config.tap_layers)}: SGLang captures"
                " states before a layer, and so not the output of the last one,"
                f" {config.num_target_layers}; serve this head with vLLM"
            )


class SGLangDFlashLayout(_SGLang, DFlashLayout):
    """DFlash: nothing differs."""


class SGLangDSparkLayout(_SGLang, DSparkLayout):
    """DSpark: nothing differs."""


class SGLangDFlash2Layout(_SGLang, DFlash2Layout):
    """DFlash 2: nothing differs."""


def is_causal(fields: Mapping[str, Any]) -> bool:
    """As vLLM resolves it: `is_causal`, `dflash_config.causal`, or else what the layers' windows
    imply."""
    said = fields.get("is_causal")
    said = (fields.get(SECTION) or {}).get("causal") if said is None else said
    return SLIDING in (fields.get("layer_types") or []) if said is None else bool(said)


def _window(fields: Mapping[str, Any], where: str) -> int | None:
    """As `window_of`; a section `dflash_config` has the last word."""
    section = fields.get(SECTION) or {}
    kinds = [SLIDING] if section.get("use_swa") else fields.get("layer_types")
    width = section.get("swa_window_size") or fields.get("sliding_window")
    return window_of({"layer_types": kinds, "sliding_window": width}, where)
