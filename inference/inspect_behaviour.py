"""Whether a drafter is read as it was trained, found out by what it drafts.

The order in which two inputs are joined, the numbering of taps, the meaning of d2t: no shape tells of them, and no
engine notices. The target writes a few texts; the same tensors are read in every other way that a folder may have got
wrong, and expected acceptance on those texts says whether another reading is clearly better. Files are not this
module's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from inference.expected import Text, accept_tables, batches_of, teacher_forced
from inference.llm_prompts import chat_prompts
from inference.offline_prompts import CHAT, ENGLISH
from inference.replay import ReplayResult, replay
from inference.sampling_params import SamplingParams
from speculators.config import DecoderConfig, DrafterConfig, rope_of
from speculators.drafter import Drafter, family_class
from speculators.errors import ConfigError
from speculators.target import FrozenTarget, TargetFeatures

DRAFTS = 3
WRITTEN = 48  # tokens of each text
NOTHING = 1.05  # an acceptance length below which a drafter is of no use
GAIN, FACTOR, SIGMAS = 0.05, 1.1, 3.0  # when another reading is clearly better, see `clearly_better`
ROUNDS = 3  # mistakes that are looked for on top of one another
PERMUTED = 4  # taps of which every order is tried; of more only the reverse
SYNTHETIC = (8, 24)  # prompts without a tokenizer: how many, and of how many random tokens


@dataclass(frozen=True)
class Candidate:
    """One way to read a folder: `taps` in the order in which they are joined."""

    config: DrafterConfig
    state: dict[str, Tensor]
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """One change of how tensors are read."""

    kind: str  # input_order, tap_order, tap_numbering, d2t_ids, switch, norm, heads, rope
    what: str
    change: Callable[[Candidate], Candidate]


@dataclass
class Measured:
    """Expected acceptance lengths on text of the target's own.

    `as_is`; `readings`: of each other reading alone, (kind, what, acceptance length); `better`: (kind, what) of the
    changes that together accept clearly more, with `best` their acceptance length.
    """

    texts: int
    tokens: int
    synthetic: bool  # prompts of random tokens: the target had no tokenizer
    drafts: int
    as_is: float
    readings: list[tuple[str, str, float]] = field(default_factory=list)
    better: list[tuple[str, str]] = field(default_factory=list)
    best: float = 0.0

    @property
    def accepts_nothing(self) -> bool:
        return max(self.as_is, self.best) < NOTHING


def measure_readings(
    drafter: Drafter,
    model: Any,
    *,
    tokenizer: Any = None,
    prompts: Sequence[Any] = (),
    d2t: Tensor | None = None,
) -> Measured:
    """`drafter`: attached, as its folder says; `model`: the target, loaded, or a FrozenTarget of it. `prompts`: texts
    or lists of token ids; none: built-in ones. `d2t` [V_draft]: as it stands in the folder."""
    model = model.model if isinstance(model, FrozenTarget) else model
    base = Candidate(drafter.config, dict(drafter.state_dict()), drafter.config.tap_layers)
    candidates = list(_readings(base, drafter, d2t))
    taps = {tap for c in (base, *(r.change(base) for r in candidates)) for tap in c.taps}
    target = FrozenTarget(model, sorted(taps))
    asked, synthetic = _prompts(target, tokenizer, prompts)
    stage = _Stage(target, _written(target, asked))
    current, scores = base, stage.score(base)
    target.close()
    found = Measured(len(asked), sum(len(out) for _, out in stage.texts), synthetic, DRAFTS, _tau(scores))
    for number in range(ROUNDS):
        tried = [(reading, stage.score(reading.change(current))) for reading in candidates]
        if number == 0:
            found.readings = [(reading.kind, reading.what, _tau(each)) for reading, each in tried]
        tried.sort(key=lambda pair: -_tau(pair[1]))
        if not tried or not clearly_better(tried[0][1], scores):
            break
        reading, scores = tried[0]
        current = reading.change(current)
        found.better.append((reading.kind, reading.what))
        candidates = [each for each in candidates if each is not reading]
    found.best = _tau(scores)
    return found


def clearly_better(new: Sequence[ReplayResult], old: Sequence[ReplayResult]) -> bool:
    """Whether a reading accepts more than chance or a trifle would explain: GAIN more tokens per round and FACTOR times
    the drafts, and a mean difference between the texts of SIGMAS standard errors."""
    a, b = _tau(new), _tau(old)
    gains = torch.tensor([x.accepted / x.rounds - y.accepted / y.rounds for x, y in zip(new, old, strict=True)])
    error = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else float("inf")
    return a - b >= GAIN and a - 1 >= FACTOR * (b - 1) and float(gains.mean()) > SIGMAS * error


def _tau(results: Sequence[ReplayResult]) -> float:
    return sum(results, ReplayResult()).expected_acceptance_length


# ------------------------------------------------------------------ texts and scores


def _prompts(target: FrozenTarget, tokenizer: Any, prompts: Sequence[Any]) -> tuple[list[list[int]], bool]:
    if tokenizer is not None:
        asked = [tokenizer(each).input_ids if isinstance(each, str) else list(each) for each in prompts or ENGLISH]
        if not prompts and getattr(tokenizer, "chat_template", None):
            chats = chat_prompts([list(each) for each in CHAT], tokenizer, {"add_generation_prompt": True})
            asked += [list(chat.token_ids) for chat in chats]
        return asked, False
    if prompts:
        if any(isinstance(each, str) for each in prompts):
            raise ConfigError("inspect: the target has no tokenizer; give prompts as lists of token ids")
        return [list(each) for each in prompts], False
    count, length = SYNTHETIC
    ids = torch.randint(target.vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
    return ids.tolist(), True


def _written(target: FrozenTarget, prompts: Sequence[list[int]]) -> list[Text]:
    """Each prompt with the target's greedy response."""
    from inference.llm import LLM

    llm = LLM._assemble(target)
    params = SamplingParams(temperature=0, max_tokens=WRITTEN)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(list(ids), list(out.outputs[0].token_ids)) for ids, out in zip(prompts, outputs, strict=True)]


