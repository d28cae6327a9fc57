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

from draftsmith.speculators import kernels
from draftsmith.speculators.precision import on_host, to_device
from draftsmith.train.losses.divergences import (
    LogitRows,
    Mix,
    dot,
    has_closed_form,
    value_and_gradient,
)

Head = Callable[[Tensor], Tensor]


class Sizes(NamedTuple):
    """How much of a walk is computed at once on a kind of device."""

    # Rows of a chunk: fewer, and reading the head's weights and adding up their gradient is no
    # longer small beside the products, which do more operations per byte on a GPU.
    rows: int
    # Of a chunk's logits in float32, at most, unless it has no more rows than `fewest`.
    bytes: int
    fewest: int
    # Of a block's float32 logits. On a CPU per thread: they stay in its cache.
    block_bytes: int


SIZES = {
    "cpu": Sizes(rows=512, bytes=96 << 20, fewest=128, block_bytes=2 << 20),
    "cuda": Sizes(rows=2048, bytes=5 << 28, fewest=512, block_bytes=128 << 20),
}

ARGMAX_BLOCK = 64  # logits of which `argmax` takes the maximum at once
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
    # rows of each target, and which of its target's rows a row is
    counts = torch.unique_consecutive(ordered, return_counts=True)[1]
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    run = (rank % most == 0).cumsum(0) - 1  # [N]
    shared = torch.bincount(run)[run]  # [N] rows of each row's run
    order = order[torch.sort(shared, stable=True).indices]
    sizes, rows_of_size = torch.unique(shared, return_counts=True)
    groups = []
    first = 0
    for size, rows in zip(sizes.tolist(), rows_of_size.tolist()):
        groups.append(Group(first, rows // size, size))
        first += rows
    return order, groups


def in_chunks(groups: Sequence[Group], rows: int, block: int) -> Iterator[list[Group]]:
    """The groups split into blocks of at most `block` rows, as many in a chunk as fit `rows`."""
    chunk: list[Group] = []
    size = 0
    for group in groups:
        for piece in group.split(block):
            if chunk and size + piece.rows > rows:
                yield chunk
                chunk = []
                size = 0
            chunk.append(piece)
            size += piece.rows
    if chunk:
        yield chunk


class Chunked(torch.autograd.Function):
    """The sum of the losses [], and loss, alpha and agreement [N], which have no gradient.

    Forward computes the gradients too, chunk by chunk, since a chunk's logits are gone after it:
    those of `hidden` and of the parameters are what it saves. Backward gets the derivative of the
    caller's loss by the sum, a number, and multiplies them by it where they lie. A second backward
    would multiply twice, and is refused."""

    @override
    @staticmethod
    def forward(ctx, hidden: Tensor, task: Task, *parameters: Tensor):
        measures, ctx.grad_hidden, ctx.grad_parameters = walk(
            task, hidden, parameters, hidden.requires_grad
        )
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        ctx.mark_non_differentiable(*measures)
        loss, alpha, agreement = measures
        return loss.sum(), loss, alpha, agreement

    @override
    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):
        if ctx.grad_parameters is None:
            raise RuntimeError(
                "chunked_objective: backward ran a second time; call the objective again"
            )
        grad_hidden = None if ctx.grad_hidden is None else ctx.grad_hidden.mul_(grad)
        grad_parameters = [
            total.mul_(grad).to(dtype)
            for total, dtype in zip(ctx.grad_parameters, ctx.dtypes, strict=True)
        ]
        # autograd owns them now, and need not copy them
        ctx.grad_hidden = None
        ctx.grad_parameters = None
        return grad_hidden, None, *grad_parameters


@dataclass(frozen=True)
class RowsInOrder:
    """The rows of a call in the order of the walk, on its device."""

    order: Tensor  # [N] the row of the caller that stands at each place of the walk
    target_index: Tensor  # [N]
    weight: Tensor  # [N]
    labels: Tensor  # [N]

    @classmethod
    def of(cls, task: Task, order: Tensor) -> RowsInOrder:
        """Those of a task, in an order [N]."""
        return cls(order, task.target_index[order], task.weight[order], task.labels[order])


@dataclass(frozen=True)
class Measured:
    """What is measured of every row, in the order of the walk: filled in block by block."""

    loss: Tensor  # [N] weight * D
    alpha: Tensor  # [N]
    agreement: Tensor  # [N] bool

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> Measured:
        """For `rows` rows, without values."""
        return cls(
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=torch.bool, device=device),
        )

    def write(self, places: slice, loss: Tensor, alpha: Tensor, agreement: Tensor) -> None:
        """Those of a block, [g, m], at its places."""
        self.loss[places] = loss.flatten()
        self.alpha[places] = alpha.flatten()
        self.agreement[places] = agreement.flatten()

    def by_row(self, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, alpha, agreement) [N] in the order of the caller's rows."""
        return (
            torch.empty_like(self.loss).index_copy_(0, order, self.loss),
            torch.empty_like(self.alpha).index_copy_(0, order, self.alpha),
            torch.empty_like(self.agreement).index_copy_(0, order, self.agreement),
        )


