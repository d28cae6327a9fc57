"""Attention over packed rows: by fused kernels on CUDA, text by text for long rows elsewhere, both
without [T, T] tensors, and the masks of all other rows.

The texts of a packed row do not see each other, so plain causal attention over each text gives the
same result. On CUDA one kernel attends for the texts of all rows: torch's varlen_attn (Flash
Attention), or flex_attention under a mask of documents where that does not serve (float32, heads
whose values are of another width). Elsewhere sliding windows are computed in blocks of queries, and
so is all attention of targets that attend eagerly (soft caps, sinks), by the function of their own
modeling file. A layer receives a mask without queries, whose last dimension is its window."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.speculators import kernels
from draftsmith.speculators.layers import flex_attention
from draftsmith.speculators.layers.queries import PackedQueries
from draftsmith.speculators.precision import on_device, on_host

NAME = "draftsmith_packed"
EAGER_NAME = "draftsmith_packed_eager"
LONG_ROW = 4096  # tokens; masks of shorter rows are small
# Tokens of a row on a CPU, from which attention text by text costs less than masked scores, most of
# which are of other texts: a third at 640 tokens in texts of 200, a sixth at 2,048 in texts of 300.
CPU_ROW = 256
WINDOW_BLOCK = 1024  # queries
MOST_SCORES = 2**27  # of one block of eager attention, over all heads
# of varlen_attn's kernel
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_CAPABILITY = (8, 0)  # compute capability
VARLEN_WIDTH = 256  # of a head at most, and a multiple of 8
# Versions of torch before 2.12 lack some of these.
VARLEN_ARGUMENTS = {"scale", "window_size", "enable_gqa"}

Spans = Sequence[Sequence[tuple[int, int]]]  # per row, [start, end) of each text


def text_spans(segment_ids: Tensor) -> Spans:
    """segment_ids [B, T] -> spans of texts, each in one piece, per row, padding included."""
    rows = []
    for row in on_host(segment_ids).tolist():
        starts = [0] + [i for i in range(1, len(row)) if row[i] != row[i - 1]]
        rows.append(list(zip(starts, [*starts[1:], len(row)])))
    return rows


class TextLayout:
    """Where the texts of packed rows lie. segment_ids [B, T]: the text a token belongs to, each in
    one piece; -1: padding, which counts as a text."""

    def __init__(self, segment_ids: Tensor) -> None:
        self.segment_ids = segment_ids

    @cached_property
    def spans(self) -> Spans:
        """Those of every row."""
        return text_spans(self.segment_ids)

    @cached_property
    def bounds(self) -> Tensor:
        """int32 [N + 1] on the device: where the N texts of all rows begin, one row after the
        other, and the end of the last."""
        length = self.segment_ids.shape[1]
        begins = [
            row * length + start for row, spans in enumerate(self.spans) for start, _ in spans
        ]
        ends = [*begins, self.segment_ids.numel()]
        return on_device(ends, self.segment_ids.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(end - start for spans in self.spans for start, end in spans)

    @cached_property
    def queries(self) -> PackedQueries:
        """What each token sees, for flex_attention."""
        return PackedQueries(self.segment_ids)


_layout: ContextVar[TextLayout] = ContextVar("layout")


def placeholder(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The mask [1, 1, 0, window] of layers with such a window; 0: without one."""
    return torch.empty(1, 1, 0, window, device=device, dtype=dtype)


@contextmanager
def packed(config: PretrainedConfig, layout: TextLayout) -> Iterator[None]:
    """Inside, models of `config` attend within the texts of `layout` where the mask is a
    `placeholder`."""
    before = config._attn_implementation
    token = _layout.set(layout)
    config._attn_implementation = EAGER_NAME if before == "eager" else NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _layout.reset(token)


def packed_again(config: PretrainedConfig) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of torch's checkpoints in models of `config`: what a backward pass computes
    again, after `packed` has ended and on a GPU in another thread, attends within the same texts.
    """
    layout = _layout.get(None)
    return nullcontext(), nullcontext() if layout is None else packed(config, layout)


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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not dropout and varlen_serves(query, value):
        return varlen_attention(query, key, value, _layout.get(), window, scale), None
    if not dropout and flex_attention.serves(query, value):
        return document_attention(query, key, value, _layout.get(), window, scale), None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, window, dropout, scale).transpose(1, 2)

    return _text_by_text(attend, query, key, value), None


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """True if varlen_attn attends on the device in this dtype, at widths that it knows."""
    if device.type != "cuda" or dtype not in VARLEN_DTYPES or not kernels.enabled("attention"):
        return False
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < VARLEN_CAPABILITY:
        return False
    return inspect.signature(varlen_attn).parameters.keys() >= VARLEN_ARGUMENTS


def varlen_serves(query: Tensor, value: Tensor) -> bool:
    """True if varlen_attn attends for query [.., d] and value [.., v]."""
    width = query.shape[-1]
    known = width == value.shape[-1] and width <= VARLEN_WIDTH and width % 8 == 0
    return known and has_varlen(query.device, query.dtype)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TextLayout, window: int, scale: float
) -> Tensor:
    """Causal attention within the texts of all rows, in one kernel: query [B, h, T, d], key and
    value [B, g, T, d] -> [B, T, h, d]. `window`: tokens that are seen; 0: all."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    bounds = layout.bounds
    longest = layout.longest
    # tokens before a query's own; -1: all
    before = window - 1 if window else -1
    with kernels.of_part("attention"):
        out = varlen_attn(
            q,
            k,
            v,
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=(before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.unflatten(0, (query.shape[0], -1))


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TextLayout, window: int, scale: float
) -> Tensor:
    """As `varlen_attention`, by flex_attention; value [B, g, T, v] -> [B, T, h, v]."""
    mask = flex_attention.block_mask(layout.queries.within(window or None))
    return flex_attention.attend_context(query, key, value, mask, scale)[0].transpose(1, 2)


def _text_by_text(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of packed rows [B, T, h, ·]. `attend`: queries, keys and values of one text
    [1, ·, L, d] -> [1, L, h, ·]."""
    rows = []
    for row, spans in enumerate(_layout.get().spans):
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
