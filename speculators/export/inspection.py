"""Inspects any drafter's folder without running it: the family, the sizes, and every fault.

Nothing is unpickled, and no error ends the search: one fault must not hide the next. The layouts
that write and read a format define what is right; faults.py has the engines' reactions to each
fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.config import DecoderConfig, DrafterConfig, default_tap_layers, rope_of
from speculators.errors import CheckpointError, DraftsmithError
from speculators.export import resolve
from speculators.export.faults import Fault, fault
from speculators.export.formats import LAYOUTS, layout_of
from speculators.export.headers import PICKLES, Header, other_dtypes, pickled_files, read_headers
from speculators.export.layouts.base import Layout, WeightFault, WeightsError, changed_fields
from speculators.export.layouts.dflash import ANCHOR, SLIDING, DFlashLayout, DSparkLayout
from speculators.export.layouts.dflash import SECTION as BLOCK_SECTION
from speculators.export.layouts.eagle3 import ARCHITECTURES, SECTION, TAPS
from speculators.export.layouts.peagle import MASK, TOKENS
from speculators.export.layouts.sglang import EAGLE
from speculators.export.layouts.speculators import NON_CAUSAL
from speculators.export.serving_commands import DEPTHS
from speculators.registry import family_class
from speculators.vocab.draft_vocab import from_offsets

PREFIX = "model."
BLOCKS = ("dflash", "dflash2", "dspark")
EAGLE3S = ("eagle3", "peagle")
BARE = ("eagle", *EAGLE3S, *BLOCKS)  # families whose tensors have names without the prefix
COUNT = "num_aux_hidden_states"


@dataclass
class Inspection:
    """The contents of a folder and its faults. `layout` and `config` are None where the files do
    not say enough."""

    folder: Path
    faults: list[Fault] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)  # config.json
    headers: dict[str, Header] = field(default_factory=dict)
    layout: Layout | None = None
    config: DrafterConfig | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by their names in the layout

    @property
    def family(self) -> str | None:
        return self.layout.family if self.layout else None

    @property
    def sound(self) -> bool:
        return all(fault.warning for fault in self.faults)

    @property
    def own(self) -> Mapping[str, Any]:
        """The section `draftsmith` of config.json."""
        return self.fields.get("draftsmith") or {}

    @property
    def target_name(self) -> str | None:
        """The target that config.json names, here or in the speculators format."""
        verifier = (self.fields.get("speculators_config") or {}).get("verifier") or {}
        return (self.own.get("target") or {}).get("name_or_path") or verifier.get("name_or_path")

    def add(self, kind: str, what: str) -> None:
        self.faults.append(fault(kind, what, self.family))

    @property
    def dtypes(self) -> list[str]:
        return sorted(
            {header.dtype for name, header in self.headers.items() if name not in ("d2t", "t2d")}
        )

    @property
    def parameters(self) -> int:
        """The number of values in the drafter's own tensors."""
        shapes = {name: tensor.shape for name, tensor in (self.tensors or self.headers).items()}
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d"))


def inspect_folder(
    path_or_id: str | Path,
    target: Any = None,
    *,
    num_target_layers: int | None = None,
    tokenizer: Any = None,
) -> Inspection:
    """Inspects a folder, or a repository on the Hub.

    `target`: a FrozenTarget, or a sketch with its sizes and config. Without one,
    `num_target_layers` helps with heads that do not name their taps. `tokenizer`: the target's, to
    which a mask token is held. CheckpointError only if there is no such folder."""
    result = Inspection(resolve(path_or_id))
    layers = num_target_layers if target is None else target.num_layers
    _read_files(result, path_or_id)
    if not result.fields or not result.headers:
        return result
    result.layout = _recognise(result)
    if result.layout is None:
        return result
    result.config = _read_config(result, result.layout, layers)
    if result.config is not None:
        _read_tensors(result, result.layout, result.config)
        _check_drafts(result, result.config, tokenizer)
        if target is not None:
            _compare(result, result.config, target)
    return result


# ------------------------------------------------------------------ files


