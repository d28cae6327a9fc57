"""The base of all layouts: one table of a family's tensors and config fields, for writing and for
reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.config import DecoderConfig, DrafterConfig, decoder_fields
from speculators.drafter import Drafter
from speculators.errors import CheckpointError
from speculators.vocab.draft_vocab import from_offsets, to_offsets

WEIGHTS = "model.safetensors"
NUM_SPECULATIVE_TOKENS = 5  # default drafts of a round
TRAINED_WITH = (  # fields that no tensor's shape depends on; each family has some
    "rope_parameters",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "block_size",
    "num_depths",
    "mask_token_id",
    "sample_from_anchor",
    "is_causal",
    "sliding_window",
)

Fields = Mapping[str, Any]  # of config.json
Table = dict[str, tuple[str, tuple[int, ...]]]  # name in the file -> (name in the module, shape)


class Layout:
    """One family's folder in one format. Module names are those of the family's file.

    `to_config` and `from_config` use the field names of vLLM's own format. A format with other
    fields converts them in `dressed` and `plain`, and one with other tensor names overrides
    `tensors`."""

    family: ClassVar[str]
    format: ClassVar[str] = "vllm"
    meanings: ClassVar[
        Mapping[str, str]
    ] = {}  # field of config.json (dotted if nested) -> its meaning
    ignored: ClassVar[tuple[str, ...]] = ()  # tensors of other tools that no loader reads
    exact: ClassVar[tuple[str, ...]] = ()  # endings of the names of tensors that stay in float32

    # -------------------------------------------------------------- files

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        """Writes everything but config.json into an empty folder."""
        state = self.unpacked(drafter.plain().state_dict())
        tensors = {
            name: (
                state[inside]
                .detach()
                .to("cpu", torch.float32 if name.endswith(self.exact) else dtype)
                .contiguous()
            )
            for name, (inside, _) in self.tensors(config).items()
        }
        tensors |= {
            name: torch.zeros(shape, dtype=dtype) for name, shape in self.zeros(config).items()
        }
        ids = drafter.draft_to_target
        if ids is not None:
            tensors["d2t"] = to_offsets(ids.cpu())
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(
                0, ids.cpu(), True
            )
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def read(self, drafter: Drafter, folder: Path, files: Sequence[Path]) -> None:
        """Fills `drafter` from the safetensors `files` of `folder`. CheckpointError names every
        tensor at fault."""
        self.fill(drafter, folder, self._found(drafter.config, files))

    def fill(self, drafter: Drafter, folder: str | Path, found: dict[str, Tensor]) -> None:
        """Fills `drafter` from tensors under their names in `folder`. Errors as of `read`."""
        config = drafter.config
        try:
            found = self.canonical(found, config)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {folder}: {error}") from error
        refuse(self.faults(found, config), folder)
        ids = (
            from_offsets(found["d2t"], config.vocab_size, str(folder))
            if config.reduced_vocabulary
            else None
        )
        drafter.load_state_dict(self.state(found, config, ids), strict=True)

    def load(self, config: DrafterConfig, files: Sequence[Path]) -> dict[str, Tensor]:
        """Loads the drafter's tensors under the names of `tensors`, unchecked."""
        return self.canonical(self._found(config, files), config)

    def _found(self, config: DrafterConfig, files: Sequence[Path]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, "pt") as reader:
                # (not a dict)
                mine = [name for name in reader.keys() if self.belongs(name, config)]  # noqa: SIM118
                found |= {name: reader.get_tensor(name) for name in mine}
        return found

    def faults(self, found: Mapping[str, Tensor], config: DrafterConfig) -> list[WeightFault]:
        """Lists all differences between the tensors and the table."""
        table, zeros = self.tensors(config), self.zeros(config)
        wanted = set(table) | ({"d2t"} if config.reduced_vocabulary else set())
        faults = [
            WeightFault("not_zero", name, f"{name} is not zero")
            for name in zeros
            if name in found and found[name].any()
        ]
        faults += [missing(name) for name in sorted(wanted - set(found))]
        faults += [
            unexpected(name)
            for name in sorted(set(found) - wanted - set(zeros) - set(self.ignored))
        ]
        shapes = {name: shape for name, (_, shape) in table.items()}
        if config.reduced_vocabulary:
            shapes["d2t"] = (config.draft_vocab_size,)
        for name, shape in shapes.items():
            if name in found and tuple(found[name].shape) != shape:
                faults.append(misshaped(name, found[name].shape, shape))
            elif name in found and not torch.isfinite(found[name].float()).all():
                faults.append(not_finite(name))
        return faults

    def state(
        self, found: Mapping[str, Tensor], config: DrafterConfig, ids: Tensor | None
    ) -> dict[str, Tensor]:
        """The module's state from tensors without faults. `ids` [V_draft]: target ids of a reduced
        vocabulary."""
        state = dict(
            self.packed({inside: found[name] for name, (inside, _) in self.tensors(config).items()})
        )
        return state if ids is None else state | {"target_ids": ids}

    # -------------------------------------------------------------- names, shapes and fields

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        """Recognises a folder that does not name its family, by config.json and the names of the
        tensors."""
        raise NotImplementedError

    def tensors(self, config: DrafterConfig) -> Table:
        """Every tensor but `d2t`, which is offsets in the file and ids in the module."""
        raise NotImplementedError

    def to_config(self, config: DrafterConfig) -> dict[str, Any]:
        """The fields of config.json. What the format has no field for is written below
        `draftsmith`."""
        raise NotImplementedError

    def from_config(
        self, fields: Fields, names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        """The config from config.json and the names of the tensors. CheckpointError names the
        field."""
        raise NotImplementedError

    def zeros(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors that the engine has and the drafter lacks; written as zeros, else they
        would be random."""
        return {}

    def check(self, config: Any) -> None:
        """ConfigError for a drafter that the format's engines would run wrongly; it names the
        field."""

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Converts config.json as `to_config` has it to the fields of this format."""
        return fields

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The inverse of `dressed`, also for folders of other tools."""
        return fields

    def belongs(self, name: str, config: Any) -> bool:
        """Tells the drafter's tensors from a target's in the same folder, which are not read."""
        return True

    def unpacked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Splits the module's state into the tensors that `tensors` names."""
        return state

    def packed(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of `unpacked`."""
        return state

    def canonical(self, found: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Renames tensors of published checkpoints to the names of `tensors`."""
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
    "rope_parameters": (
        "rotary parameters, scaling (linear, llama3, yarn, …) included; the target's"
    ),
    "rope_theta": "the base again, for readers that do not know `rope_parameters`",
    "max_position_embeddings": "positions the head was made for; the target's",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`
WINDOW_MEANINGS = {
    "layer_types": f"`{SLIDING}` per layer; of a head with a window alone, as the two below",
    "sliding_window": "positions that a slot reads, its own included",
    "use_sliding_window": "true, as transformers' config would drop the window otherwise",
}


def window_fields(config: Any) -> dict[str, Any]:
    """The fields of config.json for a window, as vLLM's layers read them; none without one."""
    if config.sliding_window is None:
        return {}
    kinds = [SLIDING] * config.num_layers
    return {
        "layer_types": kinds,
        "sliding_window": config.sliding_window,
        "use_sliding_window": True,
    }


def window_of(fields: Mapping[str, Any], where: str) -> int | None:
    """The window of all layers; CheckpointError where only some have one, or its size is not
    said."""
    kinds = set(fields.get("layer_types") or [FULL])
    if SLIDING not in kinds:
        return None
    if len(kinds) > 1:
        raise CheckpointError(
            f"{where}: layer_types mixes {FULL} and {SLIDING}; here all layers are of one kind"
        )
    if fields.get("sliding_window") is None:
        raise CheckpointError(f"{where}: sliding layers, but sliding_window does not say how wide")
    return fields["sliding_window"]


COMMON_MEANINGS = {
    "dtype": "precision of the tensors; an engine runs the head in the target's",
    "draftsmith": (
        "family, number of the target's layers, where the head comes from, what it was trained with"
    ),
}


class WeightFault(NamedTuple):
    """One difference between a tensor and the table."""

    kind: str  # missing, unexpected, shape, not_finite, not_zero, other
    name: str
    text: str


class WeightsError(CheckpointError):
    """Tensors that differ from the table."""

    def __init__(self, folder: str | Path, faults: Sequence[WeightFault]) -> None:
        super().__init__(
            f"drafter {folder}: {len(faults)} fault(s) in the weights: "
            + "; ".join(fault.text for fault in faults)
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


def refuse(faults: Sequence[WeightFault], folder: str | Path) -> None:
    """WeightsError with all faults, if there are any."""
    if faults:
        raise WeightsError(folder, faults)


def require(fields: Mapping[str, Any], names: tuple[str, ...], where: str, kind: str) -> None:
    """CheckpointError unless config.json has all these fields."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise CheckpointError(f"{where}: fields {', '.join(missing)} are missing; is this {kind}?")


def target_layers(fields: Mapping[str, Any], num_target_layers: int | None, where: str) -> int:
    """The number of the target's layers, from `draftsmith` or from the target at hand."""
    layers = (fields.get("draftsmith") or {}).get("num_target_layers", num_target_layers)
    if layers is None:
        raise CheckpointError(
            f"{where}: the number of target layers is not in config.json; pass the target's"
        )
    return layers


def own_fields(config: DrafterConfig) -> dict[str, Any]:
    """The section `draftsmith`: the family, and fields that reveal a lost tensor or a changed field
    on reading."""
    own: dict[str, Any] = {"family": config.family, "num_target_layers": config.num_target_layers}
    if isinstance(config, DecoderConfig):
        own["trained_with"] = {
            name: getattr(config, name) for name in TRAINED_WITH if hasattr(config, name)
        }
    return {"draftsmith": own | ({"own_embeddings": True} if config.own_embeddings else {})}


def changed_fields(fields: Mapping[str, Any], config: DrafterConfig) -> list[tuple[str, Any, Any]]:
    """(field, value in config.json, value in training) of all layer fields that differ."""
    kept = (fields.get("draftsmith") or {}).get("trained_with") or {}
    pairs = [(name, getattr(config, name, None), value) for name, value in kept.items()]
    return [(name, found, value) for name, found, value in pairs if found != value]


def owns_embeddings(fields: Mapping[str, Any], names: set[str]) -> bool:
    """True if the head has its own embedding, by `draftsmith` or by the tensors."""
    return (
        bool((fields.get("draftsmith") or {}).get("own_embeddings"))
        or "embed_tokens.weight" in names
    )


def dtype_of(fields: Mapping[str, Any]) -> str:
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def architecture_of(fields: Mapping[str, Any]) -> str:
    return (fields.get("architectures") or ["missing"])[0]


def head_fields(
    fields: Mapping[str, Any],
    num_target_layers: int | None,
    where: str,
    kind: str,
    architectures: Sequence[str] = (),
) -> dict[str, Any]:
    """The config fields that all heads of decoder layers have. CheckpointError for missing fields
    of config.json, or for an architecture that is not among `architectures`."""
    if architectures and (found := architecture_of(fields)) not in architectures:
        raise CheckpointError(
            f"{where}: architectures is {found!r}; {kind} has one of {', '.join(architectures)}"
        )
    require(
        fields,
        ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        where,
        kind,
    )
    return dict(
        vocab_size=fields["vocab_size"],
        draft_vocab_size=fields.get("draft_vocab_size") or fields["vocab_size"],
        target_hidden_size=fields.get("target_hidden_size") or fields["hidden_size"],
        num_target_layers=target_layers(fields, num_target_layers, where),
        dtype=dtype_of(fields),
        **decoder_fields(fields),
    )


def same_names(shapes: Mapping[str, tuple[int, ...]]) -> Table:
    """A table whose tensors have the same names in the file and in the module."""
    return {name: (name, shape) for name, shape in shapes.items()}


def layer_rows(
    config: Any, *, inputs: int | None = None, input_norm: bool = True
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one `speculators.layers.decoder.DecoderLayer`. `inputs`: input width of
    its projections."""
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
