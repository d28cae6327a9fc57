"""Draft models: folders as transformers itself writes them.

What transformers would initialise at random is refused here, tensor by tensor. A draft model with
another tokenizer than its target's has the map between the two beside it.

Engines know no reduced vocabulary of a draft model: they rank all rows of its head. So the file's
head has, for each token that is not drafted, the mean of the rows of those that are. Its logit is
then the mean of theirs, which is below the largest of them whatever the state: an engine's best
token is ours. A head that was tied to the embedding is so again when the folder is read here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError, DraftsmithError
from draftsmith.speculators.export.headers import read_headers
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, FolderContents, Layout
from draftsmith.speculators.families.draft_model.model import DraftModel, DraftModelConfig, sizes_of
from draftsmith.speculators.families.draft_model.student import config_of, plain_fields
from draftsmith.speculators.hub import one_line
from draftsmith.speculators.layers.head_rows import mean_elsewhere
from draftsmith.speculators.precision import in_dtype
from draftsmith.speculators.registry import build_config
from draftsmith.speculators.target.probe import needs_eager
from draftsmith.speculators.vocab.draft_vocab import load_ids, save_ids
from draftsmith.speculators.vocab.token_map import TokenMap

TIED = "tie_word_embeddings"  # also in the section `draftsmith`, where the file's head is not


class DraftModelLayout(Layout):
    """The names and shapes of the tensors are transformers' own."""

    family = "draft_model"
    bare = False
    ids_beside = True
    reduced_in_engines = (
        "vLLM and SGLang score all of them, so that drafts cost more; of an export of this version"
        " they draft these alone, of an older one others too"
    )
    without: ClassVar = {"": base.REFUSES}
    sglang_algorithm = "STANDALONE"

    @override
    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return any(
            str(name).endswith(("ForCausalLM", "LMHeadModel"))
            for name in fields.get("architectures") or []
        )

    @override
    def sglang_note(self, config: Any) -> str:
        return "it reads texts without their first token there, and its drafts are accepted less"

    @override
    def no_sglang(self, config: Any) -> str:
        if not config.other_tokenizer:
            return ""
        return "STANDALONE wants a model with the target's own tokenizer"

    def inspect(self, config: DrafterConfig, folder: Path) -> tuple[dict[str, Tensor], list[Fault]]:
        """By loading it, under transformers' names."""
        try:
            self.read(DraftModel(cast(DraftModelConfig, config)), folder)
        except base.WeightsError as error:
            return {}, error.faults
        except DraftsmithError as error:
            return {}, [Fault("weights", str(error))]
        return {}, []

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        section = base.own_fields(config)
        section["draftsmith"] |= {"other_tokenizer": True} if config.other_tokenizer else {}
        section["draftsmith"] |= base.reduced_field(config)
        model = dict(config.model)
        if config.reduced_vocabulary and config_of(model).tie_word_embeddings:
            model[TIED] = False
            section["draftsmith"][TIED] = True
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model["model_type"]]
        return {**model, "architectures": [architecture], "dtype": config.dtype, **section}

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        try:
            model = plain_fields(contents.fields, contents.where)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        if TIED in contents.section:
            model[TIED] = contents.section[TIED]
        sizes = sizes_of(model)
        sizes["draft_vocab_size"] = contents.section.get("draft_vocab_size", sizes["vocab_size"])
        return build_config(
            contents.where,
            self.family,
            # it reads none of them
            num_target_layers=contents.section.get("num_target_layers", contents.layers) or 1,
            other_tokenizer=bool(contents.section.get("other_tokenizer")),
            dtype=contents.dtype,
            **sizes,
        )

    @override
    def name_in_file(self, name: str, config: Any) -> str:
        return name.removeprefix(base.PREFIX)  # of the drafter's own `model`

    # -------------------------------------------------------------- files

    @override
    def fitted(self, drafter: Drafter) -> Drafter:
        """With a table of the target's size, without which vLLM refuses a model of its tokens."""
        draft_model = cast(DraftModel, drafter)
        config = cast(DraftModelConfig, drafter.config)
        if draft_model.token_map is not None or config.quantization or not drafter.attached:
            return drafter
        size = drafter.target.vocab_size
        return drafter if size == config.vocab_size else _resized(draft_model, size)

    @override
    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        drafter = cast(DraftModel, drafter)
        state = drafter.model.state_dict()
        if config.reduced_vocabulary:
            state |= _head_in_engines(drafter)
        drafter.model.save_pretrained(folder, state_dict=in_dtype(state, dtype))
        if drafter.tokenizer is not None:
            drafter.tokenizer.save_pretrained(folder)
        if drafter.token_map is not None:
            drafter.token_map.save(folder)
        if config.reduced_vocabulary:
            save_ids(drafter.target_ids, folder)

    @override
    def read(self, drafter: Drafter, folder: Path) -> None:
        draft_model = cast(DraftModel, drafter)
        config = cast(DraftModelConfig, drafter.config)
        if config.quantization is None:
            model = self._load(folder)
            if config_of(config.model).tie_word_embeddings:
                model.config.tie_word_embeddings = True
                model.tie_weights()
            draft_model.take_model(model)
        else:  # scales, which transformers reads with a further library
            super().read(drafter, folder)
        state = draft_model.model.state_dict()
        base.refuse(
            [base.not_finite(name) for name, x in state.items() if not x.isfinite().all()], folder
        )
        if config.other_tokenizer:
            target_size = draft_model.target.vocab_size if draft_model.attached else None
            draft_model.token_map = TokenMap.load(folder, target_size, config.vocab_size)
        if config.reduced_vocabulary:
            token_map = draft_model.token_map
            known = config.vocab_size if token_map is None else token_map.vocab_size
            draft_model.target_ids.copy_(load_ids(folder, config.draft_vocab_size, known))

    def _load(self, path: Path) -> Any:
        """The causal LM in float32. CheckpointError names every tensor not its own."""
        loaded: Any
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"transformers cannot load it: {one_line(error)}", where=f"drafter {path}"
            ) from error
        model, info = loaded
        faults = [self.missing(name) for name in sorted(info.get("missing_keys") or ())]
        faults += [self.unexpected(name) for name in sorted(info.get("unexpected_keys") or ())]
        faults += [
            base.misshaped(*mismatch) for mismatch in sorted(info.get("mismatched_keys") or ())
        ]
        faults += [Fault("weights", str(message)) for message in info.get("error_msgs") or ()]
        # transformers reads the scales of what a quantization_config describes
        if getattr(model.config, "quantization_config", None) is None:
            stored = read_headers(path)
            faults += [
                base.not_floating(name, stored[name].dtype)
                for name, tensor in model.state_dict().items()
                if name in stored
                if tensor.is_floating_point() and not stored[name].is_floating_point
            ]
        base.refuse(faults, path)
        if needs_eager(model.config):
            model.set_attn_implementation("eager")
        return model


