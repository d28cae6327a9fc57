"""A table of what each causal LM of transformers can do here, built tiny with random weights.

    python scripts/architectures.py > table.md            # all of them, some ten minutes on one
        thread
    python scripts/architectures.py qwen3_5 falcon_h1     # some

Every model type of transformers' registry gets a small config (`tiny_config`), a model in memory,
and a process of its own with a time limit, so that a crash is a line of the table. "yes" under
chains and trees means that greedy text with drafts, of which some are right, equals the model's
own, computed without a cache, at two rows of different length. Nothing is written or downloaded.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.inference import SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.model_runner.plain_decoder import plain_decoder
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.lookahead import LookaheadOptions
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.speculators.errors import DraftsmithError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.info import auto_class
from draftsmith.speculators.target.probe import needs_eager
from scripts.measuring import markdown

YES = "yes"
LAYERS = 4
VOCABULARY = 101
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [40, 9, 77]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# The sizes that configs have under these names; the first pattern that the whole name matches
# counts.
SIZES: dict[str, Any] = {
    r"vocab_size|padded_vocab_size|vocab_size_per_layer_input": VOCABULARY,
    r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_decoder_layers": (
        LAYERS
    ),
    r"num_attention_heads|n_heads?|num_heads|linear_num_heads|(de|en)coder_attention_heads": 4,
    r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads": 2,
    r"(global_|swa_|v_|swa_v_|linear_(key_|value_)?)?head_dim|d_kv|qk_(rope_|nope_)?head_dim": 8,
    r"(q|kv|o)_lora_rank|low_rank_dim": 16,
    r"hidden_size|n_embd|d_model|dim|embed_dim|word_embed_proj_dim|embedding_size|lru_width": 32,
    r"(moe|shared_expert|expert|moe_shared_expert)_intermediate_size|expert_ffn_hidden_size": 16,
    r"intermediate_size.*|ffn_dim|n_inner|d_ff|d_inner|ffn_hidden_size"
    r"|.*_ffn_dim|dense_intermediate_size": (48),
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|top_k_experts": 2,
    r"n_group|topk_group|num_expert_group|moe_num_shared_experts|n_shared_experts": 1,
    r"linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r"mamba_d_state|state_size|ssm_state_size": 8,
    r"mamba_n_heads|mamba_num_heads|n_mamba_heads": 4,
    r"mamba_(d_head|head_dim|headdim)": 16,
    r"mamba_d_ssm": 64,
    r"mamba_n_groups|n_groups|mamba_ngroups": 1,
    r"(mamba_)?chunk_size": 4,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length": 256,
    r"sliding_window|attention_window|window_size": 4,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"initializer_range|init_std|initializer_factor": 0.3,
    r"hidden_size_per_layer_input": 8,
    r"num_kv_shared_layers": 0,
    r"rotary_dim": 4,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r"eos_token_id": 2,
}

# Get a size though the default has none.
UNSET = (
    r".*_token_id|n_(routed|shared)_experts|num_experts_per_tok"
    r"|n_group|topk_group|head_dim|num_key_value_heads"
)
_MIXED = ["linear_attention", "full_attention"] * (LAYERS // 2)
FIXED_FIELDS: dict[str, dict[str, Any]] = {  # what follows from the number of layers
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


@dataclass
class Row:
    """What an architecture can do: "yes", or the reason why not."""

    model_type: str
    built: str = "-"  # its class, or why it cannot be built tiny
    features: str = "-"
    chains: str = "-"
    trees: str = "-"
    plain_path: str = "-"


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default config of a model type with small sizes, each kind of layer among them."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_shrunk(config_class().to_dict()) | FIXED_FIELDS.get(model_type, {}))


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("text_config", "vision_config", "audio_config") and isinstance(value, dict):
            kept[name] = (
                value
                if name != "text_config"
                else {"model_type": value["model_type"], **_shrunk(value)}
            )
        elif (
            name.endswith(("layer_types", "layers_block_type", "block_types", "mlp_layer_types"))
            and value
        ):
            kinds = list(dict.fromkeys(value))  # in their order
            kept[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif not isinstance(value, (list, dict, bool)):
            size = next((size for names, size in SIZES.items() if re.fullmatch(names, name)), None)
            if size is not None and (value is not None or re.fullmatch(UNSET, name)):
                kept[name] = size
        elif name == "intermediate_size":  # of every layer
            kept[name] = [48] * LAYERS
    if fields.get("kv_lora_rank"):  # latent attention has keys of every head
        kept["num_key_value_heads"] = 4
    return kept


def tiny_model(model_type: str) -> Any:
    """A random float32 model in which layers, masks and positions matter."""
    config = tiny_config(model_type)
    attention = "eager" if needs_eager(config.get_text_config()) else None
    torch.manual_seed(0)
    model = (
        auto_class(config)
        .from_config(config, dtype=torch.float32, attn_implementation=attention)
        .eval()
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


class PartlyRight(Proposer):
    """Chains of three drafts from texts that are known; the first 0 to 3 are right, another number
    in every round."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        super().__init__(3)
        self.texts = texts

    def propose(self, requests: Sequence[Any], plan: RoundPlan) -> Proposal:
        """The next three tokens of the text of each request, wrong from draft `len(token_ids) % 4`
        on; at most `plan.limits` of them count."""
        tokens = torch.zeros(len(requests), 3, dtype=torch.long)
        for row, request in enumerate(requests):
            done = len(request.token_ids)
            prompt = request.token_ids[: request.num_prompt_tokens]
            text = next(text for text in self.texts if text[: len(prompt)] == prompt)
            coming = text[done : done + 3]
            tokens[row, : len(coming)] = torch.tensor(coming)
            tokens[row, done % 4 :] = (tokens[row, done % 4 :] + 1) % VOCABULARY
        return Proposal(tokens, [min(limit, 3) for limit in plan.limits])