def _read_files(result: Inspection, path_or_id: str | Path) -> None:
    folder = result.folder
    try:
        fields = json.loads((folder / "config.json").read_text())
        if not isinstance(fields, dict):
            raise ValueError("expected an object of fields")
        result.fields = fields
    except OSError:
        result.add("no_config", "there is no config.json")
    except ValueError as error:
        result.add("damaged_config", f"config.json: {error}")
    pickles = pickled_files(folder) or (
        [] if Path(path_or_id).is_dir() else _pickles_on_the_hub(str(path_or_id))
    )
    if pickles:
        result.add("pickled_weights", f"{', '.join(pickles)}: pickled weights, not opened")
    try:
        result.headers = read_headers(folder)
    except CheckpointError as error:
        result.add("damaged_file", str(error))
        return
    if not result.headers and not pickles:
        result.add("no_weights", "there is no *.safetensors file")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        named = set((json.loads(index.read_text()).get("weight_map") or {}).values())
        if lost := sorted(name for name in named if not (folder / name).exists()):
            result.add("missing_file", f"{index.name} names {', '.join(lost)}, which is not there")


def _pickles_on_the_hub(repository: str) -> list[str]:
    """The pickles of a repository without safetensors; only JSON and safetensors were
    downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        files = HfApi().list_repo_files(repository)
    except (HfHubHTTPError, HFValidationError, OSError):
        return []  # offline
    pickles = [name for name in files if any(fnmatch(name, pattern) for pattern in PICKLES)]
    return [] if any(name.endswith(".safetensors") for name in files) else pickles


# ------------------------------------------------------------------ which drafter it is

# Family -> the sign of its folders, where config.json does not name it; the first that fits.
_SIGNS: dict[str, Callable[[set[str], Mapping[str, Any]], bool]] = {
    "mlp": lambda names, fields: any(name.startswith("speculator.") for name in names),
    "medusa": lambda names, fields: any(
        name.startswith(("blocks.", "lm_heads.")) for name in names
    ),
    "mtp": lambda names, fields: any(
        name.startswith(("model.mtp_layers.", "mtp.")) for name in names
    ),
    "dspark": lambda names, fields: any(name.startswith("markov_head.") for name in names),
    "dflash2": lambda names, fields: any(name.startswith("candidate_selector.") for name in names),
    "dflash": lambda names, fields: "hidden_norm.weight" in names or BLOCK_SECTION in fields,
    "peagle": lambda names, fields: MASK in names or any(name in fields for name in TOKENS),
    "eagle3": lambda names, fields: bool(
        {"d2t", "t2d"} & names
        or any(
            name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in names
        )
        or any(name in fields for name in (TAPS, "draft_vocab_size", "eagle_config"))
    ),
    "eagle": lambda names, fields: (
        "fc.weight" in names or "Eagle" in str(fields.get("architectures"))
    ),
}


def _recognise(result: Inspection) -> Layout | None:
    """The layout of the folder; None, and a fault, if there is none."""
    names, fields = set(result.headers), result.fields
    family = next((family for family, fits in _SIGNS.items() if fits(_bare(names), fields)), None)
    try:
        layout = layout_of(fields, names, str(result.folder))
    except DraftsmithError as error:
        if family is None:
            result.add("unknown_drafter", str(error))
            return None
        layout = LAYOUTS["vllm", family]
    if family in BARE and layout.family == "draft_model":
        layout = LAYOUTS["vllm", family]
    result.layout = layout
    if layout.family in BARE and (prefixed := sorted(n for n in names if n.startswith(PREFIX))):
        result.add(
            "prefix", f"{prefixed[0]} and {len(prefixed) - 1} more names begin with {PREFIX}"
        )
    return layout


def _bare(names: set[str]) -> set[str]:
    return {
        name.removeprefix(PREFIX) if not name.startswith("model.mtp_layers.") else name
        for name in names
    }


# ------------------------------------------------------------------ config.json


def _read_config(result: Inspection, layout: Layout, layers: int | None) -> DrafterConfig | None:
    """The config, read after faults that would hide others were mended in memory; None if it cannot
    be read."""
    where = "config.json"
    names = _bare(set(result.headers)) if layout.family in BARE else set(result.headers)
    try:
        plain = dict(layout.plain(result.fields, where))
    except DraftsmithError as error:
        result.add("missing_taps" if TAPS in str(error) else "field", str(error))
        return None
    usable = _usable_architectures(layout)
    if usable and (plain.get("architectures") or [None])[0] not in usable:
        result.add(
            "architecture",
            f"architectures is {plain.get('architectures')}; expected {' or '.join(usable)}",
        )
        plain["architectures"] = [usable[0]]
    if layout.family in EAGLE3S:
        _check_taps(result, plain, layers)
    if layout.family in BLOCKS:
        _check_block(result, plain, layers)
    elif layout.family in (*EAGLE3S, "eagle"):
        _check_window(result, plain)
    if layout.family in (*BLOCKS, "peagle"):
        _check_mask_token(result, plain)
    wide, theirs = plain.get("hidden_size"), plain.get("target_hidden_size")
    if layout.family in BLOCKS and theirs and wide != theirs:
        result.add("other_width", f"hidden_size is {wide}, target_hidden_size {theirs}")
        return None
    outputs = (
        plain.get("target_layer_ids")
        or (plain.get(BLOCK_SECTION) or {}).get("target_layer_ids")
        or ()
    )
    stand_in = layers or max([*(plain.get(TAPS) or ()), *(i + 1 for i in outputs), 1])
    try:
        # `plain` is in the terms of vLLM's own format, whichever the folder's is
        config = LAYOUTS["vllm", layout.family].from_config(plain, names, where, stand_in)
    except DraftsmithError as error:
        result.add("field", str(error))
        return None
    if layout.family == "eagle" and layout.format == "vllm":
        given: Any = config
        if given.fc_bias:
            result.add("dropped_bias", "fc.bias: vLLM's fc has none")
        if given.attention_bias and not (
            result.fields.get("qkv_bias") or result.fields.get("attention_bias")
        ):
            result.add(
                "dropped_bias",
                "layers.*.self_attn.*.bias: vLLM reads them with qkv_bias: true only",
            )
    for name, value, trained in changed_fields(result.fields, config):
        result.add("changed_field", f"{name} is {value}, and was {trained} in training")
    if (
        layout.family == "medusa"
        and config.model_dump()["fc_bias"]
        and not result.fields.get("medusa_fc_bias")
    ):
        result.add(
            "medusa_bias", "the blocks have biases, and medusa_fc_bias is not true in config.json"
        )
    return config


def _usable_architectures(layout: Layout) -> tuple[str, ...]:
    """The architectures under which vLLM and this project read the layout; empty: any."""
    if layout.family in EAGLE3S:
        return ARCHITECTURES
    if isinstance(layout, DFlashLayout):
        return (layout.architecture,)
    if layout.family == "eagle":
        return (
            (EAGLE,) if layout.format == "sglang" else ("EagleLlamaForCausalLM", "LlamaForCausalLM")
        )
    return ("MedusaModel",) if layout.family == "medusa" else ()


def _check_taps(result: Inspection, plain: dict[str, Any], layers: int | None) -> None:
    """Compares the tap ids, their number and fc's width; leaves as many ids in `plain` as fc was
    made for."""
    taps, count = list(plain.get(TAPS) or ()), plain.get(COUNT)
    width = plain.get("target_hidden_size") or plain.get("hidden_size")
    fc = result.headers.get("fc.weight") or result.headers.get(f"{PREFIX}fc.weight")
    read = fc.shape[1] // width if fc is not None and len(fc.shape) == 2 and width else None
    numbers = {
        f"{COUNT} is {count}": count or 3,
        f"fc reads {read}": read,
        f"there are {len(taps)} tap ids": len(taps),
    }
    numbers = {text: number for text, number in numbers.items() if number}
    if len(set(numbers.values())) > 1:
        result.add("tap_count", "; ".join(numbers))
    if not taps:
        result.add("missing_taps", f"{TAPS} is not in config.json")
    elif (
        not result.fields.get(TAPS) and result.layout is not None and result.layout.format == "vllm"
    ):
        result.add(
            "ambiguous_taps",
            f"{SECTION}.{TAPS} is {[tap - 1 for tap in taps]}, taken for taps {taps}",
        )
    wanted = read or len(taps) or 3
    if len(taps) != wanted:
        default = default_tap_layers(layers or 32)
        plain[TAPS] = default if len(default) == wanted else list(range(wanted))
    if layers is not None and (beyond := [tap for tap in taps if not 0 <= tap <= layers]):
        result.add(
            "taps_out_of_range",
            f"taps {taps}: {beyond} outside 0..{layers}, the layers of the target",
        )
        plain[TAPS] = default_tap_layers(layers) if wanted == 3 else list(range(wanted))
    if layers is not None and result.own.get("num_target_layers", layers) != layers:
        plain["draftsmith"] = {**result.own, "num_target_layers": layers}


def _check_window(result: Inspection, plain: dict[str, Any]) -> None:
    """A window that vLLM's layers would not have."""
    window, sliding = plain.get("sliding_window"), SLIDING in (plain.get("layer_types") or [])
    eagle = result.layout is not None and result.layout.family == "eagle"
    if window and plain.get("use_sliding_window") is not False and (eagle or not sliding):
        result.add("window_ignored", f"sliding_window is {window}")


