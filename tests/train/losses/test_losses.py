"""The objective: every divergence is right, and walking it in chunks changes nothing but the
memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from draftsmith.speculators import kernels
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids
from draftsmith.train.losses.chunked import ARGMAX_BLOCK, argmax, may_overwrite
from draftsmith.train.losses.divergences import CLOSED_FORM, DIVERGENCES, ON_STATES, Mix, overlap
from draftsmith.train.losses.objective import StepMetrics, chunked_objective, in_loop_lengths
from tests.support.cases import BASE, world_of
from tests.support.contract import packed
from tests.support.errors import raises_at
from tests.support.fused_kernels import compiled_on_a_cpu
from tests.support.memory import Largest

D, V, VD, N = 12, 40, 17, 23
MIXES = [{name: 0.7} for name in DIVERGENCES] + [
    {"forward_kl": 1.0, "cross_entropy": 0.3, "tv": 0.5},
    {"lk_hybrid": 1.0, "cross_entropy_argmax": 0.2, "neg_log_acceptance": 0.1},
    {"jsd": {"weight": 1.0, "beta": 0.2}, "smooth_l1": 0.1, "forward_kl": 0.4},
    {"top_k_cross_entropy": {"weight": 2.0, "k": 3}},
]


def plain_objective(hidden, head, target_hidden, target, weight, labels, mix, mapping=None):
    """`chunked_objective` as one reads it in a paper: every [N, V] tensor at once, gradients by
    autograd."""
    mix = Mix.parse(mix)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        z = target(target_hidden).to(exact)
        p, best = torch.softmax(z, -1), z.argmax(-1)
        p = p if mapping is None else p[:, mapping]
    log_q = torch.log_softmax(head(hidden).to(exact), dim=-1)
    with torch.autocast("cpu", enabled=False):
        loss = mix(log_q, p, to_draft_ids(labels, mapping)) * weight
        for term in mix.state_terms:
            loss = loss + term(hidden, target_hidden) * weight
        choice = log_q.argmax(-1)
    choice = choice if mapping is None else mapping[choice]
    return loss.sum(), StepMetrics(loss.detach(), overlap(log_q.detach(), p), choice == best)


class Gated(nn.Module):
    """Reads its input twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


class Setup:
    """A drafter's head with a norm, a frozen target head, and rows to match."""

    def __init__(
        self, reduced: bool, dtype: torch.dtype = torch.float64, scale: float = 2.0
    ) -> None:
        torch.manual_seed(0)
        self.head = nn.Sequential(Gated(), nn.LayerNorm(D), nn.Linear(D, VD if reduced else V)).to(
            dtype
        )
        self.target = nn.Linear(D, V, bias=False).to(dtype).requires_grad_(False)
        self.draft_to_target = torch.randperm(V)[:VD].sort().values if reduced else None
        self.hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
        self.target_hidden = torch.randn(N, D, dtype=dtype) * scale
        self.weight = torch.rand(N, dtype=dtype)
        self.labels = torch.randint(0, V, (N,))

    def arguments(self, mix: object = None) -> tuple:
        mix = mix or {"forward_kl": 1.0}
        target = (self.target_hidden, self.target, self.weight, self.labels)
        return self.hidden, self.head, *target, mix, self.draft_to_target

    def gradients(self, loss: Tensor) -> list[Tensor]:
        inputs = [self.hidden, *self.head.parameters()]
        return list(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))


