"""Tensors of a checkpoint, read by its index.

Only the shards that hold them are opened, and fetched from the Hub. transformers says which tensor
of a file belongs to which parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from draftsmith.speculators.errors import CheckpointError, QuantisedTensors
from draftsmith.speculators.hub import one_line
from draftsmith.speculators.target import probe

# The first number of a tensor's name is that of its layer; those of experts follow it.
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
FORMAT_KEYS = ("quant_method", "format", "quant_algo")  # of a `quantization_config`


class Checkpoint:
    """Files of a checkpoint in a folder or a repository; from the Hub a file is fetched when it is
    asked for."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self.revision = revision

    def shards(self) -> dict[str, str]:
        """The file of every tensor, by the tensor's name."""
        try:
            index = self._fetched(SAFE_WEIGHTS_INDEX_NAME)
        except CheckpointError:  # all tensors are in one file, or that file's error says why not
            with self._opened(SAFE_WEIGHTS_NAME) as file:
                return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]

    def read(self, shards: Mapping[str, str]) -> dict[str, Tensor]:
        """These tensors, on the CPU. `shards`: the file of each."""
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(shards.values())):
            names = [name for name in shards if shards[name] == shard]
            with self._opened(shard) as file:
                tensors |= {name: file.get_tensor(name) for name in names}
        return tensors

    def quantisation(self) -> str:
        """The format of its quantised weights, as its config names it; empty: it names none."""
        fields = json.loads(self._fetched(CONFIG_NAME).read_text(encoding="utf-8"))
        of_text = (fields.get("text_config") or {}).get("quantization_config")
        named = fields.get("quantization_config") or of_text or {}
        return ", ".join(str(named[key]) for key in FORMAT_KEYS if named.get(key))

    def _fetched(self, file: str) -> Path:
        """The local path of a file. CheckpointError: it is not there, or cannot be fetched."""
        try:
            path = cached_file(self.name, file, revision=self.revision)
        except OSError as error:
            raise CheckpointError(
                f"{file} is needed, and cannot be read ({one_line(error)})",
                where=f"target {self.name}",
            ) from error
        return Path(path)

    def _opened(self, file: str) -> Any:
        """A mapped file of tensors. CheckpointError as for `_fetched`, and for a damaged one."""
        path = self._fetched(file)
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"is damaged ({error})", where=f"{path}") from error


def read_tensors(
    checkpoint: Checkpoint, model: PreTrainedModel, where: str, layers: Sequence[int] = ()
) -> dict[str, Tensor]:
    """The tensors of a checkpoint that `model` has a place for, by transformers' rules, under the
    names of the checkpoint. `layers`: the model's i-th layer is the checkpoint's layers[i], and is
    named i; none: the layers are the checkpoint's.

    CheckpointError: a file is missing or damaged. QuantisedTensors: they are quantised."""
    expected = model.state_dict()
    shards = checkpoint.shards()
    numbered = {name: _renumbered(name, layers) for name in shards}
    rename = renaming(model, expected)
    parameters = {name: rename(new) for name, new in numbered.items() if new is not None}
    weights = checkpoint.read(
        {name: shards[name] for name, parameter in parameters.items() if parameter in expected}
    )
    refuse_quantised(weights, parameters, expected, checkpoint, where)
    return {numbered[name] or name: weight for name, weight in weights.items()}


def renaming(model: PreTrainedModel, expected: Mapping[str, Tensor]) -> Callable[[str], str]:
    """transformers' rule from a checkpoint's tensor to the parameter of `model` that it is read
    into. `expected`: the model's state dict."""
    conversions = get_model_conversion_mapping(model)
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in conversions if not isinstance(rule, WeightRenaming)]
    prefix = model.base_model_prefix

    def rename(name: str) -> str:
        return rename_source_key(name, renamings, converters, prefix, expected)[0]

    return rename


def _renumbered(name: str, layers: Sequence[int]) -> str | None:
    """A tensor's name with the place of its layer among `layers`; None: it is in no such layer."""
    number = LAYER_NUMBER.search(name)
    if not layers or number is None:
        return name
    layer = int(number[0])
    if layer not in layers:
        return None
    return LAYER_NUMBER.sub(str(layers.index(layer)), name, count=1)


def refuse_quantised(
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, str],
    expected: Collection[str],
    checkpoint: Checkpoint,
    where: str,
) -> None:
    """QuantisedTensors for a quantised weight, which is of no float format, or is stored as
    several tensors beside the place of a parameter. `parameters`: as the checkpoint's tensors are
    called in the model."""
    modules = {name.rpartition(".")[0] for name in expected}
    packed = [
        name
        for name, parameter in parameters.items()
        if parameter not in expected and parameter.rpartition(".")[0] in modules
    ]
    quantised = [name for name, weight in weights.items() if weight.dtype not in probe.OF_STATES]
    if faults := [*quantised, *packed]:
        name = faults[0]
        stored = f"{weights[name].dtype}" if name in weights else "packed"
        scheme = checkpoint.quantisation() or "no format is named in its config.json"
        raise QuantisedTensors(
            f"its tensor {name!r} is of a quantised weight ({stored}; {scheme}). Drafters share"
            " embedding and output head, and may start from layers; give a checkpoint of the same"
            " model that keeps these in a float format, such as the original, or one quantised"
            " with `lm_head` and the embedding left out",
            where=f"target {where}",
        )
