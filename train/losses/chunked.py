"""The chunked objective: logits, loss, metrics and gradients of one chunk of rows at a time.

A chunk's rows go through the heads together: it is as large as moving the heads' weights and their
gradients asks for. Its logits are scored, and overwritten by their gradient, a block of rows at a
time: what is float32 is one block. Callers use `objective.py`. Recipes, families, target
architectures and optimizers do not belong here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from draftsmith.speculators.precision import on_host, to_device
from draftsmith.train.losses.divergences import Mix, Rows, dot, has_closed_form, value_and_gradient

Head = Callable[[Tensor], Tensor]


class Sizes(NamedTuple):
    """How much of a walk is computed at once on a kind of device."""

    # Rows of a chunk: fewer, and reading the head's weights and adding up their gradient is no
    # longer small beside the products, which do more operations per byte on a GPU.
    rows: int
    bytes: int  # of a chunk's logits in float32, at most ...
    fewest: int  # ... unless it has no more rows than these
    block_bytes: int  # of a block's float32 logits: per thread of a CPU, they stay in its cache


SIZES = {
    "cpu": Sizes(rows=512, bytes=96 << 20, fewest=128, block_bytes=2 << 20),
    "cuda": Sizes(rows=2048, bytes=5 << 28, fewest=512, block_bytes=128 << 20),
}

SLAB = 512  # rows of a weight's gradient that are added at once: adding another dtype makes a copy


@dataclass(frozen=True)
class Task:
    """The constants of one call."""

    head: Head
    target_hidden: Tensor  # [M, H], read through target_index
    target_index: Tensor  # [N]
    target_logits: Head
    weight: Tensor  # [N]
    labels: Tensor  # [N], in the draft vocabulary, -1 outside
    mix: Mix
    draft_to_target: Tensor | None  # [Vd]
    chunk_size: int  # rows
    block_size: int  # rows


@dataclass(frozen=True)
class Group:
    """Rows first, first + 1, ... of a walk: `count` times `shared` rows with the same target."""

    first: int
    count: int
    shared: int

    @property
    def rows(self) -> int:
        """Rows of the group, of all of its targets."""
        return self.count * self.shared

    def targets(self) -> slice:
        """A row of each target."""
        return slice(self.first, self.first + self.rows, self.shared)

    def split(self, rows: int) -> Iterator[Group]:
        """Groups of at most `rows` rows, but of one target at least."""
        step = max(1, rows // self.shared)
        for start in range(0, self.count, step):
            count = min(step, self.count - start)
            yield Group(self.first + start * self.shared, count, self.shared)


@dataclass(frozen=True)
class Target:
    """The target's distributions of `count` positions, over the draft vocabulary."""

    p: Tensor  # [count, 1, Vd]
    p_log_p: Tensor  # [count, 1] sum p log p
    mass: Tensor  # [count, 1] sum p
    best: Tensor  # [count, 1] argmax over the full vocabulary


