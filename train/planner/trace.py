"""Runs PyTorch code on tensors without memory and counts its matrix products, bytes moved, calls
and memory.

Large tensors are hollow: they have a shape, a dtype and a device, and no values. Small tensors that
depend on no hollow one are real, so that token ids, masks and indices lead the code where they
would lead it in a run. torch's FakeTensorMode, FlopCounterMode and MemTracker do this together, but
have no small values and take longer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers.modeling_layers import GradientCheckpointingLayer

from inference.kv_cache.ragged_cache import RaggedView
from train.planner.devices import Product, Work

REAL = 1 << 18  # elements: larger tensors are hollow
CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
# These touch as much of their first argument as they return or write.
_LOOKUPS = {
    aten.index,
    aten.embedding,
    aten.gather,
    aten.index_select,
    aten.index_put_,
    aten.index_put,
    aten.scatter_,
    aten.index_copy_,
    aten.index_add_,
    aten.scatter_add_,
    aten.index_fill_,
}
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._local_scalar_dense,
    aten.lift_fresh,
    aten.is_same_size,
    aten.set_,
}


M = TypeVar("M", bound=nn.Module)


class Hollow(Tensor):
    """A tensor of the meta device that passes for one of a CPU. It is used inside of a Trace
    only."""

    @staticmethod
    def __new__(cls, meta: Tensor) -> Hollow:
        return Tensor._make_subclass(
            cls, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=CPU
        )

    in_kernel: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return META if Hollow.in_kernel else CPU

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is _DEVICE:
            return args[0].device
        raise RuntimeError(f"{func}: a tensor without memory was used outside of a Trace")


@dataclass
class Tally:
    """The counts of one phase. `entered`, `peak` and `kept`: bytes of all tensors of the trace when
    it began, at most, and at its end."""

    work: Work = field(default_factory=Work)
    entered: int = 0
    peak: int = 0
    kept: int = 0


class Trace(TorchDispatchMode):
    """Counts the code that runs inside, by phase. `live`: bytes of the tensors that were made there
    and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.tally, self.live = Tally(), 0
        self.phases: dict[str, Tally] = {}
        self._alive: dict[int, weakref.ref] = {}  # storages
        self._repeated: dict[tuple, tuple[Tally, int | None, Any] | None] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts for `name` inside of a `with`; a phase may be entered again."""
        if name not in self.phases:
            self.phases[name] = Tally(entered=self.live)
        before, self.tally = self.tally, self.phases[name]
        self.tally.peak = max(self.tally.peak, self.live)
        try:
            yield
        finally:
            self.tally.kept, self.tally = self.live, before
            before.peak = max(before.peak, self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _DEVICE:
            return CPU
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = list(_tensors((args, *kwargs.values())))
        if not any(isinstance(t, Hollow) for t in tensors) and not _large(func, args, tensors):
            self.tally.work.calls += not (func.is_view or packet in _FREE)
            return func(*args, **kwargs)
        if packet is aten._local_scalar_dense:
            return tensors[0].dtype == torch.bool or 1
        if packet is aten.nonzero:
            return _nonzero(tensors[0])
        if packet in (aten.index, aten.index_put_):
            args = (args[0], _without_masks(args[1]), *args[2:])
        key = (func, _key(args), _key(tuple(kwargs.items())))
        make, cost = _KNOWN.get(key, (None, None))
        if make is not None:
            out = make()
        elif (
            func._schema.is_mutable
            and len(func._schema.returns) == 1
            and isinstance(args[0], Tensor)
        ):
            out = args[0]
        else:
            out = _in_kernel(func, args, kwargs)
        if func.is_view or packet is aten._unsafe_view:
            return out
        if not func._schema.is_mutable:
            for t in _tensors((out,)):
                self._hold(t)
        if cost is None:
            cost = (None, 0.0) if packet in _FREE else _cost(func, args, kwargs, tensors, out)
            _KNOWN[key] = None if func._schema.is_mutable else _maker(out), cost
        (product, traffic), work = cost, self.tally.work
        work.calls += packet not in _FREE
        work.traffic += traffic
        if product is not None:
            work.products[product] = work.products.get(product, 0) + 1
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled inside, and shielding each call from Dynamo takes as long as
        counting it."""
        return False

    def repeated(self, kind: Any, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the first two calls of a kind with inputs of these shapes, a decoder layer say (the
        first may make what all of them share). For the next ones it adds what the second one
        counted, and a layer of the cache."""
        key, start = (kind, _key(args), _key(tuple(kwargs.items()))), self.live
        cache = next((v.cache for v in kwargs.values() if isinstance(v, RaggedView)), None)
        if self._repeated.get(key) is None:
            outer, self.tally = self.tally, Tally(peak=start)
            cached = len(cache.memory()[0]) if cache is not None else 0
            out = forward(*args, **kwargs)
            inner, self.tally = self.tally, outer
            inner.peak -= start
            grown = cached if cache is not None and len(cache.memory()[0]) > cached else None
            self._repeated[key] = (inner, grown, _maker(out)) if key in self._repeated else None
        else:
            inner, grown, make = self._repeated[key]  # type: ignore[misc]
            if cache is not None and grown is not None:
                cache.repeat_layer(grown)
            out = make()
            for t in _tensors((out,)):
                self._hold(t)
        self.tally.work += inner.work
        self.tally.peak = max(self.tally.peak, start + inner.peak)
        return out

    def _hold(self, t: Tensor) -> None:
        """Counts a new tensor's memory for as long as its storage exists."""
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        trace = weakref.ref(self)

        def release(_: Any) -> None:
            if (alive := trace()) is not None and alive._alive.pop(key, None) is not None:
                alive.live -= size

        self._alive[key] = weakref.ref(storage, release)
        self.live += size
        self.tally.peak = max(self.tally.peak, self.live)


_DEVICE = torch.ops.prim.device.default
Cost = tuple[Product | None, float]  # of one call: a product, or bytes through memory
_KNOWN: dict[
    tuple, tuple[Callable[[], Any] | None, Cost | None]
] = {}  # by call: makes its result, and its cost


def _cost(func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], out: Any) -> Cost:
    packet, read = func.overloadpacket, [_bytes(t) for t in inputs]
    written = sum(_bytes(t) for t in _tensors((out,)))
    if (flops := _flops(func, args, kwargs, out)) is not None:
        moved: float = sum(read) + written
        if (
            packet is aten._grouped_mm and inputs[1].ndim == 3
        ):  # an expert that no row meets is not read
            moved -= read[1] * (1 - 1 / inputs[1].shape[0]) ** inputs[0].shape[0]
        return Product(flops, moved, inputs[0].dtype), 0.0
    if packet in _LOOKUPS:
        rest = sum(read[1:])
        return None, 2 * rest if func._schema.is_mutable else rest + 2 * written
    return None, sum(read) + written


