"""The chunked objective: logits, loss, metrics and gradients of one chunk of rows at a time.

Callers use `train.losses.objective`. Recipes, families, target architectures and optimizers do not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses.divergences import Mix, has_closed_form, value_and_gradient

Head = Callable[[Tensor], Tensor]

# Bytes of one chunk's float32 logits: on a CPU they stay in its cache.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
# Rows: in smaller chunks, reading the head's weights and adding their gradient takes most of the time.
SMALLEST_CHUNK = {"cpu": 128, "cuda": 256}


@dataclass(frozen=True)
class Task:
    """The constants of one call."""

    head: Head
    target_hidden: Tensor  # [N, H], or [M, H] read through target_index
    target_index: Tensor | None  # [N]
    target_logits: Head
    weight: Tensor  # [N]
    labels: Tensor  # [N], in the draft vocabulary, -1 outside
    mix: Mix
    draft_to_target: Tensor | None  # [Vd]
    temperature: float
    chunk_size: int = 0

    def chunks(self) -> Iterator[tuple[Tensor | slice, Tensor | slice, Tensor | None]]:
        """(rows of this chunk, their distinct target positions, for each row which of those positions)."""
        count = self.weight.shape[0]
        if self.target_index is None:
            for start in range(0, count, self.chunk_size):
                rows = slice(start, min(start + self.chunk_size, count))
                yield rows, rows, None
            return
        order = torch.argsort(self.target_index, stable=True)  # rows that share a target become neighbours
        for rows in order.split(self.chunk_size):
            positions, inverse = torch.unique_consecutive(self.target_index[rows], return_inverse=True)
            yield rows, positions, inverse


def default_chunk_size(vocabulary: int, device: torch.device) -> int:
    """Rows per chunk, from the size of one chunk's float32 logits."""
    kind = device.type if device.type in CHUNK_BYTES else "cuda"
    return max(SMALLEST_CHUNK[kind], CHUNK_BYTES[kind] // (4 * vocabulary))


class Chunked(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk; backward scales them by the gradient of the sum."""

    @staticmethod
    def forward(ctx, hidden: Tensor, task: Task, *parameters: Tensor):
        rows, ctx.grad_hidden, ctx.grad_parameters = walk(task, hidden, parameters, hidden.requires_grad)
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        ctx.mark_non_differentiable(*rows)
        return rows[0].sum(), *rows

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):
        if ctx.grad_parameters is None:
            raise RuntimeError("chunked_objective: backward ran a second time; call the objective again")
        grad_hidden = None if ctx.grad_hidden is None else ctx.grad_hidden.mul_(grad)
        pairs = zip(ctx.grad_parameters, ctx.dtypes, strict=True)
        grad_parameters = [buffer.mul_(grad).to(dtype) for buffer, dtype in pairs]
        ctx.grad_hidden = ctx.grad_parameters = None  # autograd owns them now, and need not copy them
        return grad_hidden, None, *grad_parameters


def walk(
    task: Task, hidden: Tensor, parameters: Sequence[Tensor], needs_hidden: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, list[Tensor]]:
    """((loss, alpha, agreement) [N], gradient of hidden [N, D] or None, float32 gradients of parameters)."""
    count, exact = hidden.shape[0], precise(hidden.dtype)
    loss, alpha = (torch.empty(count, dtype=exact, device=hidden.device) for _ in range(2))
    agreement = torch.empty(count, dtype=torch.bool, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_parameters = [torch.zeros_like(weight, dtype=precise(weight.dtype)) for weight in parameters]
    want = needs_hidden or bool(parameters)
    for rows, positions, inverse in task.chunks():
        with torch.no_grad():
            target = target_rows(task, positions, inverse)
        states = hidden[rows].detach().requires_grad_(needs_hidden)
        with torch.set_grad_enabled(want):
            logits = task.head(states)  # [n, Vd]
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            *measured, grad = score(task, rows, logits.detach(), *target, want)
        loss[rows], alpha[rows], agreement[rows] = measured
        del target
        if not want:
            continue
        inputs = [states, *parameters] if needs_hidden else list(parameters)
        grads = list(torch.autograd.grad(logits, inputs, grad))
        del logits, grad
        if grad_hidden is not None:
            grad_hidden[rows] = grads.pop(0)
        for buffer in reversed(grad_parameters):
            buffer.add_(grads.pop())  # popped: freed as soon as it is added
    return (loss, alpha, agreement), grad_hidden, grad_parameters


def score(
    task: Task, rows: Tensor | slice, logits: Tensor, p: Tensor, p_log_p: Tensor, best: Tensor, want: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(weight * D [n], alpha [n], agreement [n], and if `want` d sum(weight * D) / d logits [n, Vd])."""
    weight, labels = task.weight[rows], task.labels[rows]
    z = scaled(logits, task.temperature)
    agreement = to_target(argmax(z), task.draft_to_target) == best
    if has_closed_form(task.mix):
        q = torch.softmax(z, dim=-1)
        alpha = torch.minimum(p, q).sum(-1)
        found = value_and_gradient(task.mix, z, q, p, p_log_p, alpha, labels, weight / task.temperature)
        if found is not None:
            value, grad = found
            return weight * value, alpha, agreement, grad.to(logits.dtype) if want else None
    with torch.set_grad_enabled(want):
        log_q = torch.log_softmax(z.requires_grad_(want), dim=-1)
        value = weight * task.mix(log_q, p, labels)
    alpha = torch.minimum(p, log_q.detach().exp()).sum(-1)
    if not want:
        return value, alpha, agreement, None
    grad = torch.autograd.grad(value, z, torch.ones_like(value))[0].div_(task.temperature)
    return value.detach(), alpha, agreement, grad.to(logits.dtype)


def target_rows(task: Task, positions: Tensor | slice, inverse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(p [n, Vd] over the draft vocabulary, sum p log p [n], argmax over the full vocabulary [n]).

    Call it under no_grad. positions [u] index target_hidden; inverse [n] spreads them over the rows.
    """
    logits = task.target_logits(task.target_hidden[positions])  # [u, V]
    with torch.autocast(logits.device.type, enabled=False):
        z = scaled(logits, task.temperature).clamp_min(-1e30)  # of a token masked with -inf, 0 * -inf is nan
        del logits
        p, best = torch.softmax(z, dim=-1), argmax(z)
        log_z = z.amax(-1) - p.amax(-1).log()  # [u], logsumexp(z)
        if task.draft_to_target is not None:
            p, z = p.index_select(-1, task.draft_to_target), z.index_select(-1, task.draft_to_target)
        p_log_p = torch.linalg.vecdot(p, z) - p.sum(-1) * log_z
    if inverse is None:
        return p, p_log_p, best
    return p.index_select(0, inverse), p_log_p[inverse], best[inverse]


def probe(head: Head, hidden: Tensor) -> tuple[list[Tensor], int]:
    """The trainable tensors that the head uses, from the autograd graph of one row, and its vocabulary size.

    Reading the graph means that no parameter can be forgotten, and that a head may be a bound method or a closure.
    """
    logits = head(hidden[:1].detach())
    found, seen, queue = [], set(), [logits.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue.extend(parent for parent, _ in node.next_functions)
    return found, logits.shape[-1]


def to_target(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    return draft_ids if draft_to_target is None else draft_to_target[draft_ids]


def argmax(z: Tensor, block: int = 64) -> Tensor:
    """z.argmax(-1), the first of equals [n]; on a CPU by way of block maxima, which are vectorised."""
    if z.device.type != "cpu" or z.shape[-1] % block:
        return z.argmax(-1)
    blocks = z.reshape(z.shape[0], -1, block)
    first = blocks.amax(-1).argmax(-1)  # [n], the first block that holds the maximum
    return first * block + blocks[torch.arange(z.shape[0]), first].argmax(-1)


def precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_float(x: Tensor) -> Tensor:
    return x.to(precise(x.dtype))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature in float32 (float64 stays)."""
    z = in_float(logits)
    return z if temperature == 1.0 else z / temperature