# ------------------------------------------------------------------ fields of block drafters


def _check_block(result: Inspection, plain: dict[str, Any], layers: int | None) -> None:
    """What engines take from config.json without a word; mends what would hide further faults in
    `plain`."""
    section = dict(plain.get(BLOCK_SECTION) or {})
    if (
        sizes := {size for size in (plain.get("block_size"), section.get("block_size")) if size}
    ) and len(sizes) > 1:
        result.add(
            "block_size",
            f"block_size is {plain['block_size']}, below {BLOCK_SECTION} {section['block_size']}",
        )
    if isinstance(result.layout, DSparkLayout):
        fields = (*DSparkLayout.own, "block_size")
        if nested := [name for name in fields if name in section and plain.get(name) is None]:
            result.add("nested_fields", f"{', '.join(nested)}: below {BLOCK_SECTION} alone")
    elif section.get(ANCHOR) or plain.get(ANCHOR):
        result.add("slot_layout", f"{ANCHOR} is true")
        section[ANCHOR] = plain[ANCHOR] = False
    sliding = SLIDING in (plain.get("layer_types") or [])
    if result.fields.get(NON_CAUSAL) is False and not (sliding or result.own):
        result.add(
            "causal_implied",
            f"{NON_CAUSAL} is false: in vLLM the block is causal, in speculators it is not",
        )
    _check_causality(result, plain.get("is_causal"), section.get("causal"), sliding)
    window = plain.get("sliding_window")
    if (
        sliding
        and window
        and not plain.get("use_sliding_window")
        and not section.get("swa_window_size")
    ):
        result.add(
            "window_dropped", f"sliding_window is {window}, and use_sliding_window is not true"
        )
    where = section if section.get("target_layer_ids") else plain
    ids = list(where.get("target_layer_ids") or ())
    if (others := plain.get(TAPS)) and list(others) != [i + 1 for i in ids]:
        result.add("tap_ids_disagree", f"{TAPS} is {list(others)}, target_layer_ids {ids}")
    said = plain.get("num_target_layers") or result.own.get("num_target_layers")
    known = layers or said
    if known is not None and (beyond := [i for i in ids if not -1 <= i < known]):
        result.add(
            "taps_out_of_range",
            f"target_layer_ids {ids}: {beyond} outside 0..{known - 1}, the target's layers",
        )
        where["target_layer_ids"] = list(range(len(ids)))
        plain["num_target_layers"] = max(said or known, len(ids))
    elif known is not None and known - 1 in ids:
        result.add("late_taps", f"target_layer_ids {ids}: {known - 1} is the target's last layer")
    if BLOCK_SECTION in plain:
        plain[BLOCK_SECTION] = section


