"""New tokens of a language model over rows of a ragged cache: where they stand, and what they see.

The one definition for targets and for drafters that are language models, eager or compiled. The
cache is the runtime's: RaggedCache, or StaticRows inside a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.speculators.precision import on_device

# As FrozenTarget.forward: input_ids, position_ids, attention_mask, past_key_values and
# key_position_ids -> taps [b, T, n·H] or None, last_hidden [b, T, H]
Forward = Callable[..., tuple[Tensor | None, Tensor]]


class TreePlaces(NamedTuple):
    """T new tokens per row as the last of a tree of N tokens below the row's text.

    depths   [b, N] long, of each token of the tree: it stands at position base + depth
    visible  bool [b, T, N], which of these a new token sees beside the text, itself included
    base     [b], tokens of each row's text; None: the tree begins with the new tokens
    """

    depths: Tensor
    visible: Tensor
    base: Sequence[int] | None = None


def run_rows(
    forward: Forward,
    cache: Any,
    start: int,
    token_ids: Tensor,
    *,
    max_positions: int | None = None,
    tree: TreePlaces | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Runs token_ids [b, T] in rows [start, start + b), written behind each row's own length.

    Lengths stay what they are until the cache advances. `max_positions`: positions that the model
    has. What stands behind the last is padding, or a draft that nobody verifies, and gets the last
    one. Returns taps [b, T, n·H] (None without taps) and last_hidden [b, T, H]."""
    rows, T = token_ids.shape
    stop = start + rows
    key_position_ids = None
    if tree is None:
        position_ids = cache.position_ids(start, stop, T)
        mask = cache.mask(start, stop, T, position_ids)
    else:
        position_ids, mask, key_position_ids = _tree_inputs(cache, start, stop, T, tree)
    if max_positions is not None:
        # in a compiled step lengths are not known here
        within = not cache.static and max(cache.lengths[start:stop]) + T <= max_positions
        if not within:
            position_ids = position_ids.clamp(max=max_positions - 1)
    view = cache.view(start, stop, T)
    return forward(token_ids, position_ids, mask, view, key_position_ids)


def _tree_inputs(
    cache: Any, start: int, stop: int, T: int, tree: TreePlaces
) -> tuple[Tensor, Tensor, Tensor]:
    """Position ids [b, T], mask [b, 1, T, S] and the positions of the keys [b, S]."""
    base = cache.lengths[start:stop] if tree.base is None else tree.base
    device = tree.depths.device
    # in a compiled step lengths are on the device
    first = (base if isinstance(base, Tensor) else on_device(base, device))[:, None]  # [b, 1]
    mask, index = cache.tree_mask(start, stop, base, tree.visible)
    of_tree = tree.depths.gather(1, index.clamp(0, tree.depths.shape[1] - 1))
    key_position_ids = first + torch.where(index < 0, index, of_tree)
    return first + tree.depths[:, -T:], mask, key_position_ids
