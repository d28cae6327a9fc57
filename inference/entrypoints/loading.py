"""Loads the parts of an LLM (target, drafter, proposer, tokenizer, limits), and makes an engine of
them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.engine.memory import memory_fault
from draftsmith.inference.engine.round_costs import measure_costs
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.draft_vocabulary import apply_draft_vocabulary
from draftsmith.inference.spec_decode.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    GatedDraftLength,
)
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.beside import HeadBesideProposer
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from draftsmith.inference.spec_decode.proposers.head_options import DraftModelOptions, HeadOptions
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import load_drafter, read_drafter_config
from draftsmith.speculators.hub import split_revision, why_not_loaded
from draftsmith.speculators.precision import UNSUPPORTED, as_dtype, own_device
from draftsmith.speculators.target.adapted import adapted_model, config_source
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.longrope import fix_frequencies, original_length

logger = logging.getLogger(__name__)


def loaded(model: Any) -> bool:
    """True for a loaded model, False for the name of one."""
    return isinstance(model, (FrozenTarget, PreTrainedModel))


def target_config(
    model: str | FrozenTarget | PreTrainedModel,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PretrainedConfig:
    """The configuration of the target's language model, without its weights."""
    if not isinstance(model, str):
        return model.config.get_text_config()
    name, revision = config_source(model, revision)
    try:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"its config.json could not be read: {why_not_loaded(name, error)}",
            where=f"target {model}",
        ) from error
    return config.get_text_config()


def load_target(
    model: str | FrozenTarget | PreTrainedModel, tap_layers: Sequence[int] = (), **options: Any
) -> FrozenTarget:
    """The target with these taps. One that is loaded already is shared, not copied."""
    if isinstance(model, FrozenTarget):
        if model.tap_layers == tuple(sorted(tap_layers)):
            return model
        model = model.model
    if isinstance(model, PreTrainedModel):
        return FrozenTarget(model, tap_layers)
    return FrozenTarget.from_pretrained(str(model), tap_layers=tap_layers, **options)


def load_drafter_for(
    target: FrozenTarget, config: MethodOptions, tokenizer: Any = None
) -> tuple[FrozenTarget, Drafter | None]:
    """The exported head, and the target with the taps that the head's configuration names.
    `tokenizer`: the target's; a draft model whose own means something else is refused. ConfigError
    for a head of another family than `config` says."""
    if not isinstance(config, HeadOptions):
        return load_target(target), None
    head = read_drafter_config(config.model, target.num_layers)
    if head.family != config.method:
        raise ConfigError(
            f"method is {config.method!r}, but {config.model} is of family {head.family!r}",
            where="speculative_config",
        )
    target = load_target(target, head.tap_layers)
    drafter = load_drafter(config.model, target)
    if tokenizer is not None:
        drafter.meet_tokenizers(
            tokenizer,
            lambda: load_own_tokenizer(config.model),
            intersection=isinstance(config, DraftModelOptions) and config.use_heterogeneous_vocab,
            where="use_heterogeneous_vocab: true",
        )
    ends = end_of_sequence_ids(target, tokenizer)
    return target, apply_draft_vocabulary(drafter, config, ends)


def make_proposer(
    config: MethodOptions,
    target: FrozenTarget,
    drafter: Drafter | None,
    max_rows: int,
    max_model_len: int,
) -> Proposer | None:
    """Who drafts, by `config.method`; None with drafting off."""
    if config.num_speculative_tokens is None or config.method is None:
        return None
    if drafter is None or not isinstance(config, HeadOptions):
        return config.make_proposer(target.device)
    beside = config.beside
    make_head: Callable[..., HeadProposer] = HeadProposer
    if beside is not None and beside.method is not None:
        methods = (config.method, beside.method)
        make_head = partial(HeadBesideProposer, beside.make_proposer(target.device), methods)
    return make_head(
        drafter,
        target,
        max_rows,
        max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        draft_sample_method=config.draft_sample_method,
        tree=config.tree,
    )


def load_tokenizer(
    model: Any,
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    advice: str = "pass LLM(tokenizer=folder, repository id or object)",
) -> Any:
    """A tokenizer object as it is; otherwise loaded from `tokenizer`, or from where the model came
    from, in `revision`. An adapter's folder without one has that of the model it adapts.

    None for a model object that came without one: prompts are then token ids, and texts are empty.
    CheckpointError, with `advice`, if there is none to load."""
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    source = tokenizer or (None if loaded(model) else model)
    if source is None:
        return None
    name, revision = split_revision(str(source), None if tokenizer else revision)
    base = adapted_model(name)
    if base is not None and not any(Path(name).glob("tokenizer*")):
        return load_tokenizer(base, None, trust_remote_code=trust_remote_code, advice=advice)
    try:
        loaded_tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"could not be loaded: {why_not_loaded(name, error)}; {advice}",
            where=f"tokenizer {source}",
        ) from error
    added = getattr(loaded_tokenizer, "added_tokens_decoder", ())
    if len(loaded_tokenizer) <= len(added):  # empty: there were no files
        raise CheckpointError(
            f"there is no vocabulary beside config.json; {advice}", where=f"tokenizer {source}"
        )
    return loaded_tokenizer


def load_own_tokenizer(drafter: str) -> Any:
    """The tokenizer of a drafter that is a language model, from its folder or repository.
    CheckpointError if there is none."""
    advice = "put the tokenizer files of the draft model beside its config.json"
    return load_tokenizer(None, drafter, advice=advice)


