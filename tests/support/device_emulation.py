"""A GPU that is not there: CPU tensors that claim to be on `cuda:0`, refuse what a GPU would
refuse, and count waits.

    def test_a_step(claimed_gpu):                       # the fixture of tests/conftest.py
        model = make_tiny_model("llama").to("cuda")     # or torch.zeros(3, device=DEVICE)
        with claimed_gpu.waits() as waits:              # Counter: kind of wait -> how often
            step(model)

    with claimed_gpu.launches() as launches:            # Counter: operation -> how often
        step(model)

Refused as on a GPU: a host tensor among device tensors (0-dimensional ones excepted where torch
makes an exception), an index on another device, `.numpy()`, pinning an expanded tensor; attention
comes in the layout of CUDA's kernels. Counted: every place where the host waits for the device,
because it reads a value or a size from it, or copies to it from memory that is not pinned; and the
operations that it launches, forward and backward: torch's, of which a CPU decomposes some otherwise
than a GPU, and without views and empty tensors. Not seen: kernels, their numerics, NCCL, CUDA
graphs, streams (all work is done when it is launched), memory."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(str(ROOT / name) for name in ("speculators", "inference", "train"))
HOST = torch.device("cpu")


class MixedDevices(RuntimeError):
    """What a GPU would refuse."""


class _Claiming(Tensor):
    """A tensor that says it is on the device. The mode does everything else."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _Emulation.current.call(func, args, dict(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Tensor:
        if id(self) not in memo:
            copied = _bare(self).detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=self.requires_grad)
                copied.__class__ = _ClaimingParameter
            memo[id(self)] = _claim(copied)
        return memo[id(self)]


class _ClaimingParameter(_Claiming, nn.Parameter):
    pass


