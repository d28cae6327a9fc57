"""How large the tensors were that a computation made."""

from __future__ import annotations

from torch import Tensor
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
