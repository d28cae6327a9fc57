"""The EAGLE-3 checkpoint layout that vLLM and SGLang load: one table of names, shapes and config fields.

The same table writes, reads strictly and documents. Module names are those of `speculators.families.eagle3`.
"""

from __future__ import annotations

from typing import Any

from speculators.config import DrafterConfig, build_config, default_tap_layers
from speculators.errors import CheckpointError

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Eagle3Qwen3ForCausalLM",
)
SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
# Never read by a loader: written by other tools, or only useful to people.
IGNORED = ("t2d",)


def tensors(config: DrafterConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in the file -> (name in the module, shape). `d2t` is not here: it is offsets there and ids in the module."""
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv, taps = config.num_attention_heads * D, config.num_key_value_heads * D, len(config.tap_layers)
    table: dict[str, tuple[str, tuple[int, ...]]] = {"fc.weight": ("fc.weight", (H, taps * config.target_hidden_size))}
    if config.norm_before_fc:
        table["input_norm.weight"] = ("input_norm.weight", (taps * config.target_hidden_size,))
    if config.fc_norm:
        for i in range(taps):
            table[f"fc_norm.{i}.weight"] = (f"fc_norm.{i}.weight", (config.target_hidden_size,))
    for i in range(config.num_layers):
        outside, inside = ("midlayer" if config.num_layers == 1 else f"layers.{i}"), f"layers.{i}"
        width = 2 * H if i == 0 else H
        rows: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (H,),
            "post_attention_layernorm.weight": (H,),
            "self_attn.q_proj.weight": (heads, width),
            "self_attn.k_proj.weight": (kv, width),
            "self_attn.v_proj.weight": (kv, width),
            "self_attn.o_proj.weight": (H, heads),
            "mlp.gate_proj.weight": (I, H),
            "mlp.up_proj.weight": (I, H),
            "mlp.down_proj.weight": (H, I),
        }
        if i == 0:
            rows["hidden_norm.weight"] = (H,)
        if config.qk_norm:
            rows |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        table |= {f"{outside}.{name}": (f"{inside}.{name}", shape) for name, shape in rows.items()}
    table["norm.weight"] = ("norm.weight", (H,))
    table["lm_head.weight"] = ("lm_head.weight", (config.draft_vocab_size, H))
    if config.own_embeddings:
        table["embed_tokens.weight"] = ("embed_tokens.weight", (config.vocab_size, H))
    return table


def to_config(config: DrafterConfig) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
        "num_aux_hidden_states": len(config.tap_layers),
        **{switch: getattr(config, switch) for switch in SWITCHES},
        "draftsmith": {"family": config.family, "num_target_layers": config.num_target_layers},
    }


def from_config(fields: dict[str, Any], names: set[str], where: str, num_target_layers: int | None) -> DrafterConfig:
    """config.json and the names of the tensors beside it -> DrafterConfig. CheckpointError names the field."""
    own = fields.get("draftsmith") or {}
    layers = own.get("num_target_layers", num_target_layers)
    if layers is None:
        raise CheckpointError(f"{where}: the number of target layers is not in config.json; pass the target's")
    taps = fields.get("eagle_aux_hidden_state_layer_ids") or default_tap_layers(layers)
    architecture = (fields.get("architectures") or ["missing"])[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: architectures is {architecture!r}; an EAGLE-3 head has one of {', '.join(ARCHITECTURES)}"
        )
    missing = [f for f in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads") if f not in fields]
    if missing:
        raise CheckpointError(f"{where}: fields {', '.join(missing)} are missing; is this an EAGLE-3 head?")
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    return build_config(
        where,
        family="eagle3",
        vocab_size=fields["vocab_size"],
        draft_vocab_size=fields.get("draft_vocab_size") or fields["vocab_size"],
        hidden_size=width,
        target_hidden_size=fields.get("target_hidden_size") or width,
        num_target_layers=layers,
        tap_layers=tuple(sorted(taps)),
        num_layers=fields.get("num_hidden_layers", 1),
        intermediate_size=fields["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or width // heads,
        hidden_act=fields.get("hidden_act", "silu"),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope_parameters=rope,
        max_position_embeddings=fields.get("max_position_embeddings", 2048),
        qk_norm=fields.get("model_type") == "qwen3",
        own_embeddings="embed_tokens.weight" in names,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        **{switch: bool(fields.get(switch, False)) for switch in SWITCHES},
    )
