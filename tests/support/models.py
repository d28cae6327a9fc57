"""Tiny random targets of many architectures."""

from __future__ import annotations

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

_BASE = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    # large: layers, masks and positions must matter for the tests to notice them
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, dict] = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "qwen3_sliding": dict(
        model_type="qwen3",
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "mistral": dict(model_type="mistral", sliding_window=4),
    "gemma3": dict(model_type="gemma3_text", head_dim=16, sliding_window=4, layer_types=_MIXED),
    "gemma2": dict(
        model_type="gemma2",
        head_dim=16,
        sliding_window=4,
        layer_types=_MIXED,
        final_logit_softcapping=2.0,
    ),
    "phi3": dict(model_type="phi3", sliding_window=6),
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=8,
        sliding_window=4,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "granite": dict(model_type="granite", logits_scaling=4.0, embedding_multiplier=3.0),
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "cohere2": dict(model_type="cohere2", sliding_window=4, layer_types=_MIXED, logit_scale=0.25),
    # its layers have their own attention, not transformers'
    "falcon": dict(model_type="falcon", multi_query=True),
}
_MAMBA2 = dict(
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=4
)
RECURRENT: dict[str, dict] = {  # of layers with states, or some of them
    "qwen3_next": dict(
        model_type="qwen3_next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=2,
    ),
    "lfm2": dict(model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
    # attention and states in every layer
    "falcon_h1": dict(model_type="falcon_h1", mamba_d_ssm=64, **_MAMBA2),
    # no attention; its layers continue a text token by token
    "mamba": dict(model_type="mamba", state_size=4),
}


_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
_QWEN_VISION = dict(depth=1, hidden_size=32, out_hidden_size=32, intermediate_size=32, num_heads=2)
_LINEAR = {k: v for k, v in RECURRENT["qwen3_next"].items() if k.startswith(("linear", "layer_"))}
MULTIMODAL: dict[str, dict] = {  # whose language model is the target
    "gemma3_vision": dict(
        model_type="gemma3",
        text_config=ARCHITECTURES["gemma3"],
        vision_config=dict(_VISION, image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    ),
    "mistral3": dict(
        model_type="mistral3",
        text_config=dict(model_type="mistral", head_dim=8, sliding_window=None),
        vision_config=dict(_VISION, model_type="pixtral"),
    ),
    "qwen2_5_vl": dict(  # M-RoPE
        model_type="qwen2_5_vl",
        text_config=dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
        ),
        vision_config=_QWEN_VISION,
    ),
    "qwen3_5": dict(  # M-RoPE in a hybrid; transformers loads its language model alone
        model_type="qwen3_5",
        text_config=dict(
            _LINEAR,
            head_dim=16,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[1, 1, 0],
                partial_rotary_factor=0.25,
            ),
        ),
        vision_config=_QWEN_VISION,
    ),
}


def make_tiny_model(name: str, **overrides):
    """A random float32 model of the architecture (or model_type) `name`, always the same one for
    the same arguments. `overrides`: fields of the language model's config. Without an
    `eos_token_id` among them it writes as much as is asked for."""
    settings = {**_BASE, **(ARCHITECTURES | RECURRENT).get(name, {"model_type": name}), **overrides}
    if name in MULTIMODAL:
        text = {**_BASE, **MULTIMODAL[name]["text_config"], **overrides}
        settings = MULTIMODAL[name] | {"text_config": text}
    config = AutoConfig.for_model(settings.pop("model_type"), **copy.deepcopy(settings))
    capped = getattr(config, "attn_logit_softcapping", None)
    attention = "eager" if capped else None  # None: transformers' choice
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto = AutoModelForMultimodalLM if name in MULTIMODAL else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        # some architectures leave biases, sinks or norms at their neutral value
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    if "eos_token_id" not in overrides:
        model.generation_config.eos_token_id = None
    return model