def _check_causality(result: Inspection, top: Any, nested: Any, sliding: bool) -> None:
    """`sliding`: layers are, for which engines take a causal block where nothing is said."""
    if top is None and nested is None:
        kind = "causal" if sliding else "bidirectional"
        result.add(
            "causal_implied", f"neither is_causal nor {BLOCK_SECTION}.causal: taken for {kind}"
        )
    elif top is None and bool(nested) != sliding:
        what = f"{BLOCK_SECTION}.causal is {nested}, and is_causal, which SGLang reads, missing"
        result.add("causal_disagrees", what)
    elif None not in (top, nested) and bool(top) != bool(nested):
        result.add("causal_disagrees", f"is_causal is {top}, {BLOCK_SECTION}.causal {nested}")


def _check_mask_token(result: Inspection, plain: dict[str, Any]) -> None:
    """Compares it with the vocabulary; leaves one that fits."""
    section, size = dict(plain.get(BLOCK_SECTION) or {}), plain.get("vocab_size")
    where = section if section.get("mask_token_id") is not None else plain
    name = next((name for name in TOKENS if where.get(name) is not None), None)
    if name is None or not isinstance(size, int):
        return
    if not isinstance(where[name], int) or not 0 <= where[name] < size:
        result.add("mask_token_range", f"{name} is {where[name]}; the vocabulary has {size} tokens")
        where[name] = 0
    if BLOCK_SECTION in plain:
        plain[BLOCK_SECTION] = section