class _Stage:
    """The texts, and what the target computes on them once for all readings."""

    def __init__(self, target: FrozenTarget, texts: list[Text]) -> None:
        self.target = target
        self.groups = [[texts[i] for i in members] for members in batches_of([len(p) + len(o) for p, o in texts])]
        self.texts = [text for group in self.groups for text in group]
        self.features = [teacher_forced(target, group) for group in self.groups]

    @torch.no_grad()
    def score(self, candidate: Candidate) -> list[ReplayResult]:
        drafter = family_class(candidate.config.family)(candidate.config).attach(self.target)
        drafter.load_state_dict(candidate.state, strict=True)
        drafter = drafter.to(device=self.target.device, dtype=self.target.dtype).eval()
        params, results = SamplingParams(temperature=0), []
        for group, features in zip(self.groups, self.features, strict=True):
            read = self._tapped(features, candidate.taps)
            tables = accept_tables(self.target, drafter, read, group, params, min(DRAFTS, drafter.max_depth or DRAFTS))
            results += [replay(table, len(text[1])) for table, text in zip(tables, group, strict=True)]
        return results

    def _tapped(self, features: TargetFeatures, taps: Sequence[int]) -> TargetFeatures:
        """With the taps of a candidate, in its order."""
        if features.taps is None or not taps:
            return replace(features, taps=None)
        blocks = dict(
            zip(self.target.tap_layers, features.taps.chunk(len(self.target.tap_layers), dim=-1), strict=True)
        )
        return replace(features, taps=torch.cat([blocks[tap] for tap in taps], dim=-1))


# ------------------------------------------------------------------ readings of each family


def _readings(base: Candidate, drafter: Drafter, given: Tensor | None) -> Iterator[Reading]:
    """Every mistake that a folder of this family may hold without a shape that tells of it."""
    yield from _FAMILIES.get(base.config.family, lambda *_: iter(()))(base, drafter)
    if base.config.reduced_vocabulary and given is not None and base.config.family == "eagle3":
        ids, V = given.long(), base.config.vocab_size
        inside = bool(((ids >= 0) & (ids < V)).all()) and len(ids.unique()) == len(ids)
        if inside and not torch.equal(ids, base.state["target_ids"].to(ids.device)):
            yield Reading("d2t_ids", "d2t read as target ids, not as offsets", _tensors(target_ids=lambda _: ids))
    if isinstance(base.config, DecoderConfig) and getattr(base.config, "target_fields", None) is None:
        theirs = rope_of(drafter.target.config)
        if theirs != base.config.rope_parameters:
            yield Reading("rope", f"rope_parameters of the target: {theirs}", _fields(rope_parameters=theirs))