def _tokens_below(model: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The ids that a config.json names, such as that of padding, without those from `size` on:
    tokens that the target has no row for, and never writes."""
    named = {name: value for name, value in model.items() if name.endswith("_token_id")}
    below: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, list):
            below[name] = [id for id in value if id < size]
        else:
            below[name] = value if value is not None and value < size else None
    return below


@torch.no_grad()
def _resized(drafter: DraftModel, size: int) -> DraftModel:
    """A copy whose table has `size` rows: the last are cut off, or the new ones are the mean of the
    others, so that none of them is the best."""
    config = cast(DraftModelConfig, drafter.config)
    old = config.vocab_size
    resized = cast(DraftModel, drafter.deep_copy())
    model = resized.model
    model.resize_token_embeddings(size, mean_resizing=False)
    rows = torch.arange(min(old, size))
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.load_state_dict(mean_elsewhere(table, rows))
    tokens = _tokens_below(config.model, size)
    sizes = sizes_of({**config.model, **tokens, "vocab_size": size})
    if config.reduced_vocabulary:
        del sizes["draft_vocab_size"]
    resized.config = config.model_copy(update=sizes)
    return resized


def _head_in_engines(drafter: DraftModel) -> dict[str, Tensor]:
    """The tensors of its output head, under their names in its model, as an engine that knows no
    reduced vocabulary is to read them."""
    head = drafter.model.get_output_embeddings()
    (name,) = (name for name, module in drafter.model.named_modules() if module is head)
    tensors = mean_elsewhere(head, drafter.borrowed_ids)
    return {f"{name}.{tensor}": values for tensor, values in tensors.items()}
