"""LLMs of modules in memory."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.inference import LLM
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.spec_decode.proposers.head import DraftOptions
from tests.support.drafters import TREES, FakeHead, StubProposer, random_eagle3

ENGINE = set(EngineOptions.model_fields) - {"tokenizer"}


def make_llm(model: Any, **options: Any) -> LLM:
    """`options`: fields of EngineOptions and DraftOptions, and what `LLM.from_modules` takes beside
    them."""
    engine = {name: options.pop(name) for name in ENGINE & set(options)}
    drafting = {field.name for field in fields(DraftOptions)} & set(options)
    return LLM.from_modules(
        model,
        options=EngineOptions(**engine),
        drafting=DraftOptions(**{name: options.pop(name) for name in drafting}),
        **options,
    )


TRAINING_FREE = {
    "ngram": {"prompt_lookup_min": 1},
    # what earlier responses were depends on who was first
    "suffix": {"suffix_decoding_max_cached_requests": 0},
    "lookahead": {
        "lookahead_window_size": 4,
        "lookahead_ngram_size": 3,
        "lookahead_num_guesses": 3,
    },
}


def drafting_llm(kind: str, model: Any, texts: dict | None = None, **options: Any) -> LLM:
    """An LLM over a model in memory that drafts as `kind` says: "off", a training-free method,
    "fake" (a head that can propose every other token), "eagle3" (a random head), "static" or
    "dynamic" (its trees), or what StubProposer knows."""
    options = {
        "tokenizer": byte_tokenizer(),
        "max_num_batched_tokens": 16,
        "num_speculative_tokens": 3,
        **options,
    }
    vocab, size = model.config.vocab_size, model.config.hidden_size
    if kind == "fake":
        head = FakeHead(vocab, (1, 2), size, range(1, vocab, 2))
        return make_llm(model, drafter=head, **options)
    if kind == "eagle3" or kind in TREES:
        head = random_eagle3(model, (1, 2))
        return make_llm(model, drafter=head, tree=TREES.get(kind), **options)
    k = options.pop("num_speculative_tokens")
    if kind in TRAINING_FREE:
        config = {"method": kind, "num_speculative_tokens": k, **TRAINING_FREE[kind]}
        proposer = parse_speculative_config(config).make_proposer(torch.device("cpu"))
    else:
        proposer = None if kind == "off" else StubProposer(kind, k, vocab, texts)
    return make_llm(model, proposer=proposer, **options)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: ids 0..255, and three special tokens. Characters beyond ASCII take
    several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
    return fast


def ids_of(outputs) -> list[list[int]]:
    """The tokens of the first response of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]
