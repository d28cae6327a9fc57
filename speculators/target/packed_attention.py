"""Attention over packed rows: text by text for long rows, without [T, T] tensors, and the masks of
all other rows.

The texts of a packed row do not see each other, so plain causal attention over each text gives the
same result; sliding windows are computed in blocks of queries. A layer receives a mask without
queries, whose last dimension is its window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.speculators.precision import on_host

NAME = "draftsmith_packed"
LONG_ROW = 4096  # tokens; masks of shorter rows are small
WINDOW_BLOCK = 1024  # queries

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
    before, token = config._attn_implementation, _spans.set(spans)
    config._attn_implementation = NAME
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
    rows, window = [], attention_mask.shape[3]
    for row, spans in enumerate(_spans.get()):
        texts = []
        for start, end in spans:
            q, k, v = (x[row : row + 1, :, start:end] for x in (query, key, value))
            texts.append(_attend(q, k, v, window, dropout, scaling))
        rows.append(torch.cat(texts, dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float, scale: float | None
) -> Tensor:
    """Attention of one text: [1, h, L, d] -> [1, h, L, ·]."""
    options = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attention, L = nn.functional.scaled_dot_product_attention, q.shape[2]
    if not window or L <= window:
        return attention(q, k, v, is_causal=L > 1, **options)
    blocks = []
    for start in range(0, L, WINDOW_BLOCK):
        end, first = min(start + WINDOW_BLOCK, L), max(start - window + 1, 0)
        keys = torch.arange(first, end, device=q.device)
        queries = torch.arange(start, end, device=q.device)[:, None]
        mask = (keys <= queries) & (keys > queries - window)
        seen = (k[:, :, first:end], v[:, :, first:end])
        blocks.append(attention(q[:, :, start:end], *seen, mask, **options))
    return torch.cat(blocks, dim=2)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


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