def _check_drafts(result: Inspection, config: Any, tokenizer: Any) -> None:
    """Drafts and taps that engines do not check, and what SGLang cannot serve."""
    if config.family not in (*BLOCKS, "peagle"):
        return
    methods = (result.fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = methods[0].get("speculative_tokens") or result.own.get("num_speculative_tokens")
    most = next(getattr(config, name) for name in DEPTHS if hasattr(config, name))
    if drafts and drafts > most:
        result.add("too_many_drafts", f"{drafts} drafts per round; {most} were trained")
    if tokenizer is not None and (word := _word_in_texts(tokenizer, config.mask_token_id)):
        result.add("mask_token_in_text", f"mask_token_id {config.mask_token_id} is {word!r}")
    if config.family in BLOCKS and config.reduced_vocabulary:
        result.add(
            "reduced_vocabulary",
            f"draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size}",
        )


def _word_in_texts(tokenizer: Any, token: int) -> str | None:
    """The token's text, if prompts and responses contain it: an ordinary token, one that ends or
    fills texts, or one of the chat template's. None for a mask token, a reserved one and a row that
    no token uses."""
    word = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if word is None or token == tokenizer.mask_token_id:
        return None
    added = tokenizer.added_tokens_decoder.get(token)
    named = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    )
    used = (
        added is None
        or not added.special
        or token in named
        or word in str(tokenizer.chat_template or "")
    )
    return word if used else None


# ------------------------------------------------------------------ tensors