def _eagle3(base: Candidate, drafter: Drafter) -> Iterator[Reading]:
    config: Any = base.config
    swapped = {f"layers.0.self_attn.{part}_proj.weight": _halves for part in "qkv"}
    yield Reading(
        "input_order", "q, k and v over [hidden state; embedding], not [embedding; hidden state]", _tensors(**swapped)
    )
    taps, depth = base.taps, config.num_target_layers
    orders = list(permutations(range(len(taps))))[1:] if len(taps) <= PERMUTED else [tuple(reversed(range(len(taps))))]
    for order in orders:
        told = [taps[i] for i in order]
        yield Reading("tap_order", f"fc over the taps in the order {told}", _reordered(order))
    for step in (-1, 1):
        if all(0 <= tap + step <= depth for tap in taps):
            yield Reading("tap_numbering", f"taps {[tap + step for tap in taps]}, not {list(taps)}", _shifted(step))
    for switch in ("norm_before_residual", "norm_output"):
        value = not getattr(config, switch)
        yield Reading("switch", f"{switch}: {str(value).lower()}", _fields(**{switch: value}))
    own, norm = base.state["norm.weight"], drafter.target.final_norm_weight
    if norm is not None and norm.shape == own.shape and bool((own == 1).all()):
        yield Reading(
            "norm", "norm.weight as the target's final norm, not ones", _tensors(**{"norm.weight": lambda _: norm})
        )


def _eagle(base: Candidate, drafter: Drafter) -> Iterator[Reading]:
    told = "fc over [hidden state; embedding], not [embedding; hidden state]"
    yield Reading("input_order", told, _tensors(**{"fc.weight": _halves}))


def _mtp(base: Candidate, drafter: Drafter) -> Iterator[Reading]:
    yield Reading("input_order", "the halves of input_proj swapped", _tensors(**{"input_proj.weight": _halves}))
    config: Any = base.config
    other = "residual" if config.hidden_state == "normed" else "normed"
    taps = (config.num_target_layers,) if other == "residual" else ()
    told = f"the target's state {'before' if taps else 'after'} its final norm (mtp_hidden_state: {other})"
    yield Reading("switch", told, lambda c: replace(_fields(hidden_state=other, tap_layers=taps)(c), taps=taps))


def _medusa(base: Candidate, drafter: Drafter) -> Iterator[Reading]:
    config: Any = base.config
    if config.num_heads < 2:
        return
    last = config.num_heads - 1
    yield Reading("heads", "heads in the reverse order", _heads([last - i for i in range(last + 1)]))
    counted = _heads([*range(1, last + 1), 0])
    yield Reading("heads", "the first head drafts what is written anyway, the second the token after", counted)


def _mlp(base: Candidate, drafter: Drafter) -> Iterator[Reading]:
    value = not base.config.scale_input  # type: ignore[attr-defined]
    yield Reading("switch", f"scale_input: {str(value).lower()}", _fields(scale_input=value))


_FAMILIES = {"eagle3": _eagle3, "eagle": _eagle, "mtp": _mtp, "medusa": _medusa, "mlp": _mlp}


# ------------------------------------------------------------------ changes


def _halves(weight: Tensor) -> Tensor:
    """[·, 2H] with its halves swapped."""
    a, b = weight.chunk(2, dim=1)
    return torch.cat([b, a], dim=1)


def _tensors(**changes: Callable[[Tensor], Tensor]) -> Callable[[Candidate], Candidate]:
    def change(c: Candidate) -> Candidate:
        return replace(c, state={name: changes[name](t) if name in changes else t for name, t in c.state.items()})

    return change


def _fields(**values: Any) -> Callable[[Candidate], Candidate]:
    return lambda c: replace(c, config=c.config.model_copy(update=values))


def _reordered(order: Sequence[int]) -> Callable[[Candidate], Candidate]:
    return lambda c: replace(c, taps=tuple(c.taps[i] for i in order))


def _shifted(step: int) -> Callable[[Candidate], Candidate]:
    return lambda c: replace(c, taps=tuple(tap + step for tap in c.taps))


def _heads(order: Sequence[int]) -> Callable[[Candidate], Candidate]:
    """Head i becomes what head order[i] was."""

    def change(c: Candidate) -> Candidate:
        state = dict(c.state)
        for name in c.state:
            group, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            if group == "blocks" or (group == "lm_heads" and not c.config.shared_lm_head):  # type: ignore[attr-defined]
                state[name] = c.state[f"{group}.{order[int(number)]}.{rest}"]
        return replace(c, state=state)

    return change
