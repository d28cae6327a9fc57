"""A draft chain waits for no device: between its first step and its last nothing asks the device
for a value.

There is no GPU in these tests. On the CPU a dispatch mode refuses the operators that hand a value
to the host. On the device `meta`, whose tensors have no values, the code takes its GPU paths: what
needs a value fails there by itself, and a function mode refuses what would make the host wait
though it needs none, such as a copy from ordinary memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inference import SamplingParams
from inference.requests.request import Request
from inference.sampling.sampler import make_generator
from inference.spec_decode.proposers.drafter import DraftOptions, HeadProposer
from speculators.precision import on_device
from tests.speculators.families.conftest import CASES, make

K, ROWS, LIMIT, PROMPT = 3, 3, 64, [5, 6, 7, 8, 9, 10, 11]
aten = torch.ops.aten
VALUES = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.is_nonzero.default,
    aten.equal.default,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
HOST = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.nonzero,
    Tensor.masked_select,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
}
FAMILIES = ["draft_model, cut", "eagle", "eagle3", "medusa", "mlp", "mtp"]
SAMPLING = {
    "greedy": [dict(temperature=0)] * ROWS,
    "sampled": [dict(temperature=1.0)] * ROWS,
    "one of each": [
        dict(temperature=0),
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.2, top_p=0.9, min_p=0.01),
    ],
}


class Waits(AssertionError):
    """The host would wait for the device."""


class NoValues(TorchDispatchMode):
    """Refuses operators that hand a value to the host, and indexing by a mask, whose size is
    one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in VALUES or masked:
            raise Waits(f"{func} between the steps of a chain")
        return func(*args, **(kwargs or {}))


class NoHost(TorchFunctionMode):
    """Refuses, `within` a chain, whatever would make a GPU's host wait. What asks for values
    outside gets zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.within = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.within:
            copied = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
            index = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
            parts = index if isinstance(index, tuple) else (index,)
            listed = any(
                isinstance(i, (list, bool)) or (isinstance(i, Tensor) and i.dtype == torch.bool)
                for i in parts
            )
            to_host = func is Tensor.to and any(
                str(a) == "cpu" for a in (*args[1:], *kwargs.values())
            )
            if func in HOST or copied or listed or to_host:
                raise Waits(f"{getattr(func, '__qualname__', func)} between the steps of a chain")
        elif func is Tensor.tolist:
            return torch.zeros(args[0].shape, device="cpu", dtype=args[0].dtype).tolist()
        return func(*args, **kwargs)


def requests_of(params: list[dict]) -> list[Request]:
    """Rows of different lengths whose prompt is known."""
    return [
        Request(
            str(i),
            0,
            PROMPT[: len(PROMPT) - i],
            SamplingParams(seed=i, **each),
            generator=make_generator(i),
            max_model_len=LIMIT,
        )
        for i, each in enumerate(params)
    ]


def drafting(case, model, device: str) -> tuple[HeadProposer, list[int]]:
    """A proposer, its target and drafter on `device`, and the widths of taps and last_hidden."""
    target, drafter = make(case, model)
    if device == "meta":
        if case.family == "draft_model":
            drafter.runner.to("meta")  # not the drafter itself, which would make its runner anew
        else:
            drafter.to("meta")
        target.to("meta")
    proposer = HeadProposer(
        drafter.freeze(), target, DraftOptions(num_speculative_tokens=K), ROWS, LIMIT
    )
    return proposer, [len(target.tap_layers) * target.hidden_size, target.hidden_size]


def two_rounds(
    proposer: HeadProposer, widths: list[int], params: list[dict], device: str, guard
) -> None:
    """Prefill, then two chains: after one token for each row, and after 1, 2 and 3 of them.
    `guard(draft)` wraps the drafting of a chain."""
    requests = requests_of(params)

    def features(slots: int) -> list[Tensor | None]:
        found = [
            torch.randn(ROWS, slots, width, device=device) if width else None for width in widths
        ]
        return found

    with torch.inference_mode():
        proposer.prefill(
            0, requests, [request.num_prompt_tokens for request in requests], *features(len(PROMPT))
        )
        proposer._draft_chain = guard(proposer._draft_chain)
        for counts in ([1, 1, 1], [1, 2, 3]):
            for request, count in zip(requests, counts, strict=True):
                request.commit([20 + i for i in range(count)])
            if counts != [1, 1, 1]:
                proposer.observe(requests, counts, *features(max(counts)))
            drafted = proposer.propose(requests, [K] * ROWS)
            assert drafted.token_ids.shape == (ROWS, K)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_cpu_no_operator_hands_out_a_value(family, sampling, tiny_model):
    case = CASES[family]
    proposer, widths = drafting(case, tiny_model(case.architecture), "cpu")

    def guard(draft):
        def guarded(*args):
            with NoValues():
                return draft(*args)

        return guarded

    two_rounds(proposer, widths, SAMPLING[sampling], "cpu", guard)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_device_without_values_nothing_waits(family, sampling, tiny_model):
    case = CASES[family]
    proposer, widths = drafting(case, tiny_model(case.architecture), "meta")
    mode = NoHost()

    def guard(draft):
        def guarded(*args):
            mode.within = True
            try:
                return draft(*args)
            finally:
                mode.within = False

        return guarded

    with mode:
        two_rounds(proposer, widths, SAMPLING[sampling], "meta", guard)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0).nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.__setitem__(x > 0, torch.zeros(())),
    ],
)
def test_the_guards_see_what_waits(waiting):
    with pytest.raises(Waits), NoValues():
        waiting(torch.ones(2, 2))
    mode = NoHost()
    mode.within = True
    with pytest.raises(Waits), mode:
        waiting(torch.ones(2, 2))


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x[[0, 1]],
        lambda x: torch.tensor([1, 2], device=x.device),
    ],
)
def test_the_guard_of_the_host_sees_copies(waiting):
    mode = NoHost()
    mode.within = True
    with pytest.raises(Waits), mode:
        waiting(torch.ones(2, 2))
    with mode:
        assert on_device([1, 2], torch.device("meta")).shape == (2,)
