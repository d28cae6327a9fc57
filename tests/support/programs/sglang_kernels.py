"""Stands in for `sgl_kernel`, SGLang's kernels: those for CPUs, which are in no package, say the
same here in PyTorch, for chains of drafts; any other raises when it is called.

Arguments are those of SGLang's own calls: `table` [requests, positions] has the slot in the cache
of each position, `pool` [B] the rows of it that are in use."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Missing:
    """A kernel that is not here, or a name inside it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(self._name)


class Kernels(ModuleType):
    """`sgl_kernel` or a module in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KERNELS.get(name) or Missing(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and all in it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name in ("decode_attention_cpu", "extend_attention_cpu"):
            setattr(torch.ops.sgl_kernel, name, KERNELS[name])


def install() -> None:
    """From now on this process imports these kernels."""
    sys.meta_path.insert(0, Finder())


# ---------------------------------------------------------------------- slots


def copy_all_layer_kv_cache(addresses: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Copies slots in every layer's memory, of `strides` bytes a slot."""
    for address, stride in zip(addresses.tolist(), strides.tolist()):
        slots = [ctypes.string_at(address + i * stride, stride) for i in source.tolist()]
        for i, slot in zip(to.tolist(), slots):
            ctypes.memmove(address + i * stride, slot, stride)


def assign_draft_cache_locs_contiguous(
    pool: Tensor, table: Tensor, lengths: Tensor, out: Tensor, _: int, topk: int, steps: int
) -> None:
    """The slots of topk · steps positions behind each row."""
    width = topk * steps
    for i, (row, length) in enumerate(zip(pool.tolist(), lengths.tolist())):
        out[i * width : (i + 1) * width] = table[row, length : length + width]


def assign_extend_cache_locs(
    pool: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, _: int
) -> None:
    """The slots of positions start … end of each row, one row behind the other."""
    at = 0
    for row, first, last in zip(pool.tolist(), start.tolist(), end.tolist()):
        out[at : at + last - first] = table[row, first:last]
        at += last - first


def assign_req_to_token_pool(
    pool: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    """Writes slots to positions start … end of each row."""
    at = 0
    for row, first, last in zip(pool.tolist(), start.tolist(), end.tolist()):
        table[row, first:last] = slots[at : at + last - first].to(table.dtype)
        at += last - first


def build_draft_decode_metadata(
    table: Tensor, pool: Tensor, _: Tensor, topk: int, *__: int
) -> Tensor:
    """A row of slots for each branch: of a chain the request's own."""
    assert topk == 1, "a chain"
    return table[pool.long()].contiguous()


def fill_accept_out_cache_loc(index: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of what was accepted; -1 in index [B, K + 1]: was not."""
    kept = index.flatten()
    kept = kept[kept > -1].long()
    out[: len(kept)] = slots[kept]


# ---------------------------------------------------------------------- tokens


def fill_bonus_tokens(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """The last token that each row keeps."""
    for i, length in enumerate(lengths.tolist()):
        bonus[i] = tokens.flatten()[stride * i + length - 1]


def rotate_input_ids(
    token_ids: Tensor, starts: Tensor, lengths: Tensor, following: Tensor, places: Any = None
) -> None:
    """Moves each row's tokens one to the left, its next one behind them."""
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        end = start + length
        token_ids[start : end - 1] = token_ids[start + 1 : end].clone()
        last = end - 1 if places is None else int(places[i])
        token_ids[last] = following.flatten()[i]


def build_tree_kernel_efficient(
    _: Tensor,
    __: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    ___: Tensor,
    topk: int,
    ____: int,
    width: int,
    mode: int,
) -> None:
    """A chain of `width` tokens behind each row: each is the child of the one before."""
    assert topk == 1 and int(mode) == 1, "a chain, and masks of its tokens alone"
    rows = len(lengths)
    order = torch.arange(width)
    mask.view(-1)[: rows * width**2] = torch.ones(width, width).tril().bool().flatten().repeat(rows)
    positions.copy_((lengths[:, None] + order).flatten())
    index.copy_(torch.arange(rows * width).view(rows, width))
    child.copy_(torch.where(order < width - 1, order + 1, -1).expand(rows, width))


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Each row's drafts up to the first that is not the target's, and the target's token there."""
    targets = target_predict.flatten()
    for row in range(len(candidates)):
        accepted = 0
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        for node in range(1, accept_index.shape[1]):
            if candidates[row, node] != targets[last]:
                break
            predicts[last] = targets[last]
            accepted = node
            last = int(retrive_index[row, node])
            accept_index[row, node] = last
        accept_token_num[row] = accepted
        predicts[last] = targets[last]


# ---------------------------------------------------------------------- attention


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [T, heads, D], k and v [S, KV heads, D], mask [T, S] -> [T, heads, D]."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], mask, scale=scale, enable_gqa=True
    )[0].transpose(0, 1)


def extend_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: float,
    value_scale: float,
    table: Tensor,
    pool: Tensor,
    lengths: Tensor,
    new: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Any,
    sinks: Any,
    tree: Any,
    is_causal: bool,
) -> None:
    """Each row's new tokens over all of it; they lie in the cache already."""
    assert not cap and not is_cross and sinks is None and tree is None
    assert key_scale == value_scale == 1
    for row, length, count, start in zip(*(x.tolist() for x in (pool, lengths, new, starts))):
        slots = table[row, :length].long()
        places = torch.arange(length)
        queries = places[length - count :, None]
        mask = places <= queries if is_causal else torch.ones(count, length, dtype=torch.bool)
        if window > 0:
            mask = mask & (places > queries - window)
        heads = q[start : start + count]
        out[start : start + count] = _attend(
            heads, key_cache[slots], value_cache[slots], mask, scale
        )


def decode_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: float,
    value_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Tensor,
    logits: Tensor,
    table: Tensor,
    pool: Tensor,
    lengths: Tensor,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Any,
    sinks: Any,
) -> None:
    """One new token of each row over all of it; it is put into the cache here."""
    assert not cap and not is_cross and sinks is None
    assert key_scale == value_scale == 1
    if k is not None and v is not None:
        key_cache[slots.long()] = k.view(-1, *key_cache.shape[1:])
        value_cache[slots.long()] = v.view(-1, *value_cache.shape[1:])
    for i, (row, length) in enumerate(zip(pool.tolist(), lengths.tolist())):
        seen = table[row, :length].long()
        mask = torch.ones(1, length, dtype=torch.bool)
        if window > 0:
            mask = mask & (torch.arange(length) > length - 1 - window)
        out[i : i + 1] = _attend(q[i : i + 1], key_cache[seen], value_cache[seen], mask, scale)


KERNELS = {
    f"{kernel.__name__}_cpu": kernel
    for kernel in (
        assign_draft_cache_locs_contiguous,
        assign_extend_cache_locs,
        assign_req_to_token_pool,
        build_draft_decode_metadata,
        build_tree_kernel_efficient,
        copy_all_layer_kv_cache,
        decode_attention,
        extend_attention,
        fill_accept_out_cache_loc,
        fill_bonus_tokens,
        rotate_input_ids,
        verify_tree_greedy,
    )
}
