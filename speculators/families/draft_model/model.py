"""A small language model as the drafter (DistillSpec, arXiv 2310.08461).

It reads tokens alone, so that its distribution after a prefix is the same at every depth: slot p
holds token x_p, and depth k of a round anchored at x_a is the model's own next-token distribution
after x_a and k drafts. Any causal LM of transformers serves: one that exists, one cut out of the
target, or one from a configuration. With another tokenizer than the target's it drafts the tokens
that both have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter, DraftStep, Samples, host_batch, valid_terms
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.draft_model.drafting import TokenDrafter
from draftsmith.speculators.families.draft_model.student import (
    build_model,
    config_of,
    copy_layers,
    cut_fields,
    cut_layers,
    plain_fields,
    read_layers,
)
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch, Widths, layer_bytes
from draftsmith.speculators.options import Count, PositiveInt, VocabularyOptions
from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.speculators.target.packed_attention import packed_again
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids
from draftsmith.speculators.vocab.token_bytes import same_vocabulary
from draftsmith.speculators.vocab.token_map import TokenMap

Kept = dict[Literal["first", "last", "spread"], PositiveInt]


class DraftModelConfig(DrafterConfig):
    """Any causal LM. `vocab_size` and `draft_vocab_size` are its own; which of its tokens the
    target has is found when it is attached."""

    model: dict[str, Any] = Field(description="the fields of its config.json")
    other_tokenizer: bool = Field(
        False, description="drafts by a map between its tokens and the target's"
    )

    @field_validator("model")
    @classmethod
    def _norm(cls, model: dict[str, Any]) -> dict[str, Any]:
        eps = model.get("rms_norm_eps", 1e-6)
        if not 0 < eps < inf:
            raise ValueError(f"rms_norm_eps is {eps}; expected a number above 0")
        return model

    @override
    def describe(self) -> str:
        model = config_of(self.model)
        size = f"{model.num_hidden_layers} x {self.hidden_size}, {model.num_attention_heads} heads"
        return f"a causal LM of its own: {model.model_type}, {size}"


class DraftModelOptions(VocabularyOptions):
    """The student. Exactly one of init_from, from_target and config says what it starts as."""

    unroll_steps: PositiveInt = Field(
        1, description="depths with a term in the loss; all are the same"
    )
    from_target: Kept | list[Count] | None = Field(
        None, description="layers of the target: {first: n}, {last: n}, {spread: n} or a list"
    )
    config: dict[str, Any] | None = Field(
        None, description="config.json fields of a student with random weights"
    )
    vocab: Literal["same", "intersection"] = Field(
        "same",
        description="intersection: another tokenizer is allowed, and shared tokens are drafted",
    )

    @field_validator("from_target")
    @classmethod
    def _one_way(cls, kept: Any) -> Any:
        if isinstance(kept, dict) and len(kept) != 1:
            raise ValueError(f"expected one of first, last, spread, got {kept}")
        if kept == []:
            raise ValueError("expected at least one layer, got []")
        return kept

    @model_validator(mode="after")
    def _one_start(self) -> DraftModelOptions:
        starts = ("init_from", "from_target", "config")
        named = [name for name in starts if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"expected one of {', '.join(starts)}, got {' and '.join(named)}")
        return self

    @model_validator(mode="after")
    def _ids_are_shared(self) -> DraftModelOptions:
        if self.draft_vocab_size is not None and self.vocab == "intersection":
            raise ValueError(
                "draft_vocab_size: with vocab: intersection the shared tokens are trained; reduce"
                " them when the drafter is loaded (draft_vocab_size of speculative_config)"
            )
        return self

    @property
    def start(self) -> str:
        """See `DrafterOptions.start`."""
        cut = self.from_target
        return "random weights" if cut is None else f"layers of the target ({cut})"

    def shape(self, fields: dict[str, Any], target: Any = None) -> dict[str, Any]:
        """See `DrafterOptions.shape`. ConfigError if nothing says what the student starts as."""
        if self.init_from is not None:
            return {}
        if self.from_target is not None:
            where = "drafter.from_target"
            layers = cut_layers(self.from_target, target.num_layers, where)
            model = cut_fields(target.config, layers, where)
        elif self.config is not None:
            model = plain_fields({"vocab_size": target.vocab_size} | self.config, "drafter.config")
        else:
            raise ConfigError(
                "give init_from (a model), from_target (layers of the target, such as"
                " {first: 2}) or config (fields of a new model)",
                where="drafter",
            )
        sizes = sizes_of(model)
        return sizes | {"draft_vocab_size": self.draft_vocab_size or sizes["vocab_size"]}


def sizes_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a DraftModelConfig that follow from its model's."""
    config = config_of(model)
    return {
        "model": dict(model),
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,  # it reads no state of the target
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
    }


