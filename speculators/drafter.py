"""What every trained head is: the contract between a family, the training loop and the runtime.

A family is one file in `speculators/families/`, with one class that derives from `Drafter`, and one line in
`registry.py`. Knows nothing of losses, optimizers, verification rules or engines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speculators.config import DrafterConfig
from speculators.errors import ConfigError
from speculators.layers.decoder import freeze_norms, thaw_norms
from speculators.layers.frozen_linear import freeze_linears, thaw_linears
from speculators.options import DrafterOptions
from speculators.target.frozen_target import FrozenTarget, TargetFeatures


@dataclass
class DraftStep:
    """One draft depth of one unroll, over the N terms of it that are valid.

    `hidden` [N, D]: the drafter's states before its head. `target_index` [N]: the flat position (b·T + t) whose target
    distribution the state must match; the token it predicts stands at `target_index + 1`. `anchor_index` [N]: the flat
    slot the chain started from, so that depths of one chain can be joined. `weight` [N]: 1 for a valid term.
    """

    depth: int
    hidden: Tensor
    target_index: Tensor
    anchor_index: Tensor
    weight: Tensor


@dataclass
class TreeLevel:
    """Drafts of one depth that are to be drafted from, w per row: one step of `Drafter.draft_tree`.

    token_ids  [b, w] target token ids
    parents    [b, w] which of the level before each hangs below; of the first level all 0, the newest true slot
    visible    bool [b, w, n]: of all drafts so far, these w the last of them, those on each one's way, itself included
    """

    token_ids: Tensor
    parents: Tensor
    visible: Tensor

    def of_parents(self, states: Tensor) -> Tensor:
        """States [b, w', ·] of the level before -> [b, w, ·], the parent's for each."""
        return states.gather(1, self.parents.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


# Draft logits [b, w, V_draft] of a level (at first of the newest true slot, w = 1) -> the next level; None: enough.
Grow = Callable[[Tensor], TreeLevel | None]


def valid_terms(features: Any, shift: int) -> Tensor:
    """bool [B, T]: slot t may be asked for the token at t + shift. Reads `segment_ids` and `loss_mask` only.

    The predicted token is a response token of the same packed document as slot t, and so is all between them.
    """
    segments, mask = features.segment_ids, features.loss_mask.bool()
    valid = torch.zeros_like(mask)
    span = mask.shape[1] - shift
    if span > 0:
        same = (segments[:, shift:] == segments[:, :span]) & (segments[:, :span] >= 0)
        valid[:, :span] = mask[:, shift:] & same
    return valid


def term_paths(features: Any, depth: int) -> tuple[Tensor, Tensor]:
    """(valid bool [B, T], path long [B, T]) of one depth of an unroll, for every slot.

    `path` is the slot of the row whose token the depth reads and whose target distribution it must match: t + 1 +
    depth, unless the row has `paths` that name another, as where a draft was rejected. `valid`: there is a term, by
    `valid_terms`, or with `paths` where one is named. Reads no field of `features` beside these and `valid_terms`'.
    """
    T = features.segment_ids.shape[1]
    onward = torch.arange(1 + depth, T + 1 + depth, device=features.segment_ids.device) % T  # what wraps is not valid
    onward = onward.expand_as(features.segment_ids)
    paths = getattr(features, "paths", None)
    if paths is None:
        return valid_terms(features, depth + 2), onward
    named = paths[..., depth]
    return named >= 0, torch.where(named >= 0, named, onward)


class Drafter(nn.Module):
    """Base of every trained head. Sub-classes build their modules from a `DrafterConfig`.

    The target's embedding and head are shared by reference through `attach` and are neither parameters nor saved.
    """

    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    options: ClassVar[type[DrafterOptions]] = DrafterOptions  # the `drafter:` section of its recipes
    defaults: ClassVar[dict[str, Any]] = {}  # published defaults of other sections: {"training": {...}, "loss": {...}}
    reads_taps: bool = False  # these two are the family's; a drafter may be told otherwise by its config
    reads_last_hidden: bool = False
    one_head: ClassVar[bool] = True  # `head` is the same at every depth
    first_token: ClassVar[int] = 1  # slot p of its cache holds token x_{p + first_token}
    writes: ClassVar[bool] = False  # text by itself
    reads_drafts: bool = True  # a depth depends on the tokens drafted before it

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self._target: list[FrozenTarget] = []  # in a list, so that nn.Module does not register it
        self.recomputes = False

    # -------------------------------------------------------------- shared with the target

    def attach(self, target: FrozenTarget) -> Drafter:
        """Shares the target's embedding and head. ConfigError if the target is not the one the drafter was made for."""
        for field, found in (("target_hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            expected = getattr(self.config, field)
            if expected != found:
                raise ConfigError(
                    f"drafter of family {self.config.family}: {field} is {expected}, but target "
                    f"{target.name_or_path!r} has {found}; use the target the drafter was trained for"
                )
        self._target = [target]
        return self

    @property
    def attached(self) -> bool:
        return bool(self._target)

    @property
    def target(self) -> FrozenTarget:
        if not self._target:
            raise ConfigError("this drafter is not attached to a target; call drafter.attach(target) first")
        return self._target[0]

    @property
    def draft_to_target(self) -> Tensor | None:
        """[V_draft] target id of every draft id, or None where the draft vocabulary is the target's."""
        return None

    def prepare_training(self, options: Any) -> Drafter:
        """What a recipe says of how the head is trained, before its optimizer is made. `options`: the family's."""
        return self

    def checkpoint_activations(self, wanted: bool) -> None:
        """Whether `unroll` keeps the activations of a depth for the backward pass, or computes them again there."""
        self.recomputes = wanted

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def max_depth(self) -> int | None:
        """Tokens it can draft at most; None: any number."""
        return None

    def require_depth(self, tokens: int, where: str) -> None:
        """ConfigError unless it can draft that many tokens; `where` names the option that asks for them."""
        if self.max_depth is not None and tokens > self.max_depth:
            raise ConfigError(
                f"{where} is {tokens}, but this drafter of family {self.config.family} has {self.max_depth} heads and "
                f"drafts one token with each; ask for {self.max_depth} or fewer"
            )

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text it can draft in; None: any number."""
        return None

    def require_length(self, tokens: int, where: str) -> None:
        """ConfigError unless it can draft in texts of that many tokens; `where` names the option that asks for them."""
        if self.max_length is not None and tokens > self.max_length:
            raise ConfigError(
                f"{where} is {tokens}, but this drafter of family {self.config.family} was made for {self.max_length} "
                f"positions; set {where} to {self.max_length} or less, or choose a drafter for longer texts"
            )

    def cache_length(self, slots: int) -> int:
        """Positions that its cache may need for that many slots of a row."""
        return slots

    def cache_positions(self, token_ids: Sequence[int]) -> int:
        """Positions of its cache that the slots of these tokens fill, from the start of a row on."""
        return len(token_ids)

    def start_terms(self, options: Any) -> int:
        """Terms of features that `initialise_from` wants to be fitted to."""
        return 0

    def initialise_from(
        self, target: FrozenTarget, options: Any = None, features: Sequence[TargetFeatures] | None = None
    ) -> Drafter:
        """Starting weights. `options`: the family's, None for their defaults; `features`: what the target computed on
        some training rows, to fit the start to."""
        return self

    def freeze(self) -> Drafter:
        """For drafting only, until `train()` or a change of dtype or device: a family may fuse what it computes."""
        self.eval().requires_grad_(False)
        freeze_linears(self)
        freeze_norms(self)
        return self

    def thaw(self) -> None:
        """Undoes what `freeze` made of the weights as they were."""
        thaw_linears(self)
        thaw_norms(self)

    @property
    def writer(self) -> FrozenTarget | None:
        """What writes text of its own, in the target's tokens, if the drafter can; None otherwise."""
        return None

    def twin(self) -> Drafter:
        """A copy that shares the target."""
        return copy.deepcopy(self, {id(target): target for target in self._target})

    def snapshot(self, dtype: torch.dtype) -> Drafter:
        """A frozen copy in `dtype` that drafts as an export of this moment would."""
        return self.twin().to(dtype).freeze()

    def train(self, mode: bool = True) -> Drafter:
        if mode:
            self.thaw()
        return super().train(mode)

    def _apply(self, fn: Callable, *args, **kwargs) -> Drafter:
        self.thaw()  # weights move or change type: copies of them would not
        return super()._apply(fn, *args, **kwargs)

    def meet_tokenizers(
        self, of_target: Any, own: Callable[[], Any] | None = None, *, intersection: bool = False, where: str = ""
    ) -> None:
        """For a family that has a tokenizer of its own, which `own` loads (None: it is the target's): makes sure that
        tokens mean the same to both models, or makes a map between them. ConfigError with the reason if they do not and
        `intersection` does not allow it; `where` names the option that would."""

    # -------------------------------------------------------------- on several processes

    def forward(self, work: Callable[[], Any]) -> Any:
        """`work()`: whoever acts around a module's forward, as sharding does, acts around any use of the head."""
        return work()

    def shard_units(self) -> Sequence[nn.Module]:
        """Parts that may be whole one after the other, each run once per unroll; none: the head is whole at once."""
        return ()

    # -------------------------------------------------------------- the contract

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """Training: every depth's states, teacher-forced tokens, own states fed back where the family does so."""
        raise NotImplementedError

    def count_terms(self, batch: Any, steps: int) -> Tensor:
        """[steps] valid terms of each depth that `unroll` will yield for a batch; it needs no features of it."""
        return torch.stack([term_paths(batch, depth)[0].sum() for depth in range(steps)])

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, D] states of one depth -> draft logits [N, V_draft]."""
        raise NotImplementedError

    def head_parameters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters that `head` reads."""
        return []

    def weight_matrices(self) -> list[nn.Parameter]:
        """Weights of two or more dimensions that are neither an embedding nor trained as part of the head."""
        apart = {id(p) for p in self.head_parameters()}
        apart |= {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in apart]

    def multiplied(self, depth: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Of `weight_matrices`, what one depth of `unroll` multiplies: with every slot of the rows, and with the slots
        only that have a term. What it costs follows (train/planner/work.py)."""
        return [], self.weight_matrices()

    def draft(
        self,
        cache,
        start: int,
        stop: int,
        token_ids: Tensor,
        taps: Tensor | None,
        last_hidden: Tensor | None,
        counts: Sequence[int],
        k: int,
        sample: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Inference: append true slots, then draft `k` tokens per row with the same maths as `unroll`.

        `cache` is the ragged cache of the head's own layers, rows [start, stop) of it: slot p of a row holds the pair
        (token x_{p+1}, target features of position p), or token x_p alone where `first_token` is 0. `token_ids` [b, M]
        and `taps` [b, M, n·H] / `last_hidden` [b, M, H] are `counts[i]` true slots per row, padded to M. `sample` maps
        draft logits [b, V_draft] to target token ids [b] and is called once per depth. Speculative slots are rolled
        back before returning. `k=0` appends only. Returns target token ids [b, k].
        """
        raise NotImplementedError

    def draft_tree(
        self,
        cache,
        start: int,
        stop: int,
        token_ids: Tensor,
        taps: Tensor | None,
        last_hidden: Tensor | None,
        counts: Sequence[int],
        grow: Grow,
    ) -> None:
        """As `draft`, but a tree below the newest true slot of each row: `grow` says level by level which drafts to go
        on from, and keeps what is drafted. On the way to any draft the logits are those of a chain of these tokens."""
        raise ConfigError(f"a drafter of family {self.config.family} drafts chains only; ask for no tree")
