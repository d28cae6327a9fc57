"""Adapters of peft on a language model: one that is trained with it, and saved ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.hub import split_revision


class Adapter:
    """Adds an adapter to `model`; only its parameters are trained."""

    def __init__(self, model: PreTrainedModel, fields: Mapping[str, Any], base: str) -> None:
        """`fields`: of peft's configuration. `base`: the model's folder or id, for `save`."""
        from peft import get_peft_config, get_peft_model

        try:
            config = get_peft_config({"task_type": "CAUSAL_LM", **fields})
            self.peft: Any = get_peft_model(model, config)
        except (ValueError, RuntimeError) as error:
            kind = model.config.model_type
            raise ConfigError(
                f"this adapter does not fit a {kind} model: {error}", where="peft"
            ) from error
        config.base_model_name_or_path, config.revision = split_revision(base)

    def merged_state(self) -> dict[str, Tensor]:
        """Copies of the model's own tensors under their own names, with the adapter added."""
        self.peft.merge_adapter()
        try:
            plain = {
                name.replace(".base_layer.", "."): tensor
                for name, tensor in self.peft.get_base_model().state_dict().items()
                if self.peft.base_model.prefix not in name  # of peft's tensors
            }
            # one of each memory: tied ones stay tied
            copies = {x.data_ptr(): x.detach().clone() for x in plain.values()}
            return {name: copies[tensor.data_ptr()] for name, tensor in plain.items()}
        finally:
            self.peft.unmerge_adapter()

    def save(self, folder: Path) -> None:
        """Writes `adapter_config.json` and `adapter_model.safetensors`, as peft loads them."""
        # no embedding is adapted, for which peft would ask the Hub for the config of the base
        self.peft.save_pretrained(folder, save_embedding_layers=False)


def merge_saved_adapter(model: Any, folder: Path, what: str) -> Any:
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
    # the base is here: without its name, peft does not ask the Hub for its config
    adapted.peft_config["default"].base_model_name_or_path = None
    expected = set(get_peft_model_state_dict(adapted))
    if differing := expected ^ set(load_peft_weights(str(folder), "cpu")):
        raise CheckpointError(
            f"the adapter's tensors are not those of its configuration: "
            f"{', '.join(sorted(differing)[:3])}",
            where=f"{what} {folder}",
        )
    return adapted.merge_and_unload()