def walk(
    task: Task, hidden: Tensor, parameters: Sequence[Tensor], needs_hidden: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, list[Tensor]]:
    """((loss, alpha, agreement) [N], gradient of hidden [N, D] or None, those of parameters).

    Four words for what is computed together:

    order   Rows that match the same target position are made neighbours (`walk_order`), and are put
            back at the end. Everything in between is in this order; a place is a number in it.
    chunk   n neighbours whose logits [n, Vd] are one product with the head's weight, and whose
            gradient goes back through the head in one backward pass. It is the unit of the heads.
    target  The u different positions that a chunk's rows match: logits [u, V], computed once.
    block   Some targets of a chunk and the rows of each, a rectangle [count, shared] of the same
            `shared`. It is scored at once, and alone is float32. It is the unit of the scores.

    The derivative of the sum over rows of weight * D is d loss / d logits, which a block knows as
    soon as it is scored, times d logits / d (states, parameters), which autograd knows of the
    head. So a chunk is finished before the next one begins: its logits, its targets and its graph
    are freed, and nothing of it is kept but its rows' measures, its states' gradient and a part of
    the sum over chunks that is a parameter's gradient. These sums are at least float32, whatever
    the dtype of the parameter: a bfloat16 sum of hundreds of parts would lose the small ones."""
    device = hidden.device
    host_order, groups = walk_order(task.target_index, task.chunk_size)
    rows = RowsInOrder.of(task, to_device(host_order, device))
    measured = Measured.empty(len(hidden), precise(hidden.dtype), device)
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    sums = {p: torch.zeros_like(p, dtype=precise(p.dtype)) for p in parameters}
    trains = needs_hidden or bool(parameters)
    for chunk in in_chunks(groups, task.chunk_size, task.block_size):
        of_chunk = rows.order[chunk[0].first : chunk[-1].first + chunk[-1].rows]
        states = hidden[of_chunk].detach().requires_grad_(needs_hidden)
        gradients = walk_chunk(task, chunk, states, rows, measured, trains)
        while gradients:
            leaf, gradient = gradients.pop()  # freed as soon as it is added
            if leaf is states and grad_hidden is not None:
                grad_hidden.index_add_(0, of_chunk, gradient.to(grad_hidden.dtype))
            else:
                add_in_slabs(sums[leaf], gradient)
    return measured.by_row(rows.order), grad_hidden, list(sums.values())