def _bare(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _claim(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor if isinstance(tensor, _Claiming) else tensor.as_subclass(_Claiming)


def _pinned(tensor: Tensor) -> bool:
    """What has gaps is copied to memory that is not pinned, and from there."""
    dense = torch.empty_like(tensor).stride() == tensor.stride()
    return dense and getattr(tensor, "in_pinned_memory", False)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _claim_all(value: Any) -> Any:
    return tree_map_only(Tensor, _claim, value)


# Names of torch's functions and methods.
READS = {  # one value, or all of them, to the host
    *("item", "tolist", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__"),
}
# a result whose size the device has to say
SIZES = {"nonzero", "masked_select", "unique", "unique_consecutive", "bincount"}
INDEXED = {"__getitem__", "__setitem__", "index_put", "index_put_"}
JOINED = {"cat", "concat", "stack", "vstack", "hstack"}
FREE = {
    *("copy_", "type", "__setstate__", "__repr__", "__get__", "__set__"),
    "_has_compatible_shallow_copy_type",
}
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
# operations that launch nothing, beside views
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view"}
NO_LAUNCH |= {"new_empty_strided", "lift_fresh", "is_same_size", "_reshape_alias", "is_pinned"}


def _of_an_optimizer() -> bool:
    """True in a move that torch's fused optimizers ask for: they group tensors by their device in
    C++, which sees the host, and move nothing on a GPU."""
    return sys._getframe(4).f_code.co_filename.endswith("torch/optim/adam.py")


class _Emulation:
    """What happens to each call of torch while the device is claimed."""

    current: _Emulation

    def __init__(self) -> None:
        self._counts: Counter[str] | None = None
        self.sites: Counter[str] = Counter()  # file:line of this project -> waits there
        self.streams: _Streams | None = None
        self.in_engine = False  # autograd's, which passes bare tensors to a Function's backward
        self._launched: Counter[str] | None = None
        self._on_device = False  # the call of torch in progress is the device's

    @contextlib.contextmanager
    def waits(self) -> Iterator[Counter[str]]:
        """Kinds of waits and how many: `read` a value, `size` of a result, `upload` of memory."""
        before = self._counts
        self._counts = Counter()
        self.sites.clear()
        try:
            yield self._counts
        finally:
            self._counts = before

    @contextlib.contextmanager
    def launches(self) -> Iterator[Counter[str]]:
        """Operations that the device is asked for, and how often."""
        before, self._launched = self._launched, Counter()
        try:
            with _Launches(self):
                yield self._launched
        finally:
            self._launched = before

    @contextlib.contextmanager
    def one_launch(self, name: str, kernels: int = 1) -> Iterator[None]:
        """What runs inside stands for one kernel, or for a compiled function of several."""
        before, self._launched = self._launched, None
        try:
            yield
        finally:
            self._launched = before
            if before is not None:
                before[name] += kernels

    def launched(self, func: Any) -> None:
        """Counts an operation, if it is the device's."""
        name = func.overloadpacket.__name__
        if self._launched is None or func.is_view or name in NO_LAUNCH:
            return
        if self._on_device or self.in_engine:
            self._launched[name] += 1

    def _wait(self, kind: str) -> None:
        if self._counts is None:
            return
        self._counts[kind] += 1
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGES)]
        self.sites[f"{frames[-1].filename}:{frames[-1].lineno} {kind}" if frames else kind] += 1

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_parse_to":
            return self._bare_call(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_device = isinstance(first, _Claiming)
        if func is Tensor.numpy and on_device:
            raise MixedDevices("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        if func is Tensor.pin_memory:
            return self._pin(first)
        if func in MOVES:
            return self._move(func, first, args, kwargs)
        expected = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if expected is not None and expected.type == "cuda":
            kwargs["device"] = HOST
            if func in (torch.tensor, torch.as_tensor):
                self._wait("upload")
        pinned = bool(kwargs.pop("pin_memory", False))
        tensors = _tensors((args, kwargs))
        claimed = any(isinstance(t, _Claiming) for t in tensors)
        if claimed:
            self._check(func, name, args, tensors)
            if name in READS or name in SIZES:
                self._wait("read" if name in READS else "size")
            elif name in ("__getitem__", "__setitem__"):
                if any(t.dtype == torch.bool and t.dim() for t in _tensors(args[1])):
                    self._wait("size")
                elif name == "__setitem__":
                    self._assigned(*args)
            elif name == "repeat_interleave" and "output_size" not in kwargs:
                if any(t.dim() for t in _tensors([*args[1:], kwargs.get("repeats")])):
                    self._wait("size")
            elif name == "copy_":
                self._copied(*args[:2])
        at_device = claimed or (expected is not None and expected.type == "cuda")
        out = self._bare_call(func, args, kwargs, at_device)
        if claimed and func is nn.functional.scaled_dot_product_attention:
            out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as CUDA's kernels lay it out
        if pinned and isinstance(out, Tensor):
            out.in_pinned_memory = True
        if func is Tensor.__setitem__ or out is None:
            return None
        if func is Tensor.copy_ or (isinstance(out, Tensor) and any(out is t for t in tensors)):
            return out if func is not Tensor.copy_ else first
        if expected is not None:
            return _claim_all(out) if expected.type == "cuda" else out
        if func is Tensor.__getitem__:
            return _claim(out) if on_device else out
        return _claim_all(out) if claimed else out

    def _bare_call(
        self, func: Any, args: tuple, kwargs: dict[str, Any], at_device: bool = False
    ) -> Any:
        before, self._on_device = self._on_device, self._on_device or at_device
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        finally:
            self._on_device = before

    def _pin(self, tensor: Tensor) -> Tensor:
        if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride())):
            raise RuntimeError("pin_memory: elements share memory; clone() the tensor before")
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        copied.copy_(tensor).in_pinned_memory = True
        return copied

    def _copied(self, into: Tensor, source: Tensor) -> None:
        if isinstance(source, _Claiming):
            if not isinstance(into, _Claiming):
                self._wait("read")
        elif isinstance(into, _Claiming) and not _pinned(source):
            self._wait("upload")

    def _assigned(self, into: Tensor, places: Any, value: Any) -> None:
        """By indices in a tensor, a number of the host is first copied to the device."""
        number = not isinstance(value, Tensor) or (
            not isinstance(value, _Claiming) and not value.dim()
        )
        if isinstance(into, _Claiming) and _tensors(places) and number:
            self._wait("upload")

    def _check(self, func: Any, name: str, args: tuple, tensors: list[Tensor]) -> None:
        if self.in_engine or name in FREE:
            return
        host = [t for t in tensors if not isinstance(t, _Claiming) and t.device.type == "cpu"]
        wrong = host if name in JOINED else [t for t in host if t.dim()]
        if name in INDEXED:
            places = _tensors(args[1])
            values = _tensors(args[2:])
            # an index of the host is taken to the device; values only by slices
            if isinstance(args[0], _Claiming):
                wrong = [t for t in values if not isinstance(t, _Claiming) and t.dim() and places]
                if any(not isinstance(t, _Claiming) for t in places):
                    self._wait("upload")
            else:
                wrong = [t for t in places if isinstance(t, _Claiming)]
        if wrong:
            shapes = [(str(t.device), tuple(t.shape)) for t in tensors]
            raise MixedDevices(f"{resolve_name(func) or func}: tensors on cuda:0 and cpu: {shapes}")

    def _move(self, func: Any, tensor: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        rest = []
        target = {Tensor.cpu: HOST, Tensor.cuda: DEVICE}.get(func)
        kept = {key: kwargs[key] for key in ("copy", "memory_format") if key in kwargs}
        non_blocking = bool(kwargs.get("non_blocking", False))
        if func is Tensor.to:
            others = {key: value for key, value in kwargs.items() if key not in kept}
            if len(args) > 1 and isinstance(args[1], Tensor):
                target = args[1].device
                rest = [args[1].dtype]
            else:
                target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **others)
                rest = [] if dtype is None else [dtype]
        was = isinstance(tensor, _Claiming)
        if target is not None and target.type == "meta":
            return _bare(tensor).to("meta")
        now = was if target is None or _of_an_optimizer() else target.type == "cuda"
        with torch._C.DisableTorchFunctionSubclass():
            bare = _bare(tensor)
            out = bare.to(*rest, **kept) if rest or kept else bare
            if was != now and out.data_ptr() == bare.data_ptr():
                out = out.clone()
        if was != now:
            if was or not (non_blocking and _pinned(tensor)):
                self._wait("read" if was else "upload")
        elif out.data_ptr() == bare.data_ptr() and out.dtype == bare.dtype:
            return tensor
        return _claim(out) if now else out

    # autograd's engine takes bare tensors; what it runs goes through the mode again

    @contextlib.contextmanager
    def _engine(self) -> Iterator[None]:
        before = self.in_engine
        self.in_engine = True
        try:
            yield
        finally:
            self.in_engine = before

    def _backward(self, tensor: Tensor, gradient: Tensor | None = None, *_: Any, **__: Any) -> None:
        self._run((tensor,), gradient, False, False, (), accumulate_grad=True)

    def _grad(
        self, outputs, inputs, grad_outputs=None, retain_graph=None, create_graph=False, *_, **rest
    ) -> tuple:
        outputs, inputs = _tuples(outputs, inputs)
        gradients = self._run(outputs, grad_outputs, bool(retain_graph), create_graph, inputs)
        # of an edge of the graph: where the outputs are
        of = [i if isinstance(i, Tensor) else outputs[0] for i in inputs]
        return tuple(
            _claim(g) if g is not None and isinstance(i, _Claiming) else g
            for g, i in zip(gradients, of)
        )

    def _run(self, outputs: Any, starts: Any, *extra: Any, accumulate_grad: bool = False) -> Any:
        outputs, starts = _tuples(outputs, starts)
        pairs = zip(outputs, starts * len(outputs) if len(starts) == 1 else starts)
        begin = tuple(torch.ones_like(_bare(o)) if g is None else _bare(g) for o, g in pairs)
        with _Mode(self), self._engine():
            return torch.autograd.graph._engine_run_backward(
                outputs, begin, *extra, allow_unreachable=True, accumulate_grad=accumulate_grad
            )


def _tuples(*values: Any) -> Iterator[tuple]:
    return (tuple(x) if isinstance(x, list | tuple) else (x,) for x in values)


class _Mode(TorchFunctionMode):
    def __init__(self, emulation: _Emulation) -> None:
        super().__init__()
        self.emulation = emulation

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.emulation.call(func, args, dict(kwargs or {}))


class _Launches(TorchDispatchMode):
    def __init__(self, emulation: _Emulation) -> None:
        super().__init__()
        self.emulation = emulation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.emulation.launched(func)
        return func(*args, **(kwargs or {}))


class _Event:
    """Of a device on which everything is done at once; a stream too."""

    log: ClassVar[list[tuple[str, Any, Any]]] = []  # what streams were asked for

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: _Event) -> None:
        self.log.append(("wait_stream", self, other))

    def wait_event(self, event: _Event) -> None:
        self.log.append(("wait_event", self, event))

    def record_event(self) -> _Event:
        event = _Event()
        self.log.append(("record_event", self, event))
        return event

    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


