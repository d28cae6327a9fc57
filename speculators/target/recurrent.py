"""Recurrent layers of a target: where their states are, and how these are rolled back.

Linear-attention, state-space and short-convolution layers fold a text into states of a fixed size,
from which a rejected draft cannot be masked out. So a forward runs on a copy of the states. For a
row that keeps only some of its tokens, the modules that hold states (mixers) run again over these
tokens, from the state before the forward, with the inputs that the forward gave them. Mixers are
found by observation: they are the modules that hand states to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device

Key = tuple[int, str, int]  # layer, conv_states or recurrent_states, number of the state
KINDS = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class RecurrentLayers:
    """The mixers of a model.

    num_states  per layer of the cache: how many states of each kind it has; 0: it is not recurrent
    stepwise    a mixer that continues a text must be given its tokens one by one
    """

    mixers: tuple[nn.Module, ...]
    num_states: tuple[int, ...]
    stepwise: bool = False

    @contextmanager
    def recording(self, calls: list[Call], shape: tuple[int, int], fresh: bool) -> Iterator[None]:
        """Inside, mixers write inputs to `calls`. shape: [b, T]; fresh: no text goes on."""
        before = [mixer.__dict__.get("forward") for mixer in self.mixers]
        for mixer in self.mixers:
            plain_forward = mixer.forward

            def forward(
                *args: Any,
                mixer: nn.Module = mixer,
                plain_forward: Callable = plain_forward,
                **kwargs: Any,
            ) -> Any:
                calls.append((mixer, args, kwargs))
                return self.mix(plain_forward, args, kwargs, shape, fresh)

            mixer.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for mixer, plain_forward in zip(self.mixers, before):
                del mixer.forward
                if plain_forward is not None:
                    mixer.forward = plain_forward  # type: ignore[method-assign]

    def mix(
        self, forward: Callable, args: tuple, kwargs: dict, shape: tuple[int, int], fresh: bool
    ) -> Any:
        """A mixer's output, token by token where it cannot continue with several."""
        b, T = shape
        if fresh or T == 1 or not self.stepwise:
            return forward(*args, **kwargs)
        outputs = []
        for t in range(T):
            cut = partial(_cut, shape=shape, rows=slice(0, b), slots=slice(t, t + 1))
            named = {name: cut(value) for name, value in kwargs.items()}
            outputs.append(forward(*map(cut, args), **named))
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, dim=1)
        return (torch.cat([output[0] for output in outputs], dim=1), *outputs[-1][1:])


Call = tuple[nn.Module, tuple, dict]  # a mixer, and its inputs


def _cut(
    value: Any, shape: tuple[int, int], rows: Any, slots: slice, cache: Cache | None = None
) -> Any:
    """An input of a mixer for some rows and slots. `cache` takes the place of the forward's."""
    if isinstance(value, Cache):
        return value if cache is None else cache
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(entry, shape, rows, slots, cache) for entry in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] == shape[0]:
        return value[rows][:, slots]
    return value[:, slots] if value.shape[0] == 1 else value


class StateCache(Cache):
    """`past_key_values` of mixers alone."""

    layer_class_to_replicate = None
    offloading = False

    def __init__(self, layers: list) -> None:
        self.layers = layers


@dataclass
class _Forward:
    """A forward over T tokens of rows [start, stop)."""

    start: int
    stop: int
    T: int
    fresh: bool
    layers: list
    calls: list[Call] = field(default_factory=list)
    left: set[int] = field(default_factory=set)  # rows of which nothing was kept yet


class RecurrentStates:
    """The states of `rows` rows, in memory of their own: per state [rows, …], zero for an empty
    row.

    `forward` runs on a copy, and `keep` moves the states on; a forward of which nothing is kept
    changes nothing."""

    def __init__(self, of: RecurrentLayers, rows: int) -> None:
        self.of = of
        self.rows = rows
        self._held: dict[Key, Tensor] = {}
        self._forward: _Forward | None = None

    @contextmanager
    def forward(self, start: int, stop: int, T: int, fresh: bool) -> Iterator[list]:
        """Around a forward of the target over T tokens of rows [start, stop): yields the layers
        that its cache must have. fresh: the rows are empty."""
        fresh = fresh or not self._held
        layers = self._load(slice(start, stop), fresh)
        forward = _Forward(start, stop, T, fresh, layers)
        self._forward = forward
        forward.left = set(range(start, stop))
        with self.of.recording(forward.calls, (stop - start, T), fresh):
            yield forward.layers

    def keep(self, start: int, counts: Sequence[int]) -> None:
        """Row start + i moves on by the first counts[i] tokens of the last forward."""
        forward = self._forward
        groups = {}
        for row, count in enumerate(counts, start):
            if count:
                groups.setdefault(count, []).append(row)
        for count, rows in groups.items():
            if forward is None or not forward.left.issuperset(rows) or count > forward.T:
                raise ConfigError(
                    f"{count} tokens of {rows} were not read", where="RecurrentStates.keep"
                )
            index = on_device(rows, next(_states(forward.layers))[1].device)
            if count == forward.T:
                self._store(index, forward.layers, index - forward.start)
            else:
                self._store(index, self._again(forward, index, count), None)
            forward.left.difference_update(rows)
        if forward is not None and not forward.left:
            self._forward = None

    def _again(self, forward: _Forward, rows: Tensor, count: int) -> list:
        """The layers of a cache after the first `count` tokens of these rows."""
        layers = self._load(rows, forward.fresh)
        cut_to = {
            "rows": rows - forward.start,
            "slots": slice(0, count),
            "cache": StateCache(layers),
        }
        cut = partial(_cut, shape=(forward.stop - forward.start, forward.T), **cut_to)
        for mixer, args, kwargs in forward.calls:
            inputs = tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}
            self.of.mix(mixer, *inputs, (len(rows), count), forward.fresh)
        return layers

    # ------------------------------------------------------------------ rows

    def reset(self, row: int) -> None:
        """The states of a row are those before its first token."""
        for held in self._held.values():
            held[row] = 0

    def move(self, src_row: int, dst_row: int) -> None:
        """Copies the states of a row to another."""
        for held in self._held.values():
            held[dst_row] = held[src_row]

    # ------------------------------------------------------------------ memory

    def _load(self, rows: slice | Tensor, fresh: bool) -> list:
        new = lambda n: LinearAttentionLayer(number_of_states=n) if n else None
        layers = [new(n) for n in self.of.num_states]
        if not fresh:
            for (layer, kind, i), held in self._held.items():
                loaded = layers[layer]
                state = held[rows].clone()
                assert loaded is not None
                getattr(loaded, kind)[i] = state
                getattr(loaded, f"is_{kind}_initialized")[i] = True
                if kind == "conv_states":
                    loaded.conv_kernel_size[i] = state.shape[-1]
                loaded.has_previous_state[i] = True
        return layers

    def _store(self, rows: Tensor, layers: list, inside: Tensor | None) -> None:
        """inside: the rows of the layers that these are; None: all in their order."""
        for key, state in _states(layers):
            if key not in self._held:
                self._held[key] = self._allocate(state)
            self._held[key][rows] = state if inside is None else state[inside]

    def _allocate(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((self.rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _states(layers: list) -> Iterator[tuple[Key, Tensor]]:
    """Every state that the layers of a cache hold."""
    for number, layer in enumerate(layers):
        for kind in KINDS if layer is not None else ():
            for i, state in getattr(layer, kind).items():
                if state is not None:
                    yield (number, kind, i), state
