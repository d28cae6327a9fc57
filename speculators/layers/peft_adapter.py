"""Adapters of peft on a language model: added in place, merged, unmerged, saved as
peft does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.hub import split_revision

CONFIG = "adapter_config.json"
# what peft puts around a module it changes
_WRAPPER = re.compile(r"(?<=\.)(base_layer|modules_to_save\.default)\.")
_REPLACED = ".original_module."  # a module that is trained whole, as it was


def check_adapter(fields: Mapping[str, Any]) -> Any:
    """The peft configuration of these fields. ConfigError (a ValueError too) names what peft does
    not take."""
    from peft import PeftType, get_peft_config
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    kind = str(fields.get("peft_type", "")).upper()
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(kind) if kind in PeftType.__members__ else None
    mergeable = sorted(
        str(name.value)
        for name, cls in PEFT_TYPE_TO_TUNER_MAPPING.items()
        if issubclass(cls, BaseTuner)
    )
    if tuner is None or not issubclass(tuner, BaseTuner):
        raise AdapterError(
            f"peft_type is {fields.get('peft_type')!r}; expected one that changes layers and can be"
            f" merged into them ({', '.join(mergeable)}): engines cannot"
            " draft with virtual tokens"
        )
    if fields.get("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        raise AdapterError(
            f"task_type is {fields['task_type']!r}; a draft model's is CAUSAL_LM, or leave it out"
        )
    try:
        return get_peft_config({"task_type": "CAUSAL_LM", **fields, "peft_type": kind})
    except (TypeError, ValueError) as error:
        raise AdapterError(f"peft does not take this {kind} configuration: {error}") from error


class AdapterError(ConfigError, ValueError):
    """Raised inside recipes too, where pydantic wants a ValueError."""


class Adapter:
    """Adds an adapter to `model`; only its parameters are trained."""

    def __init__(
        self, model: PreTrainedModel, fields: Mapping[str, Any], base: str | None = None
    ) -> None:
        """`base`: the model's folder or id, for what `save` writes."""
        from peft import get_peft_model

        config, kind = check_adapter(fields), model.config.model_type
        try:
            self.peft: Any = get_peft_model(model, config)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"this adapter does not fit a {kind} model: {error}", where="peft"
            ) from error
        if base is not None:
            base, config.revision = split_revision(base)
        config.base_model_name_or_path = base
        self.merged = False

    def merge(self) -> None:
        """Adds the adapter to the layers' weights, until `unmerge`."""
        if not self.merged:
            self.peft.merge_adapter()
            self.merged = True

    def unmerge(self) -> None:
        if self.merged:
            self.peft.unmerge_adapter()
            self.merged = False

    def fold(self) -> None:
        """Merges for good: the model is a plain one again, and this object of no further use."""
        self.peft.merge_and_unload()

    def merged_state(self) -> dict[str, Tensor]:
        """Copies of the model's own tensors under their own names, with the adapter added."""
        before = self.merged
        self.merge()
        try:
            state = self.peft.get_base_model().state_dict()
            not_its_own = (self.peft.base_model.prefix, _REPLACED)  # peft's tensors
            own = {
                _WRAPPER.sub("", name): tensor
                for name, tensor in state.items()
                if not any(part in name for part in not_its_own)
            }
            copies = {x.data_ptr(): x.detach().clone() for x in own.values()}  # tied ones stay tied
            return {name: copies[tensor.data_ptr()] for name, tensor in own.items()}
        finally:
            if not before:
                self.unmerge()

    def save(self, folder: Path) -> None:
        """`adapter_config.json` and `adapter_model.safetensors`, which peft loads onto the base
        model."""
        self.peft.save_pretrained(folder)


def merge_saved_adapter(model: Any, folder: Path, what: str = "drafter") -> Any:
    """Merges the adapter in `folder` into the model's weights. CheckpointError if it does not fit
    exactly; `what`: its first words."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict, load_peft_weights

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"the adapter does not fit its base model: {error}", where=f"{what} {folder}"
        ) from error
    expected = set(get_peft_model_state_dict(adapted))
    if differing := expected ^ set(load_peft_weights(str(folder), "cpu")):
        raise CheckpointError(
            f"the adapter's tensors are not those of its configuration: "
            f"{', '.join(sorted(differing)[:3])}",
            where=f"{what} {folder}",
        )
    return adapted.merge_and_unload()
