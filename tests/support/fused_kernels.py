"""In place of a GPU's kernels. Attention on the emulated device: all scores in memory, counted as
the launches that they stand for. The parts that torch.compile makes kernels of: traced on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._pytree import tree_flatten, tree_unflatten

from draftsmith.speculators import kernels
from draftsmith.speculators.layers import flex_attention
from draftsmith.train.losses import chunked
from tests.support.attention_cases import visible


def stand_in_for_attention(emulation: Any, patch: Any) -> None:
    """Heads attend as by flex_attention. `emulation`: of tests/support/device_emulation.py, as the
    fixture `claimed_gpu` gives it; `patch`: pytest's monkeypatch."""

    def block_mask(queries: Any) -> Tensor:
        if queries not in masks:
            with emulation.one_launch("block_mask"):
                masks[queries] = visible(queries)[:, None]
        return masks[queries]

    masks = dict[Any, Tensor]()
    attend = partial(_Dense.apply, emulation)
    merged = partial(flex_attention.merged_attention, attend=attend)
    patch.setattr(flex_attention, "serves", lambda query, value: True)
    patch.setattr(flex_attention, "block_mask", block_mask)
    patch.setattr(flex_attention, "merged_attention", merged)


# That torch's compiler writes for a CPU, and products of matrices: of a block of rows with the loss
# forward_kl; of a layer of EAGLE-3 before and after its attention, forward and backward.
KERNELS = {"score": 15, "before": 30 + 9, "after": 15 + 12}


def stand_in_for_compilers(emulation: Any, patch: Any) -> None:
    """The objective and layers run eager, and count as the kernels of KERNELS."""

    def compiled(part: str, function: Any) -> Any:
        return score if part == "objective" else partial(_of_layers, emulation, function)

    def score(*arguments: Any) -> Any:
        with emulation.one_launch("score", KERNELS["score"]):
            return chunked.score(*arguments)

    patch.setattr(kernels, "LEAST_NUMBERS", 0)
    patch.setattr(kernels, "serves", lambda part, device: True)
    patch.setattr(kernels, "compiled", compiled)


def _of_layers(emulation: Any, function: Any, layer: Any, *arguments: Any) -> Any:
    inputs, structure = tree_flatten(arguments)
    parameters = list(layer.parameters())

    def work(values: Sequence[Any]) -> Any:
        return function(layer, *tree_unflatten(list(values), structure))

    return _Counted.apply(emulation, function.__name__, work, len(inputs), *inputs, *parameters)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, emulation: Any, name: str, work: Any, count: int, *tensors: Any) -> Any:
        ctx.emulation = emulation
        ctx.name = name
        ctx.work = work
        ctx.count = count
        ctx.tensors = tensors
        with emulation.one_launch(name, KERNELS[name]):
            return work(tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        trained = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        leaves = list(ctx.tensors)
        with ctx.emulation.one_launch(ctx.name, 0), torch.enable_grad():
            for i in trained:
                if i < ctx.count:
                    leaves[i] = leaves[i].detach().requires_grad_()
            results = ctx.work(leaves[: ctx.count])
            results = results if isinstance(results, tuple) else (results,)
            pairs = [pair for pair in zip(results, gradients) if pair[0].requires_grad]
            outputs, starts = zip(*pairs, strict=True)
            wanted = [leaves[i] for i in trained]
            grads = torch.autograd.grad(outputs, wanted, starts, allow_unused=True)
        of_inputs = dict(zip(trained, grads, strict=True))
        return None, None, None, None, *(of_inputs.get(i) for i in range(len(leaves)))


@contextmanager
def compiled_on_a_cpu(
    patch: Any, backend: str = "aot_eager", parts: Sequence[str] = ("objective", "layers")
) -> Iterator[list[Any]]:
    """The parts run compiled inside; the graphs that are made of them, in their order."""
    graphs = list[Any]()
    compiler = lookup_backend(backend)

    def compile_kept(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return compiler(graph, inputs, **options)

    torch._dynamo.reset()
    with patch.context() as inside:
        inside.setattr(kernels, "LEAST_NUMBERS", 0)
        inside.setattr(kernels, "serves", lambda part, device: part in parts)
        inside.setattr(torch, "compile", partial(torch.compile, backend=compile_kept))
        kernels.compiled.cache_clear()
        yield graphs
    kernels.compiled.cache_clear()


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, emulation: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        *inputs, seen, scale = tensors
        ctx.save_for_backward(*inputs, seen)
        ctx.emulation = emulation
        ctx.scale = scale
        with emulation.one_launch("flex_attention"):
            return _dense(*inputs, seen, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *inputs, seen = ctx.saved_tensors
        # delta, and the gradients of query, key and value
        with ctx.emulation.one_launch("flex_attention_delta"):
            inputs = [x.detach().requires_grad_() for x in inputs]
        with ctx.emulation.one_launch("flex_attention_backward"), torch.enable_grad():
            results = _dense(*inputs, seen, ctx.scale)
            grads: Sequence[Tensor] = torch.autograd.grad(results, inputs, gradients)
        return None, *grads, None, None


def _dense(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen, -1e30)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