def assert_same(left: tuple, right: tuple, setup: Setup, atol: float, rtol: float = 0.0) -> None:
    torch.testing.assert_close(left[0], right[0], atol=atol, rtol=rtol)
    for name in ("loss", "alpha"):
        torch.testing.assert_close(
            getattr(left[1], name), getattr(right[1], name), atol=atol, rtol=rtol
        )
    for ours, theirs in zip(setup.gradients(left[0]), setup.gradients(right[0]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


# --- the divergences themselves ---


def sample_rows(mass: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """(draft logits, p of total mass `mass`, labels with one outside), float64, no ties."""
    torch.manual_seed(1)
    p = torch.softmax(torch.randn(4, 7, dtype=torch.float64) * 2, dim=-1) * mass
    return (
        torch.randn(4, 7, dtype=torch.float64, requires_grad=True),
        p,
        torch.tensor([0, 3, -1, 6]),
    )


@pytest.mark.parametrize("name", sorted(set(DIVERGENCES) - ON_STATES - {"lk_hybrid"}))
@pytest.mark.parametrize("mass", [1.0, 0.8])
def test_gradient_is_that_of_the_value(name: str, mass: float) -> None:
    z, p, labels = sample_rows(mass)
    assert torch.autograd.gradcheck(
        lambda z: DIVERGENCES[name](torch.log_softmax(z, -1), p, labels), z
    )


def test_gradient_of_the_hybrid_holds_lambda_fixed() -> None:
    z, p, labels = sample_rows()
    log_q = torch.log_softmax(z, -1)
    mixing = torch.exp(-3 * overlap(log_q, p).detach())
    kl, tv = DIVERGENCES["forward_kl"](log_q, p, labels), DIVERGENCES["tv"](log_q, p, labels)
    expected = torch.autograd.grad((mixing * kl + (1 - mixing) * tv).sum(), z, retain_graph=True)[0]
    actual = torch.autograd.grad(DIVERGENCES["lk_hybrid"](log_q, p, labels).sum(), z)[0]
    torch.testing.assert_close(actual, expected)


def test_values_are_those_of_the_definitions() -> None:
    z, p, labels = sample_rows(mass=1.0)
    q = z.detach().softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    alpha = 1 - (p - q).abs().sum(-1) / 2
    middle = 0.2 * p + 0.8 * q
    picked = torch.where(labels < 0, 1.0, q[range(4), labels])
    best, places = p.sort(-1, descending=True)
    weight = (-3 * alpha).exp()
    expected = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.2 * kl(p, middle) + 0.8 * kl(q, middle),
        "tv": 1 - alpha,
        "neg_log_acceptance": -alpha.log(),
        "lk_hybrid": weight * kl(p, q) + (1 - weight) * (1 - alpha),
        "cross_entropy": -picked.log(),
        "cross_entropy_argmax": -q.gather(-1, places[:, :1])[:, 0].log(),
        "top_k_cross_entropy": -(best * q.gather(-1, places).log())[:, :3].sum(-1),
    }
    options = {"jsd": {"beta": 0.2}, "top_k_cross_entropy": {"k": 3}}
    assert expected.keys() == DIVERGENCES.keys() - ON_STATES
    for name, value in expected.items():
        found = DIVERGENCES[name](q.log(), p, labels, **options.get(name, {}))
        torch.testing.assert_close(found, value)
    x, y = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert DIVERGENCES["smooth_l1"](x, y).tolist() == [(0.5 * 0.5**2 + 3.0 - 0.5) / 2]


@pytest.mark.parametrize("name", ["reverse_kl", "jsd", "tv", "neg_log_acceptance"])
def test_sub_probability_gives_the_full_vocabulary_value(name: str) -> None:
    """Restricting to the draft vocabulary loses nothing: q is zero elsewhere."""
    torch.manual_seed(3)
    p, log_q = (
        torch.softmax(torch.randn(5, 9, dtype=torch.float64), -1),
        torch.randn(5, 6, dtype=torch.float64),
    )
    log_q, labels = torch.log_softmax(log_q, -1), torch.zeros(5, dtype=torch.long)
    padded = torch.cat([log_q, torch.full((5, 3), -1e4, dtype=torch.float64)], dim=-1)
    full = DIVERGENCES[name](padded, p, labels)
    torch.testing.assert_close(DIVERGENCES[name](log_q, p[:, :6], labels), full)


@pytest.mark.parametrize("name", sorted(set(DIVERGENCES) - ON_STATES))
def test_finite_where_probabilities_underflow(name: str) -> None:
    """q and p each vanish in float32 exactly where the other lives."""
    z = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
    p = torch.tensor([[0.0, 1.0, 0.0]])
    value = DIVERGENCES[name](torch.log_softmax(z, -1), p, torch.tensor([1]))
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert value.isfinite().all() and grad.isfinite().all()
    if name in ("forward_kl", "neg_log_acceptance", "cross_entropy", "cross_entropy_argmax"):
        assert grad[0, 1] < -0.5, (
            "descent must still raise the logit of the only token that is accepted"
        )


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ({}, "loss"),
        ({"kl": 1.0}, "loss.kl"),
        ({"forward_kl": -1}, "loss.forward_kl.weight"),
        ({"jsd": {"weight": 1, "bta": 0.5}}, "loss.jsd"),
        ({"jsd": {"weight": 1, "beta": 1.5}}, "loss.jsd.beta"),
        ({"top_k_cross_entropy": {"weight": 1, "k": 2.5}}, "loss.top_k_cross_entropy.k"),
    ],
)
def test_a_wrong_mix_says_which_key(loss: dict, key: str) -> None:
    with raises_at(ConfigError, key):
        Mix.parse(loss)


