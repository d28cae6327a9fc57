"""Attention over packed rows: text by text for long rows, without [T, T] tensors, and the masks of
all other rows.

The texts of a packed row do not see each other, so plain causal attention over each text gives the
same result; sliding windows are computed in blocks of queries, and so is all attention of targets
that attend eagerly (soft caps, sinks), by the function of their own modeling file. A layer receives
a mask without queries, whose last dimension is its window."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.speculators.precision import on_host

NAME = "draftsmith_packed"
EAGER_NAME = "draftsmith_packed_eager"
LONG_ROW = 4096  # tokens; masks of shorter rows are small
WINDOW_BLOCK = 1024  # queries
MOST_SCORES = 2**27  # of one block of eager attention, over all heads

Spans = Sequence[Sequence[tuple[int, int]]]  # per row, [start, end) of each text
_spans: ContextVar[Spans] = ContextVar("spans", default=())


def text_spans(segment_ids: Tensor) -> Spans:
    """segment_ids [B, T] -> spans of texts, each in one piece, per row, padding included."""
    rows = []
    for row in on_host(segment_ids).tolist():
        starts = [0] + [i for i in range(1, len(row)) if row[i] != row[i - 1]]
        rows.append(list(zip(starts, [*starts[1:], len(row)])))
    return rows


def placeholder(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The mask [1, 1, 0, window] of layers with such a window; 0: without one."""
    return torch.empty(1, 1, 0, window, device=device, dtype=dtype)


@contextmanager
def packed(config: PretrainedConfig, spans: Spans) -> Iterator[None]:
    """Inside, models of `config` attend within `spans` where the mask is a `placeholder`."""
    before = config._attn_implementation
    token = _spans.set(spans)
    config._attn_implementation = EAGER_NAME if before == "eager" else NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _spans.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """query [B, h, T, d], key and value [B, g, T, ·], a placeholder mask -> [B, T, h, ·]."""
    if attention_mask is None or attention_mask.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
    window = attention_mask.shape[3]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, window, dropout, scaling).transpose(1, 2)

    return _text_by_text(attend, query, key, value), None


def _text_by_text(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of packed rows [B, T, h, ·]. `attend`: queries, keys and values of one text
    [1, ·, L, d] -> [1, L, h, ·]."""
    rows = []
    for row, spans in enumerate(_spans.get()):
        texts = []
        for start, end in spans:
            q, k, v = (x[row : row + 1, :, start:end] for x in (query, key, value))
            texts.append(attend(q, k, v))
        rows.append(torch.cat(texts, dim=1))
    return torch.cat(rows)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float, scale: float | None
) -> Tensor:
    """Attention of one text: [1, h, L, d] -> [1, h, L, ·]."""
    options = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attention = nn.functional.scaled_dot_product_attention
    L = q.shape[2]
    if not window or L <= window:
        return attention(q, k, v, is_causal=L > 1, **options)
    blocks = []
    for queries, keys in _blocks(L, window, WINDOW_BLOCK):
        mask = _causal(queries, keys, window, q.device)
        seen = (x[:, :, keys.start : keys.stop] for x in (k, v))
        asked = q[:, :, queries.start : queries.stop]
        blocks.append(attention(asked, *seen, mask, **options))
    return torch.cat(blocks, dim=2)


def eager_function(module: nn.Module) -> Callable | None:
    """The eager attention of a layer's modeling file, which transformers names so in all of them;
    None if there is none."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    functions = (getattr(file, "eager_attention_forward", None) for file in files)
    return next(filter(None, functions), None)


def packed_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options,
) -> tuple[Tensor, None]:
    """As `packed_attention`, by the layer's eager attention over blocks of queries. Each query's
    row of scores is whole in its block, so that the result is the same."""
    eager = eager_function(module)
    assert eager is not None, "attends_by_name found one in every layer"
    if attention_mask is None or attention_mask.shape[2]:
        return eager(module, query, key, value, attention_mask, **options)[0], None
    window = attention_mask.shape[3]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, length = q.shape[1:3]
        most = min(max(MOST_SCORES // (heads * length), 1), WINDOW_BLOCK)
        blocks = []
        for queries, keys in _blocks(length, window, most):
            mask = additive_mask(_causal(queries, keys, window, q.device), q.dtype)[None, None]
            seen = (x[:, :, keys.start : keys.stop] for x in (k, v))
            asked = q[:, :, queries.start : queries.stop]
            blocks.append(eager(module, asked, *seen, mask, **options)[0])
        return torch.cat(blocks, dim=1)

    return _text_by_text(attend, query, key, value), None


def _blocks(length: int, window: int, size: int) -> Iterator[tuple[range, range]]:
    """Blocks of at most `size` queries of a text, and the keys that they see. `window`: 0: none."""
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = max(start - window + 1, 0) if window else 0
        yield range(start, stop), range(first, stop)


def _causal(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """bool [queries, keys], True = attend: causal, within the window if there is one."""
    key = torch.arange(keys.start, keys.stop, device=device)
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    seen = key <= query
    if window:
        seen &= key > query - window
    return seen


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool -> 0 where True, else the most negative number (finite: no NaN)."""
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min)


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(EAGER_NAME, packed_eager)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionMaskInterface.register(EAGER_NAME, sdpa_mask)


def packed_mask(segment_ids: Tensor) -> Tensor | None:
    """bool [B, 1, T, T], True = attend; None where plain causal attention is equivalent.

    segment_ids [B, T]: the text a token belongs to; -1: padding."""
    slots = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    segments = on_host(segment_ids)
    starts = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] >= 0)  # [B, T-1]
    if not bool(starts.any()):  # one text per row; padding after it needs no mask
        return None
    same = segment_ids[:, :, None] == segment_ids[:, None]
    return (same & (slots[:, :, None] >= slots[:, None]))[:, None]