def walk_chunk(
    task: Task,
    chunk: Sequence[Group],
    states: Tensor,
    rows: RowsInOrder,
    measured: Measured,
    trains: bool,
) -> list[tuple[Tensor, Tensor]]:
    """The gradients of the trainable tensors behind a chunk's logits: (tensor, gradient), one pair
    per edge of the graph, so that a tensor may come twice. `trains` False: none.

    states [n, D]: a leaf of the graph, if the gradient of hidden is asked for. `measured` is filled
    in at the chunk's places."""
    target_logits = target_logits_of(task, chunk, rows)  # [u, V]
    with torch.set_grad_enabled(trains):
        logits = task.head(states)  # [n, Vd]
    values = logits.detach()
    gradient = None
    if trains:  # a block reads its logits before it writes its gradient, and no other reads them
        gradient = values if may_overwrite(logits) else torch.empty_like(values)
    scores = kernels.on_device("objective", score, values)
    with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
        target = 0  # of the chunk: the first of the block
        row = 0
        for block in chunk:
            shape = (block.count, block.shared)
            places = slice(block.first, block.first + block.rows)
            within = slice(row, row + block.rows)
            block_logits = values[within].unflatten(0, shape)
            block_gradient = gradient
            if gradient is values:
                block_gradient = block_logits  # one tensor: compilers refuse two of one memory
            elif gradient is not None:
                block_gradient = gradient[within].unflatten(0, shape)
            loss, alpha, agreement = scores(
                task.mix,
                task.draft_to_target,
                block_logits,
                target_logits[target : target + block.count],
                rows.weight[places].view(shape),
                rows.labels[places].view(shape),
                block_gradient,
            )
            measured.write(places, loss, alpha, agreement)
            target += block.count
            row += block.rows
    if gradient is None:
        return []
    edges = leaves(logits)
    gradients = torch.autograd.grad(logits, list(edges), gradient)
    return list(zip(edges.values(), gradients, strict=True))


def target_logits_of(task: Task, chunk: Sequence[Group], rows: RowsInOrder) -> Tensor:
    """The logits [u, V] of the targets of a chunk, one row for each, without gradient."""
    matched = torch.cat([rows.target_index[block.targets()] for block in chunk])  # [u]
    with torch.no_grad():
        return task.target_logits(task.target_hidden[matched])


def may_overwrite(logits: Tensor) -> bool:
    """Whether nobody reads the memory of `logits` once they are scored.

    Two others could. A tensor that the logits are a view of (`_base`), which the head may keep, or
    the backward pass may read. And the backward pass of the operation that computed them, if its
    derivative is written with its result, as those of softmax, tanh, sigmoid and exp are: autograd
    then keeps the result as `_saved_result` of the node. The backward pass of a matrix product, a
    sum, a product with a number, a cast or a gather reads its inputs, if anything, and the heads of
    `speculators/families` end with one of these. (A draft model's logits are the part of its
    vocabulary that the target has, a view.)

    A mistake is an error and no wrong gradient. `detach` shares the version counter, each write
    raises it, and autograd refuses a saved tensor whose version is not the one it saved; a
    `torch.autograd.Function` that saves its result, which this rule does not see, fails so."""
    reads_result = hasattr(logits.grad_fn, "_saved_result")
    return logits._base is None and not reads_result


def add_in_slabs(total: Tensor, gradient: Tensor) -> None:
    """total += gradient, of one shape [R, ...] or []; SLAB rows at a time: an addition of another
    dtype makes a copy of what it adds."""
    slabs = torch.atleast_1d(gradient).split(SLAB)
    for part, more in zip(torch.atleast_1d(total).split(SLAB), slabs, strict=True):
        part.add_(more)


def score(
    mix: Mix,
    draft_to_target: Tensor | None,
    logits: Tensor,
    target_logits: Tensor,
    weight: Tensor,
    labels: Tensor,
    grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight * D, alpha, agreement), each [g, m], of m rows for each of g targets; into `grad`,
    which may be `logits`: d sum(weight * D) / d logits [g, m, Vd]. Call it under no_grad.

    logits [g, m, Vd]; target_logits [g, V]; weight, labels [g, m]. Nothing here depends on a value
    of a tensor, so that it compiles to one graph for any g and m, without [g, m, Vd] in memory
    but `logits` and `grad`."""
    z = logits.to(precise(logits.dtype))
    target = target_of(target_logits, draft_to_target)
    best = argmax(z)  # [g, m, 1]
    agreement = to_target(best[..., 0], draft_to_target) == target.best
    if has_closed_form(mix):
        q = torch.softmax(z, dim=-1)
        least = torch.minimum(target.p, q)
        alpha = least.sum(-1)
        # at the largest logit q never underflows
        log_z = (z.gather(-1, best) - q.gather(-1, best).log())[..., 0]
        rows = LogitRows(z, target.p, target.p_log_p, target.mass, log_z, alpha, labels)
        scratch = None if grad is None else least
        value, gradient = value_and_gradient(mix, rows, q, weight, scratch)
    else:
        value, gradient, alpha = by_autograd(mix, z, target.p, weight, labels, grad is not None)
    if grad is not None and gradient is not None:
        grad.copy_(gradient)
    return weight * value, alpha, agreement


def by_autograd(
    mix: Mix, z: Tensor, p: Tensor, weight: Tensor, labels: Tensor, trains: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(D [g, m], weight * d D / dz [g, m, Vd] if `trains`, alpha [g, m]) of any mix."""

    def value_of(z: Tensor) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(z, dim=-1)
        rows = p.expand_as(z).flatten(0, 1)
        value = mix(log_q.flatten(0, 1), rows, labels.flatten()).view_as(weight)
        return value, torch.minimum(p, log_q.detach().exp()).sum(-1)

    if not trains:
        value, alpha = value_of(z)
        return value, None, alpha
    # torch.func's, since compilers do not trace torch.autograd.grad
    value, backward, alpha = torch.func.vjp(value_of, z, has_aux=True)  # type: ignore[misc]
    return value, backward(weight)[0], alpha