def _flops(func: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """Operations of a matrix product or an attention; None for everything else. torch lacks three
    of the formulas."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    if (
        packet is aten._grouped_mm
    ):  # a row of [M, K] meets one of [E, K, N]; or [K, M] and [M, N] give [E, K, N]
        return 2 * args[0].numel() * args[1].shape[-1]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    return None


def _bytes(t: Tensor) -> int:
    """Bytes that are read; an expanded tensor is read as what it was expanded from."""
    return t.element_size() * math.prod(n for n, stride in zip(t.shape, t.stride()) if stride)


def _large(func: Any, args: tuple, tensors: list[Tensor]) -> bool:
    """True if an operation on real tensors makes a large one."""
    if not tensors:
        sizes = next((a for a in args if isinstance(a, (list, tuple))), ())
        return math.prod(n for n in sizes if isinstance(n, int)) > REAL
    if torch.Tag.pointwise in func.tags and len(tensors) > 1:
        width = max(t.ndim for t in tensors)
        shapes = [(1,) * (width - t.ndim) + tuple(t.shape) for t in tensors]
        return math.prod(map(max, zip(*shapes))) > REAL
    return sum(t.numel() for t in tensors) > REAL


# ---------------------------------------------------------------------------------------------
# hollow tensors


def _in_kernel(func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs the operation on the meta device."""
    if func.overloadpacket is aten._grouped_mm:  # there in bfloat16 only
        return _grouped(*args, **kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": META}
    args, kwargs = (
        _mapped(_to_meta, args),
        {name: _mapped(_to_meta, value) for name, value in kwargs.items()},
    )
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        Hollow.in_kernel = True
        try:
            return _mapped(
                lambda t: t if isinstance(t, Hollow) else Hollow(t), func(*args, **kwargs)
            )
        finally:
            Hollow.in_kernel = False


def _grouped(a: Tensor, b: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Multiplies rows [M, K] with one of the matrices [E, K, N] each, or gives the gradient of
    these."""
    shape = (a.shape[0], b.shape[-1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return Hollow(torch.empty(shape, dtype=a.dtype, device=META))


def _nonzero(mask: Tensor) -> Tensor:
    """The indices of a mask; of a hollow one all elements are chosen."""
    if not isinstance(mask, Hollow):
        return mask.nonzero()
    return Hollow(torch.empty(mask.numel(), mask.ndim, dtype=torch.long, device=META))


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices in place of masks, as the meta device cannot say how many elements a mask chooses."""
    masks = [i is not None and i.dtype == torch.bool for i in indices]
    return [
        j
        for i, mask in zip(indices, masks)
        for j in (_nonzero(i).unbind(1) if mask and i is not None else (i,))
    ]


def _to_meta(t: Tensor) -> Tensor:
    if isinstance(t, Hollow):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META)


def _maker(result: Any) -> Callable[[], Any]:
    """Makes new tensors like those of a result."""
    shapes = _mapped(
        lambda t: partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=META),
        result,
    )

    def make() -> Any:
        with torch._C._DisableTorchDispatch():
            return _mapped(lambda empty: Hollow(empty()), shapes, of=partial)

    return make


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any, of: Any = Tensor) -> Any:
    """`change` of every tensor in an argument or a result."""
    if isinstance(value, of):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, item, of) for item in value)
    return value