def test_states_of_two_widths_have_no_distance() -> None:
    setup = Setup(False)
    setup.target = nn.Linear(2 * D, V).double()
    setup.target_hidden = torch.randn(N, 2 * D).double()
    with raises_at(ConfigError, "loss.smooth_l1"):
        chunked_objective(*setup.arguments({"smooth_l1": 1.0}))


# --- chunked against plain ---


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(mix))
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_chunked_equals_plain(mix: dict, reduced: bool) -> None:
    dtype, atol = (torch.float32, 1e-5) if reduced else (torch.float64, 1e-11)
    setup = Setup(reduced, dtype)
    for chunk in (1, 7, 100):
        plain = plain_objective(*setup.arguments(mix))
        chunked = chunked_objective(*setup.arguments(mix), chunk_size=chunk)
        assert_same(chunked, plain, setup, atol)
        assert torch.equal(chunked[1].agreement, plain[1].agreement)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize(
    "mix",
    [{"forward_kl": 1.0}, {"tv": 1.0, "jsd": 0.5, "smooth_l1": 1.0}],
    ids=["closed", "autograd"],
)
def test_shared_targets_change_nothing(mix: dict, reduced: bool) -> None:
    """Rows that read their target through an index, in any order, equal rows that carry a copy of
    it."""
    setup = Setup(reduced)
    index = torch.randint(0, 6, (N,))
    distinct, setup.target_hidden = setup.target_hidden[:6], setup.target_hidden[:6][index]
    copied = plain_objective(*setup.arguments(mix))
    hidden, head, _, *rest = setup.arguments(mix)
    shared = chunked_objective(hidden, head, distinct, *rest, chunk_size=5, target_index=index)
    assert_same(shared, copied, setup, atol=1e-11)
    assert torch.equal(shared[1].agreement, copied[1].agreement)


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[-2]], ids=lambda mix: "+".join(mix))
def test_chunked_equals_plain_under_autocast(mix: dict) -> None:
    setup = Setup(True, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = plain_objective(*setup.arguments(mix))
        chunked = chunked_objective(*setup.arguments(mix), chunk_size=6)
    assert chunked[0].dtype == torch.float32
    assert_same(chunked, plain, setup, atol=2e-2, rtol=2e-2)


def test_a_weight_cast_under_no_grad_does_not_cut_the_graph() -> None:
    setup = Setup(False, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            chunked_objective(*setup.arguments())
        loss, _ = chunked_objective(*setup.arguments())
    assert all(grad.abs().sum() > 0 for grad in setup.gradients(loss))


@pytest.mark.parametrize("name", sorted(CLOSED_FORM))
def test_a_target_that_masks_tokens_gives_no_nan(name: str) -> None:
    setup = Setup(False, torch.float32)
    blocked = torch.zeros(V)
    blocked[::3] = -torch.inf
    hidden, head, target_hidden, target, *rest = setup.arguments({name: 1.0})
    loss, _ = chunked_objective(hidden, head, target_hidden, lambda h: target(h) + blocked, *rest)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in setup.gradients(loss))


def test_argmax_by_blocks_is_the_first_of_the_largest() -> None:
    z = torch.randint(0, 300, (50, 3, 4 * ARGMAX_BLOCK)).float()
    assert argmax(z)[..., 0].tolist() == z.numpy().argmax(-1).tolist()


# --- compiled ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "mix",
    [dict.fromkeys(CLOSED_FORM, 0.4), dict.fromkeys(DIVERGENCES, 0.3)],
    ids=["closed", "autograd"],
)
def test_compiled_is_eager_in_a_few_graphs_for_chunks_of_any_rows(monkeypatch, mix: dict) -> None:
    """Targets that some rows share or that one row has, groups that a block cuts. Sizes and offsets
    of 0 and 1 have graphs of their own, and all others one."""
    setup = Setup(reduced=True)
    hidden, head, target_hidden, *rest = setup.arguments(mix)
    shared = torch.randint(0, 8, (N,))
    with compiled_on_a_cpu(monkeypatch) as graphs:
        for rows, index in product((5, 7, 100), (shared, torch.arange(N), torch.arange(N) // 4)):
            arguments = (hidden, head, target_hidden, *rest, rows, index)
            compiled = chunked_objective(*arguments)
            with monkeypatch.context() as eagerly:
                eagerly.setattr(kernels, "serves", lambda part, device: False)
                assert_same(compiled, chunked_objective(*arguments), setup, atol=1e-11)
    assert len(graphs) <= 8


@pytest.mark.slow
def test_kernels_of_the_objective_are_eager_in_single_precision(monkeypatch) -> None:
    """Those that torch writes for a CPU: logits that are overwritten by their gradient included."""
    setup = Setup(reduced=False, dtype=torch.float32)
    arguments = setup.arguments({"lk_hybrid": 1.0, "cross_entropy": 0.2})
    with compiled_on_a_cpu(monkeypatch, "inductor"):
        compiled = chunked_objective(*arguments)
    assert_same(compiled, chunked_objective(*arguments), setup, atol=1e-5)


# --- how gradients travel ---


def test_low_precision_head_accumulates_in_float32() -> None:
    """The sum over 512 one-row chunks of a bfloat16 head stays as close to the truth as its last
    rounding."""
    setup = Setup(False, torch.bfloat16)
    setup.head = setup.head[-1]
    setup.hidden = torch.randn(512, D, dtype=torch.bfloat16, requires_grad=True)
    setup.target_hidden, setup.labels = (
        torch.randn(512, D).bfloat16(),
        torch.zeros(512, dtype=torch.long),
    )
    setup.weight = torch.ones(512)
    chunked = setup.gradients(chunked_objective(*setup.arguments(), chunk_size=1)[0])
    setup.head, setup.target = setup.head.double(), setup.target.double()
    setup.hidden, setup.target_hidden = (
        setup.hidden.detach().double().requires_grad_(),
        setup.target_hidden.double(),
    )
    exact = setup.gradients(plain_objective(*setup.arguments())[0])
    for ours, truth in zip(chunked, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - truth).norm() < 0.01 * truth.norm()


def test_heads_of_any_kind() -> None:
    """A bound method; one that is frozen, which trains the states alone; detached states, which
    train the head alone; and without gradients there is no graph."""

    class Drafter(nn.Module):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers, self.unused = layers, nn.Linear(2, 2)

        def head(self, hidden: Tensor) -> Tensor:
            return self.layers(hidden)

    setup = Setup(False)
    expected_loss, _ = plain_objective(*setup.arguments())
    expected = setup.gradients(expected_loss)
    hidden, head, *rest = setup.arguments()
    loss, _ = chunked_objective(hidden, Drafter(head).head, *rest, chunk_size=4)
    for ours, theirs in zip(setup.gradients(loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    chunked_objective(hidden.detach(), head, *rest, chunk_size=4)[0].backward()
    for weight, theirs in zip(head.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, theirs)
        weight.grad = None
    with torch.no_grad():
        loss, _ = chunked_objective(hidden, head, *rest, chunk_size=4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected_loss.detach())
    head.requires_grad_(False)
    loss, _ = chunked_objective(hidden, head, *rest, chunk_size=4)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, expected[0])
    assert all(weight.grad is None for weight in head.parameters())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_no_rows_give_zero() -> None:
    setup = Setup(False)
    setup.hidden, setup.target_hidden = setup.hidden[:0], setup.target_hidden[:0]
    setup.weight, setup.labels = setup.weight[:0], setup.labels[:0]
    loss, metrics = chunked_objective(*setup.arguments())
    loss.backward()
    assert loss.item() == 0.0 and len(metrics.alpha) == 0
    assert all((weight.grad == 0).all() for weight in setup.head.parameters()), "DDP waits for all"


# --- memory ---


class SavesItsResult(torch.autograd.Function):
    """exp, whose backward pass reads the result by a way that no attribute of the node shows."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("family", sorted(BASE.keys() - {"draft_model"}))
def test_may_overwrite_the_logits_of_a_head_is_true(family: str) -> None:
    """Those of a draft model are a part of what its own head computes, a view."""
    target, drafter = world_of(BASE[family])
    features = target.features(**packed([9]))
    for step in drafter.unroll(features, 2):
        for trained in drafter.trained_heads({"forward_kl": 1.0}):
            assert may_overwrite(trained.head(step.hidden, step.depth))


@pytest.mark.parametrize("last", [torch.tanh, lambda z: z.softmax(-1), lambda z: z[:, :V]])
def test_may_overwrite_logits_that_are_read_again_is_false(last) -> None:
    setup = Setup(False)
    assert not may_overwrite(last(setup.head(setup.hidden)))


def test_objective_of_a_head_that_saves_its_result_unseen_is_an_error() -> None:
    """Not a wrong gradient."""
    setup = Setup(False)
    hidden, head, *rest = setup.arguments()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chunked_objective(hidden, lambda x: SavesItsResult.apply(head(x)), *rest, chunk_size=4)


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[-2]], ids=lambda mix: "+".join(mix))
def test_nothing_of_size_tokens_by_vocabulary(mix: dict) -> None:
    """Neither with a closed form nor with autograd."""
    setup, chunk = Setup(True), 7
    setup.head = nn.Linear(D, VD).double().requires_grad_(False)
    limit = max(chunk * V, D * V)  # D * V: a weight, transposed
    with Largest() as tracker:
        loss, _ = chunked_objective(*setup.arguments(mix), chunk_size=chunk)
        loss.backward()
    assert tracker.numel <= limit
    with Largest() as tracker:
        plain_objective(*setup.arguments(mix))
    assert tracker.numel == N * V > limit


def test_expected_length_from_joint_prefixes() -> None:
    alphas = [torch.tensor([0.5, 0.8, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([1.0])]
    anchors = [torch.tensor([0, 3, 7]), torch.tensor([3, 0]), torch.tensor([3])]
    chains = [1 + 0.5 + 0.5 * 0.25, 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 1.0, 1 + 1.0]
    torch.testing.assert_close(
        in_loop_lengths(alphas, anchors, 8), torch.tensor([sum(chains), 3.0]).double()
    )
