"""The drafter of a recipe: its config for a target, and the limits that the recipe must respect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.speculators.config import DrafterConfig, TargetShape
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import read_drafter_config, resolve
from draftsmith.speculators.export.formats import layout_for
from draftsmith.speculators.export.quantisation import require_plain
from draftsmith.speculators.kernels import log_once
from draftsmith.speculators.options import AUTO, DrafterOptions, VocabularyOptions
from draftsmith.speculators.registry import build_config, config_for_target, family_class
from draftsmith.train.recipe.recipe import EXPORT, Recipe

DEFAULT_DRAFT_VOCABULARY = 32_000


def drafter_config(recipe: Recipe, target: TargetShape, *, planning: bool = False) -> DrafterConfig:
    """The recipe's drafter for this target; with `init_from`, that head's own, which the recipe may
    not contradict. A vocabulary of `auto` tokens is the largest there is, until the run has chosen
    one (vocabulary_stage.py). `planning`: of a student's folder config.json will do."""
    options = _largest_vocabulary(recipe.drafter, target)
    _require_tokens(options, target)
    fields = family_class(recipe.family).config_class.model_fields
    expected = options.shape(fields, target)
    config_only = planning and recipe.family == "draft_model"
    if (start := start_folder(recipe, weights=not config_only)) is None:
        if "draft_vocab_size" in expected and expected["draft_vocab_size"] is None:
            expected["draft_vocab_size"] = min(DEFAULT_DRAFT_VOCABULARY, target.vocab_size)
        if "mask_token_id" in expected and expected["mask_token_id"] is None:
            expected["mask_token_id"] = default_mask_token(recipe, target)
        return fitting(recipe, config_for_target(target, recipe.family, **expected))
    config = read_drafter_config(start, target.num_layers, config_only=config_only)
    require_plain(config.quantization, "drafter.init_from")
    if config.family in family_class(recipe.family).traits.starts_from:
        # A head of another family: what both have is its own, the rest is the recipe's.
        names = type(config).model_fields.keys() & fields.keys()
        shared = {name: getattr(config, name) for name in names}
        config = config_for_target(target, **expected | shared | {"family": recipe.family})
    else:
        config = _reduced(config, options)
    if config.family != recipe.family:
        raise ConfigError(
            f"the head is of family {config.family!r}, the recipe's is {recipe.family!r}",
            where="drafter.init_from",
        )
    for key in options.model_fields_set & set(expected):
        if expected[key] is not None and expected[key] != getattr(config, key):
            raise ConfigError(
                f"the recipe says {getattr(recipe.drafter, key)}, but the head of"
                f" drafter.init_from has {getattr(config, key)}; leave the key out",
                where=f"drafter.{key}",
            )
    return fitting(recipe, config)


def _largest_vocabulary(options: DrafterOptions, target: TargetShape) -> DrafterOptions:
    """`options` with the whole vocabulary in place of AUTO."""
    if getattr(options, "draft_vocab_size", None) != AUTO:
        return options
    whole = None if isinstance(options, VocabularyOptions) else target.vocab_size
    return options.model_copy(update={"draft_vocab_size": whole})


def _require_tokens(options: DrafterOptions, target: TargetShape) -> None:
    size = getattr(options, "draft_vocab_size", None)
    if size is not None and size > target.vocab_size:
        raise ConfigError(
            f"{size:,}, but the target's vocabulary has {target.vocab_size:,} tokens; expected no"
            " more, or null",
            where="drafter.draft_vocab_size",
        )


def _reduced(config: DrafterConfig, options: DrafterOptions) -> DrafterConfig:
    """Of a head with the whole vocabulary, the config with that of the recipe: its other rows are
    taken away once the weights are read."""
    size = options.draft_vocab_size if isinstance(options, VocabularyOptions) else None
    if not isinstance(size, int) or config.reduced_vocabulary:
        return config
    return build_config("drafter.init_from", **config.model_dump() | {"draft_vocab_size": size})


def default_mask_token(recipe: Recipe, target: TargetShape) -> int:
    """The tokenizer's mask token, or the first row of the embedding that no token uses, or an added
    special token that neither the chat template nor the end of a text has. ConfigError: none."""
    tokenizer = recipe.target.load_tokenizer()
    token = tokenizer.mask_token_id
    if token is None:
        # embeddings are often padded: there may be rows behind the last token
        token = max(tokenizer.get_vocab().values()) + 1
    if token < target.vocab_size:
        return token
    unused = _unused_special_tokens(tokenizer)
    if not unused:
        raise ConfigError(
            "the target's tokenizer has no mask token, and its tokens use all"
            f" {target.vocab_size} rows of the embedding; name a token that no text contains",
            where="drafter.mask_token_id",
        )
    token = max(unused)
    log_once(
        "drafter.mask_token_id: the tokenizer has no mask token; the drafter takes"
        f" {tokenizer.convert_ids_to_tokens(token)} ({token}), an added special token that the"
        " chat template does not use"
    )
    return token


def _unused_special_tokens(tokenizer: Any) -> list[int]:
    """The ids of added special tokens that neither the chat template nor the ends of texts have."""
    template = str(tokenizer.chat_template or "")
    named = set(tokenizer.all_special_tokens)
    used = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    return [
        number
        for number, added in tokenizer.added_tokens_decoder.items()
        if (added.special or added.content in named)
        and added.content not in used
        and added.content not in template
    ]


def start_folder(recipe: Recipe, *, weights: bool = True) -> Path | None:
    """The folder whose head the recipe starts from (`target`: the target's own); None: scratch."""
    start = recipe.drafter.init_from
    if start == "target":
        return resolve(recipe.target.model, recipe.target.revision)
    return None if start is None else resolve(start, weights=weights)


def sketch_drafter(recipe: Recipe, config: DrafterConfig) -> Drafter:
    """The drafter without memory for its weights. ConfigError if the recipe wants more drafts than
    it can make, drafts of another kind, or longer texts."""
    with torch.device("meta"):
        drafter = family_class(config.family)(config)
    drafter.require_depth(
        recipe.evaluation.num_speculative_tokens, "evaluation.num_speculative_tokens"
    )
    drafter.require_depth(_measured_depth(recipe), "the depth of evaluation.speculative_config")
    drafter.require_length(recipe.data.max_length, "data.max_length")
    return drafter


def _measured_depth(recipe: Recipe) -> int:
    """Most drafts that a round of the evaluation can accept. ConfigError for options of drafting
    that the family does not have."""
    from draftsmith.inference.evaluation.engines import Drafting

    e = recipe.evaluation
    try:
        return Drafting(
            recipe.target.model,
            recipe.family,
            EXPORT,
            e.num_speculative_tokens,
            rows=1,
            seed=0,
            options={},
            further=e.speculative_config,
        ).depth
    except ConfigError as error:
        raise ConfigError(f"{error}", where="evaluation.speculative_config") from None


def fitting(recipe: Recipe, config: DrafterConfig) -> DrafterConfig:
    """`config` as it is. ConfigError if a format of the recipe has no place for it."""
    for name in recipe.export.formats:
        try:
            layout_for(name, config.family).check(config, name)
        except ConfigError as error:
            raise ConfigError(f"{error}", where="export.formats") from error
    return config