def default_chunk_size(vocabulary: int, device: torch.device) -> int:
    """Rows per chunk."""
    sizes = SIZES.get(device.type, SIZES["cuda"])
    rows = min(sizes.rows, max(sizes.fewest, sizes.bytes // (4 * vocabulary)))
    return max(rows, default_block_size(vocabulary, device))


def default_block_size(vocabulary: int, device: torch.device) -> int:
    """Rows per block."""
    sizes = SIZES.get(device.type, SIZES["cuda"])
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return max(1, threads * sizes.block_bytes // (4 * vocabulary))


def walk_order(target_index: Tensor, most: int) -> tuple[Tensor, list[Group]]:
    """(the order of the walk [N], its groups), on the host: rows that share a target become
    neighbours, in runs of at most `most`; runs of one length are a group. Waits for the device if
    the host does not know `target_index`."""
    ordered, order = torch.sort(on_host(target_index), stable=True)
    counts = torch.unique_consecutive(ordered, return_counts=True)[1]
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    run = (rank % most == 0).cumsum(0) - 1  # [N]
    shared = torch.bincount(run)[run]  # [N] rows of each row's run
    order = order[torch.sort(shared, stable=True).indices]
    groups, first = [], 0
    for size, rows in zip(*(x.tolist() for x in torch.unique(shared, return_counts=True))):
        groups.append(Group(first, rows // size, size))
        first += rows
    return order, groups


def in_chunks(groups: Sequence[Group], rows: int, block: int) -> Iterator[list[Group]]:
    """The groups split into blocks of at most `block` rows, as many in a chunk as fit `rows`."""
    chunk: list[Group] = []
    size = 0
    for piece in (piece for group in groups for piece in group.split(block)):
        if chunk and size + piece.rows > rows:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += piece.rows
    if chunk:
        yield chunk


class Chunked(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk; backward scales them."""

    @override
    @staticmethod
    def forward(ctx, hidden: Tensor, task: Task, *parameters: Tensor):
        rows, ctx.grad_hidden, ctx.grad_parameters = walk(
            task, hidden, parameters, hidden.requires_grad
        )
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        ctx.mark_non_differentiable(*rows)
        return rows[0].sum(), *rows

    @override
    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):
        if ctx.grad_parameters is None:
            raise RuntimeError(
                "chunked_objective: backward ran a second time; call the objective again"
            )
        grad_hidden = None if ctx.grad_hidden is None else ctx.grad_hidden.mul_(grad)
        pairs = zip(ctx.grad_parameters, ctx.dtypes, strict=True)
        grad_parameters = [buffer.mul_(grad).to(dtype) for buffer, dtype in pairs]
        ctx.grad_hidden = ctx.grad_parameters = (
            None  # autograd owns them now, and need not copy them
        )
        return grad_hidden, None, *grad_parameters


def walk(
    task: Task, hidden: Tensor, parameters: Sequence[Tensor], needs_hidden: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, list[Tensor]]:
    """((loss, alpha, agreement) [N], gradient of hidden [N, D] or None, those of parameters)."""
    device, exact = hidden.device, precise(hidden.dtype)
    host_order, groups = walk_order(task.target_index, task.chunk_size)
    order = to_device(host_order, device)
    index, weight, labels = (x[order] for x in (task.target_index, task.weight, task.labels))
    measured = [torch.empty(len(order), dtype=d, device=device) for d in (exact, exact, torch.bool)]
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    sums = {p: torch.zeros_like(p, dtype=precise(p.dtype)) for p in parameters}
    trains = needs_hidden or bool(parameters)
    first = 0
    for chunk in in_chunks(groups, task.chunk_size, task.block_size):
        rows = order[first : first + sum(block.rows for block in chunk)]
        matched = torch.cat([index[block.targets()] for block in chunk])
        states = hidden[rows].detach().requires_grad_(needs_hidden)
        with torch.no_grad():
            target_logits = task.target_logits(task.target_hidden[matched])  # [u, V]
        with torch.set_grad_enabled(trains):
            logits = task.head(states)  # [n, Vd]
        values = logits.detach()
        # into the logits' own memory, unless their backward pass reads it
        read = logits._base is not None or hasattr(logits.grad_fn, "_saved_result")
        grad = (torch.empty_like(values) if read else values) if trains else None
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            past = 0
            for block in chunk:
                start, shape = block.first - first, (block.count, block.shared)
                place = slice(block.first, block.first + block.rows)
                results = score(
                    task,
                    values[start : start + block.rows].unflatten(0, shape),
                    weight[place].view(shape),
                    labels[place].view(shape),
                    target_of(task, target_logits[past : past + block.count]),
                    None if grad is None else grad[start : start + block.rows].unflatten(0, shape),
                )
                past += block.count
                for whole, part in zip(measured, results, strict=True):
                    whole[place] = part.flatten()
        first += len(rows)
        if grad is None:
            continue
        edges = leaves(logits)
        grads = list(torch.autograd.grad(logits, list(edges), grad))
        del target_logits, logits, values, grad
        for leaf in reversed(edges.values()):
            part = grads.pop()  # freed as soon as it is added
            if leaf is states and grad_hidden is not None:
                grad_hidden.index_add_(0, rows, part.to(grad_hidden.dtype))
            else:
                pair = (torch.atleast_1d(x).split(SLAB) for x in (sums[leaf], part))
                for total, more in zip(*pair):
                    total.add_(more)
    loss, alpha, agreement = (torch.empty_like(x).index_copy_(0, order, x) for x in measured)
    return (loss, alpha, agreement), grad_hidden, list(sums.values())


def score(
    task: Task, logits: Tensor, weight: Tensor, labels: Tensor, target: Target, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight * D, alpha, agreement), each [g, m], of m rows for each of g targets; into `grad`,
    which may be `logits`: d sum(weight * D) / d logits [g, m, Vd]. weight, labels [g, m]."""
    z = logits.to(precise(logits.dtype))
    best = argmax(z)  # [g, m, 1]
    agreement = to_target(best[..., 0], task.draft_to_target) == target.best
    if has_closed_form(task.mix):
        q = torch.softmax(z, dim=-1)
        least = torch.minimum(target.p, q)
        alpha = least.sum(-1)
        # at the largest logit q never underflows
        log_z = (z.gather(-1, best) - q.gather(-1, best).log())[..., 0]
        rows = Rows(z, target.p, target.p_log_p, target.mass, log_z, alpha, labels)
        scratch = None if grad is None else least
        value, gradient = value_and_gradient(task.mix, rows, q, weight, scratch)
        if grad is not None and gradient is not None:
            grad.copy_(gradient)
        return weight * value, alpha, agreement
    with torch.set_grad_enabled(grad is not None):
        z = z.detach().requires_grad_(grad is not None)
        log_q = torch.log_softmax(z, dim=-1)
        p = target.p.expand_as(z).flatten(0, 1)
        value = weight * task.mix(log_q.flatten(0, 1), p, labels.flatten()).view_as(weight)
    alpha = torch.minimum(target.p, log_q.detach().exp()).sum(-1)
    if grad is not None:
        grad.copy_(torch.autograd.grad(value, z, torch.ones_like(value))[0])
    return value.detach(), alpha, agreement


def target_of(task: Task, logits: Tensor) -> Target:
    """The target's distributions from its logits [u, V]. Call it under no_grad."""
    with torch.autocast(logits.device.type, enabled=False):
        # of a token masked with -inf, 0 * -inf is nan
        z = logits.to(precise(logits.dtype)).clamp_min(-1e30)
        best = argmax(z)
        p = torch.softmax(z, dim=-1)
        log_z = z.gather(-1, best) - p.gather(-1, best).log()  # [u, 1], logsumexp(z)
        if task.draft_to_target is not None:
            p, z = (x.index_select(-1, task.draft_to_target) for x in (p, z))
        p, mass = p[:, None], p.sum(-1, keepdim=True)
        return Target(p, dot(p, z[:, None]) - mass * log_z, mass, best)


def probe(head: Head, hidden: Tensor) -> tuple[list[Tensor], int]:
    """The trainable tensors that the head uses, by the graph of one row, and its vocabulary size.

    Reading the graph means that no parameter can be forgotten, and that a head may be a bound
    method or a closure."""
    logits = head(hidden[:1].detach())
    return list(dict.fromkeys(leaves(logits).values())), logits.shape[-1]


def leaves(logits: Tensor) -> dict[GradientEdge, Tensor]:
    """The trainable tensors in the graph of `logits`, by the edge that their gradient is read at:
    in front of a cast, whose backward pass would make a copy in the tensor's dtype."""
    found: dict[GradientEdge, Tensor] = {}
    seen, queue = set[Any](), [logits.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for parent, _ in node.next_functions:
            if parent is not None and hasattr(parent, "variable"):
                edge = GradientEdge(node if node.name() == "ToCopyBackward0" else parent, 0)
                found[edge] = parent.variable
            queue.append(parent)
    return found


def argmax(z: Tensor, block: int = 64) -> Tensor:
    """z.argmax(-1, keepdim=True), the first of equals; by block maxima, which a CPU vectorises."""
    if z.shape[-1] % block:
        return z.argmax(-1, keepdim=True)
    blocks = z.unflatten(-1, (-1, block))
    first = blocks.amax(-1).argmax(-1, keepdim=True)
    within = torch.take_along_dim(blocks, first[..., None], -2).argmax(-1)
    return first * block + within


def to_target(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Ids of the draft vocabulary -> the target's; `draft_to_target` [V_draft], None: the same."""
    return draft_ids if draft_to_target is None else draft_to_target[draft_ids]


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