def end_of_sequence_ids(model: str | FrozenTarget, tokenizer: Any, **source: Any) -> frozenset[int]:
    """Tokens that end a response: those of the model's generation config, or of its own config
    where it has none, and the tokenizer's. `source`: revision and trust_remote_code of a folder or
    repository."""
    config = target_config(model, **source)
    if isinstance(model, FrozenTarget):
        generation = getattr(model.model, "generation_config", None)
    else:
        generation = generation_config(model, source.get("revision"))
    ids: set[int] = set()
    for origin in (generation or config, tokenizer):
        eos = getattr(origin, "eos_token_id", None)
        if isinstance(eos, (list, tuple)):
            ids.update(eos)
        elif eos is not None:
            ids.add(eos)
    return frozenset(token for token in ids if 0 <= token < config.vocab_size)


def generation_config(model: str, revision: str | None) -> GenerationConfig | None:
    """That of a folder or repository, of an adapter's folder that of the model it adapts; None
    without one."""
    name, revision = config_source(model, revision)
    try:
        return GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:
        return None


def model_limit(target: FrozenTarget, requested: int | None, drafter: Drafter | None = None) -> int:
    """max_model_len in tokens: what is requested, within the positions of the model; by default
    those of both the model and its drafter, of LongRoPE the original length. Both are made ready
    for texts of this length. ConfigError if the model has fewer positions, or none are known."""
    positions: Any = getattr(target.config, "max_position_embeddings", None)
    if requested is None and positions is None:
        raise ConfigError(
            "no max_position_embeddings in its config; pass max_model_len",
            where=f"target {target.name_or_path}",
        )
    limit = positions if requested is None else requested
    if positions is not None and limit > positions:
        raise ConfigError(
            f"max_model_len={requested}; expected at most {positions}, the model's"
            " max_position_embeddings",
            where="LLM",
        )
    if requested is None:
        original = original_length(target.config)
        if original is not None and original < limit:
            message = "%s: beyond %d tokens its short frequencies end, and so does max_model_len"
            logger.warning(message, target.name_or_path, original)
            limit = original
        if drafter is not None and drafter.max_length:
            limit = min(limit, drafter.max_length)
    target.serve_up_to(limit)
    if drafter is not None:
        fix_frequencies(drafter, limit)
    return limit


def default_device(device: str | None) -> torch.device:
    """`own_device` unless one is named, also in place of a kind that only another build of vLLM
    knows: where a model runs changes no output beyond rounding. ConfigError for an accelerator that
    this machine has not, or that is not supported."""
    default = own_device()
    try:
        chosen = torch.device(device or default)
    except RuntimeError:
        logger.warning("device=%r: torch knows no such device here; %s is used", device, default)
        return default
    _require_present(chosen)
    return chosen


def _require_present(device: torch.device) -> None:
    if device.type in ("cpu", "meta"):
        return
    if device.type in UNSUPPORTED:
        raise ConfigError(
            f"{str(device)!r} is not supported: {UNSUPPORTED[device.type]}; expected cpu, or leave"
            " it out",
            where="device",
        )
    try:
        count = torch.get_device_module(device).device_count()
    except (RuntimeError, AttributeError):
        count = 0  # of a kind that torch was built without
    if (device.index or 0) < count:
        return
    raise ConfigError(
        f"{str(device)!r}, but torch {torch.__version__} finds {count} {device.type} devices here;"
        " expected one that is there, or cpu: leave it out, or install a torch built for the"
        " accelerator",
        where="device",
    )


def require_as_loaded(target: FrozenTarget, dtype: str, device: str | None) -> None:
    """ConfigError if a model in memory is not in the dtype and on the device that are asked for: it
    is shared with whoever loaded it, and is neither cast nor moved."""
    if dtype != "auto" and as_dtype(dtype) != target.dtype:
        has = str(target.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{dtype}, but the model in memory is in {has}; leave dtype out, or cast the model"
            " before",
            where="dtype",
        )
    if device is None:
        return
    requested = default_device(device)
    actual = target.device
    if requested.type != actual.type or requested.index not in (None, actual.index):
        raise ConfigError(
            f"{requested}, but the model in memory is on {actual}; leave device out, or move the"
            " model before",
            where="device",
        )


def make_draft_length(config: MethodOptions) -> DraftLength:
    """How many tokens a round drafts and verifies, as `speculative_config` says."""
    most = config.most_drafts
    schedule = config.num_speculative_tokens_per_batch_size
    if config.beside is not None:
        return GatedDraftLength(most, config.adaptive_verification_costs, schedule)
    if not config.enable_adaptive_verification or not most:
        return DraftLength(most, schedule)
    return AdaptiveDraftLength(most, config.adaptive_verification_costs, schedule)


def make_engine(
    target: FrozenTarget,
    options: EngineOptions,
    max_model_len: int,
    proposer: Proposer | None,
    draft_length: DraftLength | None,
    rejection_sample_method: str,
) -> Engine:
    """The engine, with rows of `max_model_len` tokens. What its rounds cost is measured where draft
    lengths go by it; of compiled ones when the first request begins.

    ConfigError if an accelerator's memory does not hold rows of the length that the options ask
    for; a warning, if they ask for none: few texts are as long as a model's own limit."""
    engine = Engine(
        target,
        options.model_copy(update={"max_model_len": max_model_len}),
        proposer=proposer,
        draft_length=draft_length,
        rejection_sample_method=rejection_sample_method,
    )
    if (fault := memory_fault(engine.runner, engine.proposer)) is not None:
        if options.max_model_len is not None:
            raise ConfigError(fault)
        logger.warning("%s, or expect to run out of memory in long texts", fault)
    if not engine.compiles:  # the thread that compiles a round has to run those that follow
        measure_costs(engine)
    return engine
