"""The draft vocabulary that `speculative_config` asks for: a trained drafter proposes some tokens
alone, without another training.

Scoring fewer tokens makes a draft cheaper; q is 0 for the others, so that text stays the target's
own. Tokens come from a file, or are those that the drafter was supervised on most often."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposers.head_options import HeadOptions
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.vocab.draft_vocab import choose_draft_vocabulary

IDS = "draft_token_ids"
SIZE = "draft_vocab_size"


def apply_draft_vocabulary(drafter: Drafter, config: HeadOptions, ends: Collection[int]) -> Drafter:
    """`drafter`, frozen, with the draft vocabulary of `config`, if it asks for one. `ends`: the ids
    that end a response. ConfigError says what is wrong with the ids or their number."""
    if config.draft_vocab_size is None and config.draft_token_ids is None:
        return drafter
    known = proposed_ids(drafter)
    if config.draft_token_ids is None:
        ids = _most_frequent(drafter, config, known, ends)
    else:
        ids = _listed(config, known, ends)
    return drafter.reduce_vocabulary(ids.to(drafter.target.device)).freeze()


def proposed_ids(drafter: Drafter) -> Tensor:
    """[n] ids of the target's tokens that the drafter proposes, in the host's memory."""
    known = drafter.draft_to_target
    return torch.arange(drafter.target.vocab_size) if known is None else known.cpu()


def _most_frequent(
    drafter: Drafter, config: HeadOptions, known: Tensor, ends: Collection[int]
) -> Tensor:
    """[size] of the tokens `known` [V_draft], by the supervised text; those of `ends` always."""
    size = config.draft_vocab_size
    assert size is not None
    if size > len(known):
        raise ConfigError(
            f"{size:,}, but the drafter proposes {len(known):,} tokens; expected fewer", where=SIZE
        )
    if drafter.token_counts is None:
        raise ConfigError(
            f"{config.model} does not record how often its tokens were supervised, which drafters"
            f" trained by this project do; give {IDS}, a JSON file of token ids, the most frequent"
            " first",
            where=SIZE,
        )
    counts = torch.zeros(drafter.target.vocab_size, dtype=torch.long)
    recorded = drafter.token_counts[: len(counts)]  # tables may be padded to different sizes
    counts[: len(recorded)] = recorded
    required = [place for place, id in enumerate(known.tolist()) if id in ends]
    return known[choose_draft_vocabulary(counts[known], size, required)]


def _listed(config: HeadOptions, known: Tensor, ends: Collection[int]) -> Tensor:
    """The ids of the file or the list, or the first of them, having checked them."""
    ids = read_token_ids(config.draft_token_ids)
    size = config.draft_vocab_size or len(ids)
    if size > len(ids):
        raise ConfigError(f"{size:,}, but {IDS} has {len(ids):,} ids; expected fewer", where=SIZE)
    ids = ids[:size]
    if len(set(ids)) < len(ids):
        repeated = next(id for i, id in enumerate(ids) if id in ids[:i])
        raise ConfigError(f"{repeated} is there twice; expected each id once", where=IDS)
    chosen = torch.tensor(ids)
    foreign = chosen[~torch.isin(chosen, known)].tolist()
    if foreign:
        raise ConfigError(
            f"{len(foreign):,} of {len(ids):,} are no tokens that the drafter proposes, such as"
            f" {foreign[0]}; expected ids of the target's tokenizer",
            where=IDS,
        )
    if ends and not set(ends) & set(ids):
        raise ConfigError(
            f"no token that ends a response ({', '.join(map(str, sorted(ends)))}) is among"
            f" {len(ids):,} ids, so that every end would be a rejected draft; add one",
            where=IDS,
        )
    return chosen


def read_token_ids(ids: str | Sequence[int] | None) -> list[int]:
    """The ids of a JSON file, or as they are. ConfigError: there are none, or it holds anything
    else."""
    read = ids
    if isinstance(ids, str):
        try:
            read = json.loads(Path(ids).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{ids} cannot be read ({error}); expected a JSON list of token ids", where=IDS
            ) from error
    if not isinstance(read, (list, tuple)) or not all(type(id) is int for id in read):
        raise ConfigError(f"{ids} holds something else than a JSON list of token ids", where=IDS)
    if not read:
        raise ConfigError("there are no ids; expected one at least", where=IDS)
    return list(read)