def _key(value: Any) -> Any:
    """The part of an argument that the cost of a call depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    return value.__class__, value


def without_memory(module: M) -> M:
    """Puts hollow tensors in place of a module's own on the meta device. Tied ones stay tied."""
    made: dict[Tensor, Tensor] = {}  # tensors are hashed by identity
    for part in module.modules():
        stores: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in stores:
            for name, t in tensors.items():
                if t is not None and not isinstance(t, Hollow):
                    tensors[name] = made[t] if t in made else made.setdefault(t, _stand_in(t))
        if isinstance(part, GradientCheckpointingLayer) and not isinstance(
            part.forward, partial
        ):  # a decoder layer
            part.forward = partial(_layer, _kind(part), part.forward)
    module.__dict__["_apply"] = lambda *_, **__: module  # they cannot be moved, and need not be
    return module


def _kind(layer: nn.Module) -> tuple:
    """Equal for layers with the same code and settings, whatever their place."""
    settings = [vars(part).items() for part in layer.modules()]
    known = {
        (n, v)
        for each in settings
        for n, v in each
        if isinstance(v, (str, int, float)) and n != "layer_idx"
    }
    return str(layer), frozenset(known)


def _layer(kind: Any, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    trace = _get_current_dispatch_mode()
    if torch.is_grad_enabled() or not isinstance(trace, Trace):
        return forward(*args, **kwargs)
    return trace.repeated(kind, forward, args, kwargs)


def _stand_in(t: Tensor) -> Tensor:
    if not t.is_floating_point():  # ids and the like are real, and in their range
        return torch.arange(t.numel(), dtype=t.dtype).view(t.shape)
    empty = Hollow(torch.empty(t.shape, dtype=t.dtype, device=META))
    with Trace():
        return nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