class DraftModel(TokenDrafter):
    """`model` is transformers' own; `runner` runs it as a target: packed rows, caches, masks."""

    config_class = DraftModelConfig
    options = DraftModelOptions
    traits = replace(
        TokenDrafter.traits,
        writes=True,
        defaults={"training": {"learning_rate": 3e-5, "max_grad_norm": 1.0}},
        short_training={},  # a model that is trained already goes on gently
    )

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__(config)
        self.model = build_model(config.model)
        self.tokenizer: Any = None  # goes into the export, which is a model like any other
        self._runners: list[FrozenTarget] = []  # in a list, so that nn.Module does not register it
        self._shared: Tensor | None = None

    # -------------------------------------------------------------- the model

    @override
    @property
    def runner(self) -> FrozenTarget:
        """The model as a target: made on first use, and anew once weights were moved or replaced.
        ConfigError if its drafts cannot be taken back."""
        if not self._runners:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            # Its probes compare in the model's precision.
            with torch.autocast(self.model.device.type, enabled=False):
                runner = FrozenTarget(self.model)
            runner.require_rollback("a draft model")
            if runner.recurrent is not None:
                raise ConfigError(
                    "drafts cannot be taken back token by token"
                    " from recurrent layers; start from a model whose layers are all attention",
                    where=f"draft model {runner.name_or_path}",
                )
            self._runners = [runner]
            for parameter in trained:
                parameter.requires_grad_(True)
            self.model.train(self.training)
        return self._runners[0]

    def take_model(self, model: Any) -> None:
        """Another one of the same configuration in its place."""
        self._runners = []
        self._fast_forward = None
        self.model = model.eval()

    def _apply(self, fn: Callable, *args, **kwargs) -> Drafter:
        self._runners = []
        super()._apply(fn, *args, **kwargs)
        if self.token_map is not None:
            self.token_map = self.token_map.to(next(self.parameters()).device)
        return self

    @override
    def take_quantisation(self, scheme: Literal["int8"]) -> None:
        """The head gets weights of its own: an embedding that it was tied to stays as it is."""
        self._runners = []
        self._fast_forward = None
        super().take_quantisation(scheme)
        self.model.config.tie_word_embeddings = False
        fields = self.config.model | {"tie_word_embeddings": False}
        self.config = self.config.model_copy(update={"model": fields})

    @override
    @property
    def writer(self) -> FrozenTarget | None:
        """The model itself, if it writes the target's tokens."""
        return self.runner if self.token_map is None else None

    @override
    def deep_copy(self) -> Drafter:
        self._runners = []
        return super().deep_copy()

    @override
    def shard_units(self) -> Sequence[nn.Module]:
        return list(self.runner.layers)  # the runner's probes want whole weights: it is made now

    # -------------------------------------------------------------- the two vocabularies

    def attach(self, target: TargetHead) -> Drafter:
        """Any target with the same tokenizer; their tables may be padded to different sizes."""
        self._target = [target]
        return self

    @override
    @property
    def draft_to_target(self) -> Tensor | None:
        """[V_draft] of a reduced vocabulary, of the tokens that two tokenizers share, or of a table
        shorter than the target's; None: ids are the target's."""
        if self.config.reduced_vocabulary:
            return self.target_ids
        if self.token_map is not None:
            return self.token_map.target_ids
        size = self.config.vocab_size
        vocab = self.target.vocab_size
        if size >= vocab:
            return None
        if self._shared is None or self._shared.device != self.target.device:
            self._shared = torch.arange(size, device=self.target.device)
        return self._shared

    @override
    @property
    def borrowed_head(self) -> FrozenTarget:
        """The model's own."""
        return self.runner

    @override
    @property
    def borrowed_ids(self) -> Tensor:
        """[V_draft] in the model's own numbering."""
        if self.token_map is None:
            return self.target_ids
        return self.token_map.draft_ids[to_draft_ids(self.target_ids, self.token_map.target_ids)]

    def meet_tokenizers(
        self,
        of_target: Any,
        load: Callable[[], Any] | None = None,
        *,
        intersection: bool = False,
        where: str = "",
    ) -> None:
        """See `Drafter.meet_tokenizers`."""
        self.tokenizer = of_target if load is None else load()
        reason = same_vocabulary(of_target, self.tokenizer)
        if reason is None or self.token_map is not None:
            return
        if not intersection:
            raise ConfigError(
                f"the draft model's tokenizer is not the target's: {reason}. Choose a draft model"
                f" of the target's family, or set {where} to draft the tokens that both have"
            )
        token_map = TokenMap.between(
            of_target, self.tokenizer, self.target.vocab_size, self.config.vocab_size
        )
        self.token_map = token_map.to(next(self.parameters()).device)
        self.config = self.config.model_copy(update={"other_tokenizer": True})

    def cache_length(self, slots: int) -> int:
        """See `Drafter.cache_length`: as if every token were the one with the longest spelling."""
        return slots if self.token_map is None else self.token_map.longest_row(slots)

    @property
    def max_length(self) -> int | None:
        """See `Drafter.max_length`. With another tokenizer a text has more or fewer positions, and
        the last one is used again beyond."""
        if self.token_map is not None:
            return None
        return self.max_positions

    # ---------------------------------------------------- starting weights, and how it is trained

    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Drafter:
        """The target's layers, or weights as transformers initialises them."""
        if options is not None and options.from_target is not None:
            layers = cut_layers(options.from_target, target.num_layers, "drafter.from_target")
            if target.checkpoint is None:
                copy_layers(target.model, layers, self.model)
            else:
                read_layers(target.checkpoint, target, layers, self.model)
        return self

    @override
    def prepare_training(self, options: DraftModelOptions) -> Drafter:
        return self.requires_grad_(True)

    @override
    def state_bytes(self, batch: Batch) -> int:
        return batch.depths * batch.tokens * EXACT * self.config.hidden_size

    @override
    def kept_bytes(self, batch: Batch) -> int:
        """Of every layer what one of ours keeps, its states float32 as its weights are. A norm of
        transformers is computed in steps, and keeps its output before the weight too, in the dtype
        of its input: float32, of queries and keys that of products. Recomputed is one layer at a
        time."""
        shape = Widths.of(self.model.config)
        state = batch.tokens * EXACT * shape.hidden_size
        layers = self.model.config.num_hidden_layers
        layer = layer_bytes(shape, batch.tokens, batch, stream=EXACT, compiles=False) + 2 * state
        if shape.qk_norm:
            heads = shape.num_attention_heads + shape.num_key_value_heads
            layer += batch.tokens * batch.size * heads * shape.head_dim
        once = 2 * state + self.state_bytes(batch)
        if batch.recomputes:
            return once + layers * state + layer
        return once + layers * layer

    @override
    def checkpoint_activations(self, enabled: bool) -> None:
        super().checkpoint_activations(enabled)
        if enabled:
            again = partial(packed_again, self.runner.config)
            self._checkpointing("enable")({"use_reentrant": False, "context_fn": again})
        else:
            self._checkpointing("disable")()

    def _checkpointing(self, switch: str) -> Callable[..., None]:
        """transformers' own method for it, named after gradients until 5.22."""
        named = getattr(self.model, f"activation_checkpointing_{switch}", None)
        return named or getattr(self.model, f"gradient_checkpointing_{switch}")

    # -------------------------------------------------------------- training

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """The states of one pass over the rows, as every depth reads them."""
        states = self._states(features)  # [B·T, D], after the token of each slot
        batch = host_batch(features)
        for depth in range(steps):
            anchors = valid_terms(batch, depth + 2).flatten().nonzero().flatten()  # [N]
            index = to_device(anchors + 1 + depth, states.device)
            yield DraftStep(
                depth=depth,
                hidden=states[index],
                target_index=index,
                anchor_index=to_device(anchors, states.device),
                weight=torch.ones(len(anchors), device=states.device),
            )

    def _states(self, features: TargetFeatures) -> Tensor:
        ids = features.input_ids
        positions = features.position_ids
        segments = features.segment_ids
        ends = None
        if self.token_map is not None:
            spelt = self.token_map.spell_packed(ids, segments)
            ids = spelt.input_ids
            segments = spelt.segment_ids
            ends = spelt.ends
            positions = spelt.position_ids
            if self.max_positions is not None:
                positions = positions.clamp(max=self.max_positions - 1)
        rows = (self._known(ids), positions, segments, segments >= 0)
        outputs = self.runner.features(*rows, gradients=torch.is_grad_enabled(), autocast=True)
        states = outputs.last_hidden  # [B, T', D]
        if ends is not None:  # after each target token; zero before the first
            index = ends.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
            states = torch.where(ends[..., None] < 0, 0.0, states.gather(1, index))
        return states.flatten(0, 1)

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, D] -> [N, V_draft]: the model's own head, over the tokens that the target has."""
        if self.config.reduced_vocabulary:
            return self.borrowed_logits(hidden)
        logits = self.runner.logits(hidden)
        if self.token_map is not None:
            return logits[..., self.token_map.draft_ids]
        return logits[..., : self.target.vocab_size]

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.get_output_embeddings().parameters() if p.requires_grad]
