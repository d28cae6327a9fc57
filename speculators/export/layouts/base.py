"""The base of all layouts: tables of tensors and config fields, written and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from packaging.version import InvalidVersion, Version
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.speculators.config import DrafterConfig, decoder_fields
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.precision import SCALE, in_precision
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.vocab.draft_vocab import from_offsets, load_ids, save_ids, to_offsets

WEIGHTS = "model.safetensors"
NUM_SPECULATIVE_TOKENS = 5  # default drafts of a round

Fields = Mapping[str, Any]  # of config.json
Table = dict[str, tuple[str, tuple[int, ...]]]  # name in the file -> (name in the module, shape)
PREFIX = "model."
REFUSES = "vLLM refuses it"
RANDOM = "vLLM runs with the values that the module was made with, and accepts nothing or less"
ONES = "vLLM runs with ones"
SCORES_ALL = (
    "vLLM and SGLang score all of them: drafts cost more, some are tokens that it was not trained"
    " for, and texts stay the same"
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a folder."""

    where: str  # the field of config.json, the tensor or the file
    text: str  # what is wrong, and what to do where that is not plain
    engines: str = ""  # what engines do with it, where it is known
    warning: bool = False  # it may be right


@dataclass(frozen=True)
class FolderContents:
    """What a config is read from."""

    fields: Fields  # config.json, in the fields of vLLM's own format
    names: set[str]  # of the tensors
    where: str  # the file, for errors
    layers: int | None = None  # of the target, where it is known

    @property
    def section(self) -> Fields:
        """The section `draftsmith`."""
        return self.fields.get("draftsmith") or {}

    @property
    def dtype(self) -> str:
        """Of the weights, as config.json names it; float32 where it does not."""
        return str(self.fields.get("dtype") or self.fields.get("torch_dtype") or "float32")

    @property
    def owns_embeddings(self) -> bool:
        """True if the head has its own embedding, by `draftsmith` or by the tensors."""
        return bool(self.section.get("own_embeddings")) or "embed_tokens.weight" in self.names

    def require(self, *names: str) -> None:
        """CheckpointError unless config.json has all these fields."""
        if missing := [name for name in names if self.fields.get(name) is None]:
            raise CheckpointError(f"fields {', '.join(missing)} are missing", where=self.where)

    def target_layers(self) -> int:
        """The number of the target's layers, from `draftsmith` or from the target at hand."""
        layers = self.section.get("num_target_layers", self.layers)
        if layers is None:
            raise CheckpointError(
                "the number of target layers is missing; pass the target's", where=self.where
            )
        return layers

    def head_fields(self, architectures: Sequence[str] = ()) -> dict[str, Any]:
        """The config fields that all heads of decoder layers have. CheckpointError for missing
        fields of config.json, or for an architecture that is not among `architectures`."""
        fields = self.fields
        if architectures and (architecture := architecture_of(fields)) not in architectures:
            raise CheckpointError(
                f"architectures is {architecture!r}; expected one of {', '.join(architectures)}",
                where=self.where,
            )
        self.require("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        size = self.section.get("draft_vocab_size") or fields.get("draft_vocab_size")
        return dict(
            vocab_size=fields["vocab_size"],
            draft_vocab_size=size or fields["vocab_size"],
            target_hidden_size=fields.get("target_hidden_size") or fields["hidden_size"],
            num_target_layers=self.target_layers(),
            dtype=self.dtype,
            **decoder_fields(fields),
        )


class Layout:
    """The tensors and fields of one family's folder. Module names are those of the family's file.

    `to_config` and `from_config` use the field names of vLLM's own format. A format with fields at
    other places is given the layout (format.py); one with other tensor names has a layout of its
    own, which overrides `name_in_file`."""

    family: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]] = ()  # that are read; the first is written; (): any
    ignored: ClassVar[tuple[str, ...]] = ()  # tensors of other tools that no loader reads
    exact: ClassVar[tuple[str, ...]] = ()  # endings of the names of tensors that stay in float32
    bare: ClassVar[bool] = True  # no tensor of it begins with `model.`
    # Ids of a reduced vocabulary are a file of their own, as engines refuse `d2t`.
    ids_beside: ClassVar[bool] = False
    # What vLLM does without a tensor, by an ending of its name; the first that fits.
    without: ClassVar[Mapping[str, str]] = {"norm.weight": ONES, "": RANDOM}

    # How engines serve the family; of the layout in vLLM's own format.
    vllm_method: ClassVar[Mapping[str, Any]] = {}  # where vLLM's method is not the family's name
    reduced_in_engines: ClassVar[str] = ""  # what they do with a vocabulary they cannot reduce
    in_vllm: ClassVar[bool] = True
    last_vllm: ClassVar[str] = ""  # minor version up to which it does; empty: it still does
    vllm_arguments: ClassVar[str] = ""  # further ones of `vllm serve`
    vllm_samples: ClassVar[bool] = True  # it can sample its drafts, else they are the best tokens
    vllm_note: ClassVar[str] = ""
    # why vLLM does not serve int8 weights of it; empty: it does
    no_vllm_int8: ClassVar[str] = ""
    sglang_algorithm: ClassVar[str | None] = None
    sglang_chain: ClassVar[bool] = True  # SGLang takes the steps of a chain
    sglang_block: ClassVar[str] = ""  # SGLang's flag of the drafts of a block that is cut short

    def no_vllm(self, config: Any) -> str:
        """Why vLLM serves no such drafter in this format, and the remedy; empty: it does."""
        return ""

    def dropped(self, version: str | None) -> str:
        """Why vLLM `version` (such as 0.33.0; None: any) serves it no more; empty: it does."""
        if not (version and self.last_vllm) or minor(version) <= minor(self.last_vllm):
            return ""
        return (
            f"vLLM {version} does not serve {self.family} any more: it was dropped after"
            f" {self.last_vllm}; this project's runtime serves it"
        )

    def sglang_note(self, config: Any) -> str:
        """A remark on how SGLang serves such a drafter; empty: none."""
        return ""

    def no_sglang(self, config: Any) -> str:
        """As `no_vllm`, of SGLang."""
        return ""

    def holds_target(self, names: set[str]) -> bool:
        """True if a folder with these tensors is the target's own checkpoint, drafter included."""
        return False

    # -------------------------------------------------------------- files

    def fitted(self, drafter: Drafter) -> Drafter:
        """The drafter as engines want it beside its target, where one is attached."""
        return drafter

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        """Writes everything but config.json into an empty folder."""
        state = self.unpacked(drafter.state_dict())
        tensors = {
            name: in_precision(name, state[inside], dtype, self.exact).contiguous()
            for name, (inside, _) in self.tensors(config).items()
        }
        tensors |= {name: torch.zeros(s, dtype=dtype) for name, s in self.zeros(config).items()}
        ids = drafter.draft_to_target
        if ids is not None and self.ids_beside:
            save_ids(ids, folder)
        elif ids is not None:
            tensors["d2t"] = to_offsets(ids.cpu())
            listed = torch.zeros(config.vocab_size, dtype=torch.bool)
            tensors["t2d"] = listed.index_fill_(0, ids.cpu(), True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def read(self, drafter: Drafter, folder: Path) -> None:
        """Fills `drafter` from a folder. CheckpointError names every tensor at fault."""
        config = drafter.config
        if config.quantization is not None:
            drafter.take_quantisation(config.quantization)
        tensors = self.canonical(self._stored(config, folder), config)
        refuse(self.faults(tensors, config), folder)
        state = {inside: tensors[name] for name, (inside, _) in self.tensors(config).items()}
        state = dict(self.packed(state))
        if config.reduced_vocabulary and self.ids_beside:
            state["target_ids"] = load_ids(folder, config.draft_vocab_size, config.vocab_size)
        elif config.reduced_vocabulary:
            state["target_ids"] = from_offsets(tensors["d2t"], config.vocab_size, str(folder))
        drafter.load_state_dict(state, strict=True)

    def _stored(self, config: DrafterConfig, folder: Path) -> dict[str, Tensor]:
        """The drafter's tensors as `folder` has them. CheckpointError: one is there twice."""
        tensors: dict[str, Tensor] = {}
        files: dict[str, str] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as reader:
                # (not a dict)
                names = [name for name in reader.keys() if self.belongs(name, config)]  # noqa: SIM118
                for name in names:
                    if name in tensors:
                        raise CheckpointError(
                            f"{name} is in {files[name]} and in {file.name}; remove the file that"
                            " is not the drafter's",
                            where=f"{folder}",
                        )
                    tensors[name] = reader.get_tensor(name)
                    files[name] = file.name
        return tensors

    def faults(self, tensors: Mapping[str, Tensor], config: DrafterConfig) -> list[Fault]:
        """Lists all differences between the tensors and the table."""
        zeros = self.zeros(config)
        shapes = {name: shape for name, (_, shape) in self.tensors(config).items()}
        if config.reduced_vocabulary and not self.ids_beside:
            shapes["d2t"] = (config.draft_vocab_size,)
        faults = [self.missing(name) for name in sorted(set(shapes) - set(tensors))]
        known = {*shapes, *zeros, *self.ignored}
        faults += [self.unexpected(name) for name in sorted(set(tensors) - known)]
        faults += [
            Fault(name, f"{name} is not zero", "vLLM drops it")
            for name in zeros
            if name in tensors and tensors[name].any()
        ]
        for name in shapes:
            if name in tensors and tuple(tensors[name].shape) != shapes[name]:
                faults.append(misshaped(name, tensors[name].shape, shapes[name]))
            elif name in tensors and f"{name}{SCALE}" in shapes:
                if tensors[name].dtype != torch.int8:
                    faults.append(not_int8(name, tensors[name].dtype))
            elif name in tensors and name != "d2t" and not tensors[name].is_floating_point():
                faults.append(not_floating(name, str(tensors[name].dtype).removeprefix("torch.")))
            elif name in tensors and not torch.isfinite(tensors[name].float()).all():
                faults.append(not_finite(name))
        return faults

    def missing(self, name: str) -> Fault:
        """The fault of a tensor that is not there, with what engines do without it."""
        engines = next(does for ending, does in self.without.items() if name.endswith(ending))
        return Fault(name, f"{name} is missing", engines)

    def unexpected(self, name: str) -> Fault:
        """The fault of a tensor that the layout has not."""
        dropped = "vLLM drops it without a word, and drafts with another layer"
        engines = dropped if name.endswith(".bias") else REFUSES
        return Fault(name, f"{name} is unexpected", engines)

    def inspect(self, config: DrafterConfig, folder: Path) -> tuple[dict[str, Tensor], list[Fault]]:
        """The drafter's tensors under the names of `tensors`, and their faults."""
        tensors = self._stored(config, folder)
        if self.bare:
            tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        tensors = self.canonical(tensors, config)
        return tensors, self.faults(tensors, config)

    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        """What `from_config` takes from config.json without a word, and an engine otherwise or not
        at all. `plain`: the fields as `from_engine` returns them; `names`: of the tensors."""
        yield from ()

    # -------------------------------------------------------------- names, shapes and fields

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        """True for a folder of the family, by config.json and the names of the tensors."""
        raise NotImplementedError

    def tensors(self, config: DrafterConfig) -> Table:
        """Every tensor but `d2t`, which is offsets in the file and ids in the module."""
        with torch.device("meta"):
            drafter = family_class(config.family)(config)
            if config.quantization is not None:
                drafter.take_quantisation(config.quantization)
            state = self.unpacked(drafter.state_dict())
        return {
            self.name_in_file(name, config): (name, tuple(tensor.shape))
            for name, tensor in state.items()
            if name != "target_ids"
        }

    def name_in_file(self, name: str, config: Any) -> str:
        """The name in the file of the module's tensor `name`."""
        return name

    def to_config(self, config: DrafterConfig) -> dict[str, Any]:
        """The fields of config.json; what the format lacks is written below `draftsmith`."""
        raise NotImplementedError

    def from_config(self, contents: FolderContents) -> DrafterConfig:
        """The config of a folder. CheckpointError names the field."""
        raise NotImplementedError

    def zeros(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors that the drafter lacks, else random in the engine."""
        return {}

    def check(self, config: Any, format_: str) -> None:
        """ConfigError for a drafter that the format's engines would run wrongly."""

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Converts config.json as `to_config` has it to the fields of this format."""
        return fields

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """The inverse of `to_engine`, also for folders of other tools."""
        return fields

    def belongs(self, name: str, config: Any) -> bool:
        """False for a target's tensors in the same folder, which are not read."""
        return True

    def unpacked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Splits the module's state into the tensors that `tensors` names."""
        return state

    def packed(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of `unpacked`."""
        return state

    def canonical(self, tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        """Renames tensors of published checkpoints to the names of `tensors`."""
        return tensors


# Kinds of attention in `layer_types`.
FULL = "full_attention"
SLIDING = "sliding_attention"


def minor(version: str) -> tuple[int, ...]:
    """The minor version of a vLLM: 0.33.1 -> (0, 33). ConfigError for what is no version."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        raise ConfigError("expected a version such as 0.33", where=f"vLLM {version!r}") from None


def window_of(fields: Mapping[str, Any], where: str) -> int | None:
    """The window of all layers; CheckpointError if only some have one, or of no width."""
    kinds = set(fields.get("layer_types") or [FULL])
    if SLIDING not in kinds:
        return None
    if len(kinds) > 1:
        raise CheckpointError(f"layer_types mixes {FULL} and {SLIDING}; give one kind", where=where)
    if fields.get("sliding_window") is None:
        raise CheckpointError(
            "sliding layers, but sliding_window does not say how wide", where=where
        )
    return fields["sliding_window"]


def other_computation(
    fields: Fields, bias_flags: Sequence[str], names: set[str]
) -> Iterator[Fault]:
    """What vLLM computes otherwise than the layers here, by fields of config.json. `bias_flags`:
    those that give its attention biases."""
    biased = any(name.endswith("q_proj.bias") for name in names)
    for flag in bias_flags:
        if fields.get(flag) and not biased:
            text = f"{flag} is true, and there are no biases of attention; set it to false"
            yield Fault(flag, text, "vLLM adds biases that nothing fills, and accepts nothing")
    activation = fields.get("hidden_act") or "silu"
    if activation != "silu":
        text = f"hidden_act is {activation}; only silu is computed here, too"
        yield Fault("hidden_act", text, REFUSES)
    scale = fields.get("logit_scale")
    if scale not in (None, 1):
        text = f"logit_scale is {scale}, which is not applied here; scale lm_head.weight instead"
        yield Fault("logit_scale", text, "vLLM multiplies logits with it")


def ignored_window(fields: Fields, *, layers: bool = True) -> Iterator[Fault]:
    """A window that vLLM's layers would not have. `layers`: they can have one."""
    listed = layers and SLIDING in (fields.get("layer_types") or [])
    if fields.get("sliding_window") and fields.get("use_sliding_window") is not False:
        if not listed:
            remedy = f"write layer_types: [{SLIDING}] for each layer, or " if layers else ""
            text = f"sliding_window is {fields['sliding_window']}; {remedy}take it away"
            yield Fault("sliding_window", text, "vLLM's layers read every position all the same")


def bare_names(names: set[str]) -> set[str]:
    """Names of tensors without a prefix `model.`, with which some tools write them."""
    return {name.removeprefix(PREFIX) for name in names}


class WeightsError(CheckpointError):
    """Tensors that differ from the table."""

    def __init__(self, folder: str | Path, faults: Sequence[Fault]) -> None:
        super().__init__(
            f"{len(faults)} fault(s) in the weights: " + "; ".join(fault.text for fault in faults),
            where=f"drafter {folder}",
        )
        self.faults = list(faults)


def misshaped(name: str, shape: Sequence[int], expected: Sequence[int]) -> Fault:
    """The fault of a tensor of another shape than the config says."""
    text = f"{name} has shape {list(shape)}, expected {list(expected)}"
    return Fault(name, f"{text}; check the sizes in config.json", REFUSES)


def not_finite(name: str) -> Fault:
    """The fault of a tensor with NaN or infinite values."""
    return Fault(name, f"{name} holds values that are not finite", "engines draft nonsense")


def not_floating(name: str, dtype: str) -> Fault:
    """The fault of weights that are stored as integers."""
    text = (
        f"{name} is stored as {dtype}, expected floating-point numbers: integers lack the scale"
        " that makes weights of them; export the drafter without quantisation"
    )
    return Fault(name, text, "engines draft nonsense, or refuse it")


def not_int8(name: str, dtype: torch.dtype) -> Fault:
    """The fault of a weight of another dtype than config.json's `quantization_config` says."""
    text = f"{name} is stored as {str(dtype).removeprefix('torch.')}, expected int8"
    return Fault(name, f"{text}; export the drafter again", REFUSES)


def refuse(faults: Sequence[Fault], folder: str | Path) -> None:
    """WeightsError with all faults, if there are any."""
    if faults:
        raise WeightsError(folder, faults)


def own_fields(config: DrafterConfig) -> dict[str, Any]:
    """The section `draftsmith`: the family, and fields that reveal a lost tensor on reading."""
    section: dict[str, Any] = {
        "family": config.family,
        "num_target_layers": config.num_target_layers,
    }
    return {"draftsmith": section | ({"own_embeddings": True} if config.own_embeddings else {})}


def reduced_field(config: DrafterConfig) -> dict[str, Any]:
    """The field of a reduced vocabulary in formats that have none; empty for a whole one."""
    return {"draft_vocab_size": config.draft_vocab_size} if config.reduced_vocabulary else {}


def architecture_of(fields: Mapping[str, Any]) -> str:
    """The first of `architectures` of a config.json, or 'missing'."""
    return (fields.get("architectures") or ["missing"])[0]
