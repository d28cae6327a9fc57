"""Generators of modules in memory."""

from __future__ import annotations

from typing import Any

from draftsmith.inference import SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.loading import make_engine, model_limit
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.beside import HeadBesideProposer
from draftsmith.inference.spec_decode.verification.rejection_sampler import AUTO
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.drafters import TREES, FakeHead, StubProposer, random_eagle3
from tests.support.tokenizers import byte_tokenizer

ENGINE = set(EngineOptions.model_fields) - {"tokenizer"}
DRAFTING = {"num_speculative_tokens", "draft_sample_method", "tree"}  # of HeadProposer


def make_llm(model: Any, **options: Any) -> TextGenerator:
    """`options`: of EngineOptions, HeadProposer and `TextGenerator.from_modules`."""
    engine = {name: options.pop(name) for name in ENGINE & set(options)}
    drafting = {name: options.pop(name) for name in DRAFTING & set(options)}
    parts = {"options": EngineOptions(**engine), "drafting": drafting}
    return TextGenerator.from_modules(model, **parts, **options)


def head_beside(
    target: FrozenTarget,
    drafter: Any,
    beside: Proposer,
    length: DraftLength | None = None,
    *,
    rejection_sample_method: str = AUTO,
    tokenizer: Any = None,
    **options: Any,
) -> TextGenerator:
    """A generator whose head has a proposer beside it. `target`: with the drafter's taps; `length`:
    None: the head is asked where the other has no draft."""
    engine = {name: options.pop(name) for name in ENGINE & set(options)}
    settings = EngineOptions(**engine)
    limit = model_limit(target, settings.max_model_len, drafter)
    proposer = HeadBesideProposer(
        beside,
        ("head", "beside"),
        drafter.attach(target),
        target,
        settings.max_num_seqs,
        limit,
        **options,
    )
    drafting_engine = make_engine(
        target, settings, limit, proposer, length, rejection_sample_method
    )
    return TextGenerator(drafting_engine, tokenizer)


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


def proposer_of(method: str, k: int, **options: Any) -> Any:
    """A training-free method's proposer of k drafts, on the CPU."""
    config = {"method": method, "num_speculative_tokens": k, **options}
    return parse_speculative_config(config).make_proposer()


def drafting_llm(kind: str, model: Any, texts: dict | None = None, **options: Any) -> TextGenerator:
    """A generator over a model in memory that drafts as `kind` says: "off", a training-free method,
    "fake" (a head that can propose every other token), "eagle3" (a random head), "static" or
    "dynamic" (its trees), or what StubProposer knows."""
    defaults = {"max_num_batched_tokens": 16, "num_speculative_tokens": 3}
    options = {"tokenizer": byte_tokenizer(), **defaults, **options}
    vocab = model.config.vocab_size
    size = model.config.hidden_size
    if kind == "fake":
        head = FakeHead(vocab, (1, 2), size, range(1, vocab, 2))
        return make_llm(model, drafter=head, **options)
    if kind == "eagle3" or kind in TREES:
        head = random_eagle3(model, (1, 2))
        return make_llm(model, drafter=head, tree=TREES.get(kind), **options)
    k = options.pop("num_speculative_tokens")
    if kind in TRAINING_FREE:
        config = {"method": kind, "num_speculative_tokens": k, **TRAINING_FREE[kind]}
        proposer = parse_speculative_config(config).make_proposer(model.device)
    else:
        proposer = None if kind == "off" else StubProposer(kind, k, vocab, texts)
    return make_llm(model, proposer=proposer, **options)


def ids_of(outputs) -> list[list[int]]:
    """The tokens of the first response of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def same_text(llm: TextGenerator, prompts: Any, tokens: int = 21) -> TextGenerator:
    """The generator, which has written greedily, with drafting, what it writes without."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    off = llm.generate(prompts, params, False, speculate=False)
    llm.reset_metrics()
    on = llm.generate(prompts, params, False)
    assert ids_of(on) == ids_of(off)
    assert llm.get_metrics().num_drafts > 0
    return llm