def own_texts(target: FrozenTarget) -> list[list[int]]:
    """Prompts and the model's own greedy text, without a cache."""
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + PARAMS.max_tokens:
            with torch.no_grad():
                ids.append(
                    int(
                        target.model(input_ids=torch.tensor([ids]), use_cache=False)
                        .logits[0, -1]
                        .argmax()
                    )
                )
        texts.append(ids)
    return texts


def drafting(target: FrozenTarget, texts: list[list[int]], proposer: Proposer) -> str:
    """YES if the text with the proposer's drafts is the model's own; else what is wrong."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    try:
        llm = TextGenerator.from_modules(
            target, proposer=proposer, options=EngineOptions(max_model_len=64, max_num_seqs=2)
        )
        written = [
            list(out.outputs[0].token_ids) for out in llm.generate(prompts, PARAMS, use_tqdm=False)
        ]
    except Exception as error:
        return first_line(error)
    right = [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts)]
    return YES if written == right else "TEXT DIFFERS"


def first_line(error: Exception) -> str:
    """The first line of an error."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {first}"


def examine(model_type: str) -> Row:
    """Every column of the table for one model type; an error is a cell, and is not raised."""
    row = Row(model_type)
    try:
        model = tiny_model(model_type)
    except Exception as error:  # of any kind: it is a line of the table
        row.built = first_line(error)
        return row
    row.built = type(model).__name__
    try:
        target = FrozenTarget(model, (1, 2))
    except Exception as error:
        row.features = first_line(error)
        return row
    row.features = YES
    if target.decoding_refusal is not None:
        row.chains = target.decoding_refusal
        return row
    texts = own_texts(target)
    row.chains = drafting(target, texts, PartlyRight(texts))
    sizes = {"window_size": 3, "ngram_size": 3, "num_guesses": 2}
    lookahead = LookaheadOptions(
        method="lookahead",
        num_speculative_tokens=6,
        **{f"lookahead_{name}": value for name, value in sizes.items()},
    )
    row.trees = drafting(target, texts, lookahead.make_proposer())
    plain = plain_decoder(target)
    row.plain_path = plain if isinstance(plain, str) else YES
    return row


def _child(model_type: str, answer: Connection) -> None:
    answer.send(asdict(examine(model_type)))


def examine_apart(model_type: str, seconds: float) -> Row:
    """`examine` in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return Row(**receiver.recv())
        return Row(model_type, f"no answer within {seconds:g} s")
    except EOFError:
        process.join(5)
        return Row(model_type, f"its process ended with status {process.exitcode}")
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def table(rows: Sequence[Row]) -> str:
    """Markdown. Messages are cut to 160 characters, without the target's name."""

    def cell(text: str) -> str:
        text = re.sub(r"^target [^:]*: ", "", text).replace("|", "\\|").replace("<", "&lt;")
        return text if len(text) <= 160 else text[:157] + "..."

    shown = [
        replace(row, plain_path="no") if row.plain_path.startswith("model_type") else row
        for row in rows
    ]
    cells = [[cell(text) for text in asdict(row).values()] for row in shown]
    return markdown(
        ["model type", "class", "features", "chains", "trees", "plain path"], cells, left=6
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "model_types", nargs="*", help="of transformers' registry; none: all of them"
    )
    parser.add_argument("--seconds", type=float, default=60, help="time limit of each")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for model_type in options.model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(examine_apart(model_type, options.seconds))
        print(asdict(rows[-1]), file=sys.stderr, flush=True)
    features, chains = (
        sum(getattr(row, name) == YES for row in rows) for name in ("features", "chains")
    )
    print(
        f"{table(rows)}\nOf {len(rows)} model types {features} give features and {chains} are"
        " drafted for."
    )


if __name__ == "__main__":
    main()