def _grouped(lists: list[list[Tensor]], with_indices: bool = False) -> dict:
    """torch's, which sees the CPU and is not in Python; all tensors are of one type."""
    first = lists[0][0]
    return {(first.device, first.dtype): (lists, list(range(len(lists[0]))))}


def _apply_marked(
    module: nn.Module, function: Any, *args: Any, original: Any, **kwargs: Any
) -> nn.Module:
    """`nn.Module._apply` keeps a parameter's object, whose class says where it is."""
    done = original(module, function, *args, **kwargs)
    try:
        after = {False: function(torch.zeros(2)), True: function(_claim(torch.zeros(2)))}
    except Exception:
        return done
    for parameter in module.parameters():
        was = isinstance(parameter, _Claiming)
        if parameter.device.type != "meta" and isinstance(after[was], _Claiming) != was:
            parameter.__class__ = nn.Parameter if was else _ClaimingParameter
    return done


class _Streams:
    """The stream in use, and others beside it."""

    def __init__(self) -> None:
        self.main = _Event()
        self.current = self.main

    def current_stream(self, device: Any = None) -> _Event:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: _Event) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def claimed_gpu(patch: Any) -> Iterator[_Emulation]:
    """The emulation, until the block ends. `patch`: pytest's monkeypatch."""
    _Emulation.current = emulation = _Emulation()
    original = nn.Module._apply
    patch.setattr(
        nn.Module, "_apply", lambda m, f, *a, **k: _apply_marked(m, f, *a, original=original, **k)
    )
    emulation.streams = _Streams()
    patch.setattr(_Event, "log", [])
    patch.setattr(
        Tensor, "record_stream", lambda t, stream: _Event.log.append(("record_stream", stream, t))
    )
    cuda = {
        "Event": _Event,
        "Stream": _Event,
        "current_stream": emulation.streams.current_stream,
        "stream": emulation.streams.stream,
        "device_count": lambda *a: 1,
        "mem_get_info": lambda *a: (1 << 40, 1 << 40),
        "get_rng_state": lambda *a: torch.get_rng_state(),
        "get_device_name": lambda *a: "a device that is not there",
        "is_bf16_supported": lambda *a, **k: True,
        "get_device_capability": lambda *a: (9, 0),
    }
    cuda |= dict.fromkeys(("max_memory_allocated", "memory_allocated"), lambda *a: 0)
    silent = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state")
    cuda |= dict.fromkeys((*silent, "ipc_collect"), lambda *a: None)
    for name, stub in cuda.items():
        patch.setattr(torch.cuda, name, stub)
    autocast = torch.amp.autocast_mode.autocast
    generator = torch.Generator
    enter = autocast.__init__
    enabled = torch.is_autocast_enabled
    on_cpu = lambda self, device_type, *a, **k: enter(self, "cpu", *a, **k)
    patch.setattr(autocast, "__init__", on_cpu)
    patch.setattr(torch, "is_autocast_enabled", lambda *_: enabled("cpu"))
    plain = {"__new__": lambda cls, device=None: generator()}
    patch.setattr(torch, "Generator", type("Generator", (), plain))
    patch.setattr(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", _grouped)
    known = torch.utils._foreach_utils._foreach_supported_types
    claiming = [*known, _Claiming, _ClaimingParameter]
    patch.setattr(torch.utils._foreach_utils, "_foreach_supported_types", claiming)
    # the claimed device is lost among what is saved
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    patch.setitem(checks, "default", lambda tensor: None)
    with _Mode(emulation):
        yield emulation