def _read_tensors(result: Inspection, layout: Layout, config: DrafterConfig) -> None:
    if (
        others := other_dtypes(result.fields, result.headers, layout.exact)
    ) and layout.family != "draft_model":
        named = result.fields.get("dtype") or result.fields.get("torch_dtype")
        result.add(
            "other_dtype", f"dtype is {named}, but {others[0]} is {result.headers[others[0]].dtype}"
        )
    faults: list[WeightFault] = []
    if config.family == "draft_model":
        try:  # a whole language model, by loading it under transformers' names
            layout.read(family_class("draft_model")(config), result.folder, [])
        except WeightsError as error:
            faults = error.faults
        except DraftsmithError as error:
            faults = [WeightFault("other", "", str(error))]
    else:
        try:
            tensors = layout.load(config, sorted(result.folder.glob("*.safetensors")))
        except CheckpointError as error:
            result.add("unexpected_tensor", str(error))
            return
        if config.family in BARE:
            tensors = layout.canonical(
                {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, config
            )
        result.tensors, faults = tensors, layout.faults(tensors, config)
    for weight in faults:
        result.add(_kind_of(weight, config), weight.text)
    _check_values(result, config)


def _kind_of(weight: WeightFault, config: DrafterConfig) -> str:
    """The kind, in the table of faults, of a tensor's fault."""
    name = weight.name
    if weight.kind == "missing":
        if name == "d2t":
            return "missing_d2t"
        if name == "lm_head.weight" and config.reduced_vocabulary:
            return "missing_lm_head"
        if name == MASK:
            return "missing_mask_hidden"
        if name.startswith("confidence_head."):
            return "missing_confidence"
        return "missing_norm" if "norm" in name.rsplit(".", 2)[-2] else "missing_tensor"
    if weight.kind == "unexpected":
        if name == "d2t":
            return "zero_d2t"
        return "dropped_bias" if name.endswith(".bias") else "unexpected_tensor"
    return {"other": "missing_tensor"}.get(weight.kind, weight.kind)


def _check_values(result: Inspection, config: DrafterConfig) -> None:
    """Finds values that no training leaves behind: matrices of zeros, norms of ones, impossible
    maps of ids."""
    tensors = {
        name: tensor for name, tensor in result.tensors.items() if tensor.is_floating_point()
    }
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.startswith("blocks.") and not bool(tensor.any()):
            result.add("all_zero", f"{name} is all zeros")
    if ones := [
        name
        for name, tensor in tensors.items()
        if name.endswith("norm.weight") and bool((tensor == 1).all())
    ]:
        result.add("norm_ones", f"{', '.join(ones)}: all ones")
    d2t = result.tensors.get("d2t")
    if config.reduced_vocabulary and d2t is not None and d2t.shape == (config.draft_vocab_size,):
        _check_d2t(result, d2t.long(), config.vocab_size)


def _check_d2t(result: Inspection, d2t: Tensor, vocabulary: int) -> None:
    listed = result.tensors.get("t2d")
    known = (
        None
        if listed is None or listed.shape != (vocabulary,)
        else listed.bool().nonzero().flatten()
    )
    as_ids = bool(((d2t >= 0) & (d2t < vocabulary)).all()) and len(d2t.unique()) == len(d2t)
    try:
        ids = from_offsets(d2t, vocabulary, "d2t")
    except CheckpointError as error:
        result.add("d2t_ids" if as_ids else "d2t_invalid", str(error).removeprefix("d2t: "))
        return
    if known is None or torch.equal(ids.sort().values, known):
        return
    if as_ids and torch.equal(d2t.sort().values, known):
        result.add("d2t_ids", "d2t holds the very ids that t2d names, not offsets")
    else:
        result.add("t2d_disagrees", "t2d names other tokens than d2t")


# ------------------------------------------------------------------ against a target


def _compare(result: Inspection, config: DrafterConfig, target: Any) -> None:
    name = result.target_name
    if name and Path(name).name != Path(str(target.name_or_path)).name:
        result.add("other_target", f"it was made for {name}; this is {target.name_or_path}")
    if config.family == "draft_model":
        return
    if config.target_hidden_size != target.hidden_size:
        wide, theirs = config.target_hidden_size, target.hidden_size
        result.add("wrong_width", f"it reads states {wide} wide; the target's are {theirs}")
    if config.vocab_size != target.vocab_size:
        result.add(
            "wrong_vocabulary",
            f"vocab_size is {config.vocab_size}; the target's is {target.vocab_size}",
        )
    made_for = config.num_target_layers if config.family in BLOCKS else target.num_layers
    if (layers := result.own.get("num_target_layers", made_for)) != target.num_layers:
        result.add(
            "wrong_depth",
            f"it was made for a target of {layers} layers; this one has {target.num_layers}",
        )
    if isinstance(config, DecoderConfig) and getattr(config, "target_fields", None) is None:
        _compare_positions(result, config, target.config)


def _compare_positions(result: Inspection, config: DecoderConfig, target: Any) -> None:
    drafter_rope, target_rope = config.rope_parameters, rope_of(target)
    differences = [
        f"{name} {drafter_rope.get(name)}, the target's {target_rope.get(name)}"
        for name in sorted({*target_rope, *drafter_rope})
        if drafter_rope.get(name) != target_rope.get(name)
    ]
    if differences:
        result.add("rope", f"rope_parameters: {'; '.join(differences)}")
    most, own = getattr(target, "max_position_embeddings", None), config.max_position_embeddings
    if most is not None and own < most:
        result.add("short_positions", f"max_position_embeddings is {own}; the target's {most}")
