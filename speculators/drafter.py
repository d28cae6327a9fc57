"""`Drafter`, the base class of trained heads: the contract between a family, the training loop and
the runtime.

A family is one file in `speculators/families/` with one class that derives from `Drafter`, and one
line in `registry.py`. Losses, optimizers, verification rules and engines do not belong here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.decoder import DecoderLayer
from draftsmith.speculators.layers.frozen_linear import FrozenLinear, freeze_linears, thaw_linears
from draftsmith.speculators.layers.head_rows import frozen_rows, keep_rows, row_product
from draftsmith.speculators.layers.int8_linear import FrozenInt8Linear, quantise_linears
from draftsmith.speculators.layers.kept_bytes import Batch
from draftsmith.speculators.options import DrafterOptions
from draftsmith.speculators.precision import on_device, on_host
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.traits import Traits
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids


@dataclass
class DraftStep:
    """One depth of an unroll: its N valid terms of the loss.

    hidden        [N, D] the drafter's states before its head
    target_index  [N] flat position (b·T + t) whose target distribution the state must match; the
                  predicted token is at `target_index + 1`
    anchor_index  [N] flat slot that the chain started from, which joins the depths of one chain
    weight        [N] 1 for a valid term
    """

    depth: int
    hidden: Tensor
    target_index: Tensor
    anchor_index: Tensor
    weight: Tensor


@dataclass(frozen=True)
class DraftInput:
    """The committed text that a drafter has not read yet: slots to append to rows [start, stop) of
    its ragged cache.

    Slot p of a row holds the pair (token x_{p+1}, target features of position p), or token x_p
    alone where `traits.first_token` is 0. Row start + i gets counts[i] slots; `token_ids` [b, M],
    `taps` [b, M, n·H] and `last_hidden` [b, M, H] are padded to M."""

    cache: Any
    start: int
    stop: int
    token_ids: Tensor
    taps: Tensor | None
    last_hidden: Tensor | None
    counts: Sequence[int]

    def newest(self, x: Tensor) -> Tensor:
        """x [b, M, ...] of the slots -> that of the newest slot of each row [b, ...]."""
        last = on_device(self.counts, x.device) - 1
        return x[torch.arange(len(last), device=x.device), last]

    def advance(self, counts: Sequence[int]) -> None:
        """Row start + i of the cache has counts[i] slots more."""
        for row, count in enumerate(counts, self.start):
            self.cache.advance(row, count)

    @contextmanager
    def drafting(self) -> Iterator[list[int]]:
        """Inside, drafts are appended, then forgotten; yields the rows' lengths."""
        lengths = list(self.cache.lengths[self.start : self.stop])
        try:
            yield lengths
        finally:
            for row, length in enumerate(lengths, self.start):
                self.cache.truncate(row, length)


class DraftLogits(NamedTuple):
    """What one depth of `Drafter.draft_steps` gives, before its draft is drawn.

    logits      [b, V_draft]
    confidence  [b] `Drafter.confidence` of the states that the logits were read from, or None
    """

    logits: Tensor
    confidence: Tensor | None = None


# Yields what each depth gives and is sent the target token ids [b] that were drafted from it.
DraftSteps = Generator[DraftLogits, Tensor | None, None]


