"""What a checkpoint format is: names, shapes and config fields of one family, written and read by the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.config import DecoderConfig, DrafterConfig
from speculators.drafter import Drafter
from speculators.errors import CheckpointError
from speculators.vocab.draft_vocab import from_offsets, to_offsets

WEIGHTS = "model.safetensors"
NUM_SPECULATIVE_TOKENS = 5  # drafts of a round, where nothing says otherwise
TRAINED_WITH = (  # no tensor's shape tells of these
    "rope_parameters", "head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act",
    "attention_bias",
)  # fmt: skip

Table = dict[str, tuple[str, tuple[int, ...]]]  # name in the file -> (name in the module, shape)


class Layout:
    """One family's folder in one format. Module names are those of the family's file.

    `to_config` and `from_config` speak the words of vLLM's own format; a format that says the same otherwise translates
    in `dressed` and `plain`, and in `tensors` where it has other names.
    """

    family: ClassVar[str]
    format: ClassVar[str] = "vllm"
    meanings: ClassVar[Mapping[str, str]] = {}  # field of config.json, dotted where it is nested -> what it says
    ignored: ClassVar[tuple[str, ...]] = ()  # tensors that other tools write and no loader reads
    exact: ClassVar[tuple[str, ...]] = ()  # endings of names whose tensors stay in float32

    # -------------------------------------------------------------- files

    def write(self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype) -> None:
        """Everything but config.json into an empty folder."""
        state = self.unpacked(drafter.state_dict())
        tensors = {
            name: state[inside].detach().to("cpu", torch.float32 if name.endswith(self.exact) else dtype).contiguous()
            for name, (inside, _) in self.tensors(config).items()
        }
        tensors |= {name: torch.zeros(shape, dtype=dtype) for name, shape in self.zeros(config).items()}
        ids = drafter.draft_to_target
        if ids is not None:
            tensors["d2t"] = to_offsets(ids.cpu())
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def read(self, drafter: Drafter, folder: Path, files: Sequence[Path]) -> None:
        """Fills `drafter` from the safetensors `files` of `folder`. CheckpointError names every tensor at fault."""
        self.fill(drafter, folder, self._found(drafter.config, files))

    def fill(self, drafter: Drafter, folder: str | Path, found: dict[str, Tensor]) -> None:
        """Fills `drafter` from the tensors of `folder`, by their names there. Errors as of `read`."""
        config = drafter.config
        try:
            found = self.canonical(found, config)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {folder}: {error}") from error
        refuse(self.faults(found, config), folder)
        ids = from_offsets(found["d2t"], config.vocab_size, str(folder)) if config.reduced_vocabulary else None
        drafter.load_state_dict(self.state(found, config, ids), strict=True)

    def load(self, config: DrafterConfig, files: Sequence[Path]) -> dict[str, Tensor]:
        """The drafter's tensors under the names of `tensors`, whether or not they are the right ones."""
        return self.canonical(self._found(config, files), config)

    def _found(self, config: DrafterConfig, files: Sequence[Path]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, "pt") as reader:
                mine = [name for name in reader.keys() if self.belongs(name, config)]  # noqa: SIM118 (not a dict)
                found |= {name: reader.get_tensor(name) for name in mine}
        return found

    def faults(self, found: Mapping[str, Tensor], config: DrafterConfig) -> list[WeightFault]:
        """Everything about the tensors that is not as the table has it."""
        table, zeros = self.tensors(config), self.zeros(config)
        wanted = set(table) | ({"d2t"} if config.reduced_vocabulary else set())
        faults = [WeightFault("not_zero", name, f"{name} is not zero") for name in zeros if _has_values(found, name)]
        faults += [missing(name) for name in sorted(wanted - set(found))]
        faults += [unexpected(name) for name in sorted(set(found) - wanted - set(zeros) - set(self.ignored))]
        shapes = {name: shape for name, (_, shape) in table.items()}
        if config.reduced_vocabulary:
            shapes["d2t"] = (config.draft_vocab_size,)
        for name, shape in shapes.items():
            if name in found and tuple(found[name].shape) != shape:
                faults.append(misshaped(name, found[name].shape, shape))
            elif name in found and not torch.isfinite(found[name].float()).all():
                faults.append(not_finite(name))
        return faults

    def state(self, found: Mapping[str, Tensor], config: DrafterConfig, ids: Tensor | None) -> dict[str, Tensor]:
        """The module's state from tensors without faults; `ids` [V_draft]: of a reduced vocabulary, the target's."""
        state = dict(self.packed({inside: found[name] for name, (inside, _) in self.tensors(config).items()}))
        return state if ids is None else state | {"target_ids": ids}

    # -------------------------------------------------------------- names, shapes and fields

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        """Whether a folder that does not name its family is one of these: config.json, names of the tensors."""
        raise NotImplementedError

    def tensors(self, config: DrafterConfig) -> Table:
        """Every tensor but `d2t`, which is offsets in the file and ids in the module."""
        raise NotImplementedError

    def to_config(self, config: DrafterConfig) -> dict[str, Any]:
        """The fields of config.json; what the format has no field for goes below `draftsmith`."""
        raise NotImplementedError

    def from_config(
        self, fields: Mapping[str, Any], names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        """config.json and the names of the tensors beside it -> the config. CheckpointError names the field."""
        raise NotImplementedError

    def zeros(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Tensors that an engine has and the drafter has not: written as zeros, without which they would be random."""
        return {}

    def check(self, config: Any) -> None:
        """ConfigError that names the field of a drafter which the format's engines would run as another one."""

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """All of config.json in the words of `to_config`, `draftsmith` whole -> in those of this format."""
        return fields

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Undoes `dressed`, for the folders of others too."""
        return fields

    def belongs(self, name: str, config: Any) -> bool:
        """Whether a tensor of the folder is the drafter's; others are not read (a target's that carries its own)."""
        return True

    def unpacked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The module's state in the pieces that `tensors` names."""
        return state

    def packed(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Undoes `unpacked`."""
        return state

    def canonical(self, found: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Tensors under the names of `tensors`, whichever of the names in the wild they have."""
        return found


LAYER_MEANINGS = {  # of the fields that `DecoderConfig.llama_fields` writes
    "hidden_size": "width of the head",
    "intermediate_size": "width of its MLP",
    "num_hidden_layers": "its decoder layers",
    "num_attention_heads": "its attention heads",
    "num_key_value_heads": "its key/value heads",
    "head_dim": "size of an attention head, which need not be hidden_size / heads",
    "hidden_act": "activation of the MLP",
    "rms_norm_eps": "of its norms",
    "rope_parameters": "rotary parameters, scaling (linear, llama3, yarn, …) included; the target's",
    "rope_theta": "the base again, for readers that do not know `rope_parameters`",
    "max_position_embeddings": "positions the head was made for; the target's",
}
COMMON_MEANINGS = {
    "dtype": "precision of the tensors; an engine runs the head in the target's",
    "draftsmith": "family, number of the target's layers, where the head comes from, what it was trained with",
}


class WeightFault(NamedTuple):
    """What is wrong with one tensor."""

    kind: str  # missing, unexpected, shape, not_finite, not_zero, other
    name: str
    text: str


class WeightsError(CheckpointError):
    """Tensors that are not as the table has them."""

    def __init__(self, folder: str | Path, faults: Sequence[WeightFault]) -> None:
        super().__init__(
            f"drafter {folder}: {len(faults)} fault(s) in the weights: " + "; ".join(fault.text for fault in faults)
        )
        self.faults = list(faults)


def missing(name: str) -> WeightFault:
    return WeightFault("missing", name, f"{name} is missing")


def unexpected(name: str) -> WeightFault:
    return WeightFault("unexpected", name, f"{name} is unexpected")


def misshaped(name: str, found: Sequence[int], expected: Sequence[int]) -> WeightFault:
    return WeightFault("shape", name, f"{name} has shape {list(found)}, expected {list(expected)}")


def not_finite(name: str) -> WeightFault:
    return WeightFault("not_finite", name, f"{name} holds values that are not finite")


def _has_values(found: Mapping[str, Tensor], name: str) -> bool:
    return name in found and bool(found[name].any())


def refuse(faults: Sequence[WeightFault], folder: str | Path) -> None:
    """WeightsError that lists them, if there are any."""
    if faults:
        raise WeightsError(folder, faults)


def require(fields: Mapping[str, Any], names: tuple[str, ...], where: str, kind: str) -> None:
    """CheckpointError unless config.json has them all."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise CheckpointError(f"{where}: fields {', '.join(missing)} are missing; is this {kind}?")


def target_layers(fields: Mapping[str, Any], num_target_layers: int | None, where: str) -> int:
    """Layers of the target, from what we wrote or from the target at hand."""
    layers = (fields.get("draftsmith") or {}).get("num_target_layers", num_target_layers)
    if layers is None:
        raise CheckpointError(f"{where}: the number of target layers is not in config.json; pass the target's")
    return layers


def own_fields(config: DrafterConfig) -> dict[str, Any]:
    """What every export says of itself: enough to notice a tensor whose absence would mean something else, and what of
    the target's layers it was trained with, to notice a field that was lost or changed on the way."""
    own: dict[str, Any] = {"family": config.family, "num_target_layers": config.num_target_layers}
    if isinstance(config, DecoderConfig):
        own["trained_with"] = {name: getattr(config, name) for name in TRAINED_WITH}
    return {"draftsmith": own | ({"own_embeddings": True} if config.own_embeddings else {})}


def changed_fields(fields: Mapping[str, Any], config: DrafterConfig) -> list[tuple[str, Any, Any]]:
    """(field, what config.json says, what was trained with) of every field of the layers that no longer agrees."""
    kept = (fields.get("draftsmith") or {}).get("trained_with") or {}
    pairs = [(name, getattr(config, name, None), value) for name, value in kept.items()]
    return [(name, found, value) for name, found, value in pairs if found != value]


def owns_embeddings(fields: Mapping[str, Any], names: set[str]) -> bool:
    """Whether the head has a table of its own: as we said, or as the tensors do."""
    return bool((fields.get("draftsmith") or {}).get("own_embeddings")) or "embed_tokens.weight" in names


def dtype_of(fields: Mapping[str, Any]) -> str:
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def layer_rows(config: Any, *, inputs: int | None = None, input_norm: bool = True) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one `speculators.layers.decoder.DecoderLayer`; `inputs`: width of what its projections
    read."""
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv, width = config.num_attention_heads * D, config.num_key_value_heads * D, inputs or H
    rows: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (H, heads),
        "mlp.gate_proj.weight": (I, H),
        "mlp.up_proj.weight": (I, H),
        "mlp.down_proj.weight": (H, I),
        "post_attention_layernorm.weight": (H,),
    }
    if input_norm:
        rows["input_layernorm.weight"] = (H,)
    if config.qk_norm:
        rows |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    if config.attention_bias:
        rows |= {f"self_attn.{part}_proj.bias": (heads if part == "q" else kv,) for part in "qkv"}
    return rows
