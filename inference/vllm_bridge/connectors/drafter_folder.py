"""A weight-transfer engine for vLLM: an exported drafter takes the place of the one that a server
runs (docs/fresh.md).

vLLM imports this file by its name, through `--worker-extension-cls`, from an environment that need
not have this project. It registers the backend `folder`, whose /update_weights names a folder that
the server can read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer import base as own
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class Extension:
    """What `--worker-extension-cls` names. It adds nothing to a worker."""


class NoInfo(own.WeightTransferInitInfo):
    """There is nobody to connect to."""


@dataclass
class DrafterFolder(own.WeightTransferUpdateInfo):
    """`update_info` of /update_weights: the folder of an exported drafter."""

    folder: str


class DrafterFolderEngine(own.WeightTransferEngine[NoInfo, DrafterFolder]):
    """Loads a drafter in one update. Nothing of the running one is touched before all of the new
    one is read and found to be of its shape, as vLLM cannot go back."""

    init_info_cls = NoInfo
    update_info_cls = DrafterFolder

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        drafting = vllm_config.speculative_config
        if drafting is None or not Path(drafting.model).is_dir():
            raise ValueError(
                "start the server with a drafter of a folder: speculative_config.model"
            )
        self._facts = facts(Path(drafting.model))  # now: another may come to lie there

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do before the folder is read. ValueError for the target's weights."""
        if self.model is self._default_model:
            raise ValueError("drafters alone are updated: /start_draft_weight_update")

    def receive_weights(self, update_info: DrafterFolder) -> None:
        """Puts the drafter of the folder into the model. ValueError, FileNotFoundError: it is none,
        or none of the same shape."""
        folder = Path(update_info.folder)
        new = facts(folder)
        differing = {key for key in {*new, *self._facts} if new.get(key) != self._facts.get(key)}
        if differing:
            raise ValueError(f"{folder}: not of the running drafter's shape: {sorted(differing)}")
        tensors: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing to do: the update was whole."""

    def shutdown(self) -> None:
        """Nothing to do."""


def facts(folder: Path) -> dict[str, Any]:
    """What two drafters must have in common for one to replace the other: config.json but for
    where it comes from, and the shape of every tensor."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {key: value for key, value in config.items() if key != "draftsmith"} | shapes


WeightTransferEngineFactory.register_engine("folder", DrafterFolderEngine)