@dataclass
class TreeLevel:
    """One level of a draft tree that is expanded next, w drafts per row: a step of
    `Drafter.draft_tree`.

    token_ids  [b, w] target token ids
    parents    [b, w] index of each draft's parent in the level above; on the first level all 0, the
               newest true slot
    visible    bool [b, w, n] over all n drafts so far (these w are the last): a draft's ancestors
               and itself
    """

    token_ids: Tensor
    parents: Tensor
    visible: Tensor

    def of_parents(self, states: Tensor) -> Tensor:
        """States [b, w', ·] of the level above -> the parents' states [b, w, ·]."""
        return states.gather(1, self.parents.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


@dataclass(frozen=True)
class TrainedHead:
    """One way to read the states of an unroll in training, and the divergences it is trained by.

    `head` [N, D], depth -> logits [N, V_draft]; `loss`: as a recipe writes it.
    """

    head: Callable[[Tensor, int], Tensor]
    loss: Any


# The target's features of some training rows, which starting weights are fitted to.
Samples = Sequence[TargetFeatures] | None

# Draft logits [b, w, V_draft] of a level (first: of the newest true slot, w = 1) -> the next level,
# or None to stop.
Grow = Callable[[Tensor], TreeLevel | None]


def valid_terms(features: Any, shift: int) -> Tensor:
    """bool [B, T]: predicting the token at t + shift from slot t is a valid term. Reads
    `segment_ids` and `loss_mask`.

    It is valid if that token is a response token of the same packed document as slot t.
    """
    segments = features.segment_ids
    mask = features.loss_mask.bool()
    valid = torch.zeros_like(mask)
    span = mask.shape[1] - shift
    if span > 0:
        same = (segments[:, shift:] == segments[:, :span]) & (segments[:, :span] >= 0)
        valid[:, :span] = mask[:, shift:] & same
    return valid


def host_batch(features: Any) -> SimpleNamespace:
    """What `valid_terms` and `row_noise` read of a batch, in the host's memory. Sizes that are
    computed there (how many terms there are, which slots are in use) make nobody wait for the
    device."""
    moved = SimpleNamespace()
    for name in ("segment_ids", "loss_mask", "position_ids", "seeds"):
        tensor = getattr(features, name, None)
        setattr(moved, name, None if tensor is None else on_host(tensor))
    return moved


def row_noise(batch: Any) -> Tensor:
    """[B, T] uniform numbers in [0, 1) for every slot, from the seed of its row (`batch.seeds`;
    without them the row's number), whatever rows it is padded and computed with."""
    B, T = batch.segment_ids.shape
    seeds = getattr(batch, "seeds", None)
    seeds = range(B) if seeds is None else seeds
    rows = [np.random.default_rng(int(seed)).random(T) for seed in seeds]
    return torch.from_numpy(np.stack(rows)).to(batch.segment_ids.device)


class Drafter(nn.Module):
    """Base class of trained heads. Subclasses build their modules from a `DrafterConfig`.

    `attach` shares the target's embedding and head by reference: they are not parameters and are
    not saved."""

    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    # The keys of `drafter:` in its recipes.
    options: ClassVar[type[DrafterOptions]] = DrafterOptions
    target_ids: Tensor  # [V_draft] ascending, of a reduced vocabulary
    traits: Traits = Traits()  # of the family; a drafter's own may differ (traits.py)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.traits = type(self).traits
        self._target: list[TargetHead] = []  # a list, so that nn.Module does not register it
        # how often each target token was supervised [V], where that is known; goes into an export
        self.token_counts: Tensor | None = None
        # while frozen: the rows of `borrowed_head` that are read, if the vocabulary is reduced
        self._borrowed_rows: FrozenLinear | FrozenInt8Linear | None = None
        if config.reduced_vocabulary:
            self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))

    # -------------------------------------------------------------- shared with the target

    def attach(self, target: TargetHead) -> Drafter:
        """Shares the target's embedding and head. ConfigError if the target is not the one the
        drafter was made for."""
        facts = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        for field, value in facts.items():
            if (expected := getattr(self.config, field)) != value:
                raise ConfigError(
                    f"{field} is {expected}, but target"
                    f" {target.name_or_path!r} has {value}; use the target it was trained for",
                    where=f"drafter of family {self.config.family}",
                )
        self._target = [target]
        return self

    @property
    def attached(self) -> bool:
        """True once `attach` has given it a target."""
        return bool(self._target)

    @property
    def target(self) -> TargetHead:
        """What it is attached to. ConfigError before `attach`."""
        if not self._target:
            raise ConfigError("this drafter has no target; call drafter.attach(target) first")
        return self._target[0]

    @property
    def draft_to_target(self) -> Tensor | None:
        """[V_draft] target id of every draft id; None: the draft vocabulary is the target's."""
        return self.target_ids if self.config.reduced_vocabulary else None

    @property
    def vocabulary_heads(self) -> Sequence[nn.Linear]:
        """Its own layers with a row for each draft token; none: it reads `borrowed_head` alone."""
        return ()

    @property
    def borrowed_head(self) -> TargetHead | None:
        """The language model whose output head makes its logits; None: its own layers do."""
        return None

    @property
    def borrowed_ids(self) -> Tensor:
        """[V_draft] rows of `borrowed_head`, of a reduced vocabulary."""
        return self.target_ids

    def borrowed_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V_draft], by the output head of `borrowed_head`."""
        lender = self.borrowed_head
        assert lender is not None
        hidden = hidden.to(lender.dtype)
        if not self.config.reduced_vocabulary:
            return lender.logits(hidden)
        if self._borrowed_rows is not None:
            return lender.head_to_logits(self._borrowed_rows(hidden))
        rows = row_product(lender.lm_head, self.borrowed_ids, hidden)
        return lender.head_to_logits(rows)

    @torch.no_grad()
    def reduce_vocabulary(self, target_ids: Tensor) -> Drafter:
        """Keeps these of its draft tokens, distinct ids [n] of the target, with the logits they
        had. A frozen drafter is to be frozen again."""
        self.thaw()
        target_ids = target_ids.sort().values
        places = to_draft_ids(target_ids, self.draft_to_target)
        for linear in self.vocabulary_heads:
            keep_rows(linear, places)
        self.register_buffer("target_ids", target_ids)
        self.config = self.config.model_copy(update={"draft_vocab_size": len(target_ids)})
        return self

    def prepare_training(self, options: Any) -> Drafter:
        """Applies the family's options of a recipe, before the head's optimizer is made."""
        return self

    def checkpoint_activations(self, enabled: bool) -> None:
        """Activation checkpointing: the backward pass recomputes each depth of `unroll`."""
        self.traits = replace(self.traits, recomputes=enabled)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Those that an optimizer changes, in the order of the modules."""
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def max_depth(self) -> int | None:
        """Largest number of tokens it can draft; None: unlimited."""
        return self.config.max_drafts

    def require_depth(self, tokens: int, where: str) -> None:
        """ConfigError if it cannot draft `tokens` tokens, as the option `where` says."""
        self._require_at_most(self.max_depth, tokens, "tokens in a round", where)

    @property
    def max_length(self) -> int | None:
        """Length of the longest text it can draft in, in tokens; None: unlimited."""
        return None

    def require_length(self, tokens: int, where: str) -> None:
        """ConfigError if it cannot draft in texts of `tokens` tokens, as option `where` says."""
        self._require_at_most(self.max_length, tokens, "positions", where)

    def _require_at_most(self, most: int | None, tokens: int, what: str, where: str) -> None:
        if most is not None and tokens > most:
            raise ConfigError(
                f"{where} is {tokens}, but this drafter of family {self.config.family} was made for"
                f" {most} {what}; ask for no more"
            )

    def cache_length(self, slots: int) -> int:
        """Number of cache positions that `slots` slots of a row may need."""
        return slots

    def start_terms(self, options: Any) -> int:
        """Number of terms that `initialise_from` needs features of; 0: none."""
        return 0

    def start_bytes(self, options: Any, terms: int) -> int:
        """Bytes that `initialise_from` takes at its peak to fit a start to so many terms, beside
        their features; about."""
        return 0

    def start_flops(self, options: Any, terms: int) -> int:
        """FLOPs that `initialise_from` takes to fit a start to so many terms; about."""
        return 0

    def kept_bytes(self, batch: Batch) -> int:
        """Bytes that `unroll` keeps for its backward pass, `state_bytes` among them, beside weights
        and features; about, and with a term at every slot. With activation checkpointing what is
        computed again at a time is among them too."""
        raise NotImplementedError

    def state_bytes(self, batch: Batch) -> int:
        """Bytes of the states that `unroll` gives to the loss, of all depths."""
        raise NotImplementedError

    @property
    def reads_start_text(self) -> bool:
        """True if `initialise_from` asks the target for its states of `TargetHead.start_text`."""
        return False

    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Drafter:
        """Initialises the weights from the target. `options`: the family's, None for their
        defaults; `features`: the target's, on some training rows, where the start is fitted to
        them."""
        return self

    @torch.no_grad()
    def freeze(self) -> Drafter:
        """Prepares the head for drafting: evaluation mode, no gradients, fused weights. `train()`
        or a change of dtype or device removes the fused weights."""
        self.eval().requires_grad_(False)
        freeze_linears(self)
        lender = self.borrowed_head
        if self.config.reduced_vocabulary and lender is not None:
            self._borrowed_rows = frozen_rows(lender.lm_head, self.borrowed_ids)
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.fuse()
        return self

    def thaw(self) -> None:
        """Removes the fused weights that `freeze` made."""
        thaw_linears(self)
        self._borrowed_rows = None
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.unfuse()

    def decode_with(self, forward_of: Callable[[FrozenTarget], Any]) -> None:
        """Offers a drafter that is a language model, and frozen, the runtime's forward of its
        runner; `forward_of` returns None where it has none of its own. Until `thaw`."""

    @property
    def writer(self) -> FrozenTarget | None:
        """The drafter as a model that writes text of its own; None if it cannot."""
        return None

    def deep_copy(self) -> Drafter:
        """A deep copy that shares the target."""
        return copy.deepcopy(self, {id(target): target for target in self._target})

    def take_quantisation(self, scheme: Literal["int8"]) -> None:
        """Its linear layers become int8 ones, of the nearest weights; for inference from then on.
        Those that are so already stay."""
        quantise_linears(self)
        self.config = self.config.model_copy(update={"quantization": scheme})

    def snapshot(self, dtype: torch.dtype) -> Drafter:
        """A frozen copy in `dtype`, which drafts as an export of these weights would."""
        return self.deep_copy().to(dtype).freeze()

    @override
    def train(self, mode: bool = True) -> Drafter:
        if mode:
            self.thaw()
        return super().train(mode)

    def _apply(self, fn: Callable, *args, **kwargs) -> Drafter:
        self.thaw()  # weights move or change dtype, and fused copies of them would not
        return super()._apply(fn, *args, **kwargs)

    def meet_tokenizers(
        self,
        of_target: Any,
        load: Callable[[], Any] | None = None,
        *,
        intersection: bool = False,
        where: str = "",
    ) -> None:
        """Checks that the drafter's tokenizer, loaded by `load` (None: it is the target's), agrees
        with the target's, or builds a map between the two vocabularies. ConfigError if they differ
        and `intersection` is False; `where` names the option that would allow it. Only a family
        with a tokenizer of its own overrides this."""

    # -------------------------------------------------------------- on several processes

    def forward(self, work: Callable[[], Any]) -> Any:
        """Calls `work()`: hooks around a forward, as FSDP's, run around any use."""
        return work()

    def shard_units(self) -> Sequence[nn.Module]:
        """Submodules, each run once per unroll, that FSDP gathers in turn; empty: the head."""
        return ()

    # -------------------------------------------------------------- the contract

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """Training: yields the states of every depth, with teacher-forced tokens and, if the family
        does so, the head's own states as the next depth's input."""
        raise NotImplementedError

    def count_terms(self, batch: Any, steps: int) -> Tensor:
        """[steps] number of terms that `unroll` will yield at each depth; needs no features."""
        return torch.stack([valid_terms(batch, depth + 2).sum() for depth in range(steps)])

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, D] states of one depth -> draft logits [N, V_draft]."""
        raise NotImplementedError

    def trained_heads(self, loss: Any) -> list[TrainedHead]:
        """The objectives over the states of an unroll; the last is of the `head` that drafts, whose
        acceptance is measured. `loss`: the recipe's."""
        return [TrainedHead(self.head, loss)]

    def confidence(self, hidden: Tensor) -> Tensor | None:
        """[N, D] states of one depth -> how sure the drafter is that its draft there is accepted, a
        logit [N] in float32; None: it has no opinion but its largest probability. Trained on Σ
        min(p, q) of the same state, which knows the drafts before this one and not the draft
        itself."""
        return None

    def head_parameters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters that `head` reads."""
        return []

    def weight_matrices(self) -> list[nn.Parameter]:
        """Weights of two or more dimensions, but embeddings and those of the head."""
        tables = [m for m in self.modules() if isinstance(m, nn.Embedding)]
        apart = {id(p) for p in [*self.head_parameters(), *(table.weight for table in tables)]}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in apart]

    def append(self, inputs: DraftInput) -> None:
        """Inference: appends slots to the cache and drafts nothing."""
        raise NotImplementedError

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """Inference: appends slots, then drafts up to `k` >= 1 tokens per row by the same maths as
        `unroll`.

        A generator of the `DraftLogits` of depths 0 to k-1. It is sent the target token ids [b]
        drafted from the logits of one depth to go on to the next. When it is closed, at any depth,
        the cache holds the appended slots and no draft."""
        raise NotImplementedError

    def draft(self, inputs: DraftInput, k: int, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs all `k` >= 1 of `draft_steps`; `sample` maps draft logits [b, V_draft] to target
        token ids [b]. Returns target token ids [b, k]."""
        drafted: list[Tensor] = []
        with closing(self.draft_steps(inputs, k)) as steps:
            for _ in range(k):
                drafted.append(sample(steps.send(drafted[-1] if drafted else None).logits))
        return torch.stack(drafted, dim=1)

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """As `draft`, but a tree of at most `k` levels below the newest slot of each row: `grow`
        says level by level which drafts to go on from, and keeps what is drafted. On the way to any
        draft the logits are those of a chain of these tokens."""
        raise ConfigError(
            f"a drafter of family {self.config.family} drafts chains only; ask for no tree"
        )
