"""How large the tensors were that a computation made, and how large all of them together."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returned, backward included; views that
    repeat their elements do not count."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and 0 not in t.stride()]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        return out


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within it took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}  # bytes, by storage
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            key = storage_of(tensor)
            if key not in inputs and key not in self.live:
                storage = tensor.untyped_storage()
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key)
        self.bytes = max(self.bytes, sum(self.live.values()))
        return out


class Saved(saved_tensors_hooks):
    """The bytes of the tensors that the forward passes within it keep for their backward pass,
    except those at the addresses `known`."""

    def __init__(self, known: set[int]) -> None:
        self.kept: dict[int, Tensor] = {}
        self.known = known
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.kept[storage.data_ptr()] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        """Each storage once."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