def target_of(logits: Tensor, draft_to_target: Tensor | None) -> Target:
    """The target's distributions from its logits [u, V]. Call it under no_grad."""
    with torch.autocast(logits.device.type, enabled=False):
        # of a token masked with -inf, 0 * -inf is nan
        z = logits.to(precise(logits.dtype)).clamp_min(-1e30)
        best = argmax(z)
        p = torch.softmax(z, dim=-1)
        log_z = z.gather(-1, best) - p.gather(-1, best).log()  # [u, 1], logsumexp(z)
        if draft_to_target is not None:
            p = p.index_select(-1, draft_to_target)
            z = z.index_select(-1, draft_to_target)
        mass = p.sum(-1, keepdim=True)
        p = p[:, None]
        # log p = z - log_z, so that sum p log p = sum p z - mass log_z
        return Target(p, dot(p, z[:, None]) - mass * log_z, mass, best)


def probe(head: Head, hidden: Tensor) -> tuple[list[Tensor], int]:
    """The trainable tensors that the head uses, by the graph of one row, and its vocabulary size.

    Reading the graph means that no parameter can be forgotten, and that a head may be a bound
    method or a closure."""
    logits = head(hidden[:1].detach())
    return list(dict.fromkeys(leaves(logits).values())), logits.shape[-1]


def leaves(logits: Tensor) -> dict[GradientEdge, Tensor]:
    """The trainable tensors in the graph of `logits`, by the edge that their gradient is read at.

    A leaf's node accumulates its gradient and has the leaf as `variable`. Autocast puts a cast
    between a float32 parameter and the product that reads it; the gradient is then read in front
    of the cast, in bfloat16, since the cast's backward pass would make a float32 copy of what is
    added to a float32 sum in any case."""
    tensors: dict[GradientEdge, Tensor] = {}
    seen = set[Any]()
    queue = [logits.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for parent, _ in node.next_functions:
            if parent is not None and hasattr(parent, "variable"):
                is_cast = node.name() == "ToCopyBackward0"
                edge = GradientEdge(node if is_cast else parent, 0)
                tensors[edge] = parent.variable
            queue.append(parent)
    return tensors


def argmax(z: Tensor) -> Tensor:
    """z.argmax(-1, keepdim=True), the first of equals; by block maxima, which a CPU vectorises."""
    if z.device.type != "cpu" or torch.compiler.is_compiling() or z.shape[-1] % ARGMAX_BLOCK:
        return z.argmax(-1, keepdim=True)
    blocks = z.unflatten(-1, (-1, ARGMAX_BLOCK))
    first = blocks.amax(-1).argmax(-1, keepdim=True)
    within = torch.take_along_dim(blocks, first[..., None], -2).argmax(-1)
    return first * ARGMAX_BLOCK + within


def to_target(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Ids of the draft vocabulary -> the target's; `draft_to_target` [V_draft], None: the same."""
    return draft_ids if draft_to_target is None else draft_to_target[draft_ids]


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
