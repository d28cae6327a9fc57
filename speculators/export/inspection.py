"""Inspects any drafter's folder without running it: the family, the sizes, and every fault.

Nothing is unpickled, and an error ends the search only where nothing else can be read. What is
right, and what engines make of a fault, the layouts say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.speculators.config import DecoderConfig, DrafterConfig, rope_of, with_factors_for
from draftsmith.speculators.errors import CheckpointError, DraftsmithError
from draftsmith.speculators.export import other_target, resolve
from draftsmith.speculators.export.field_kinds import check_kinds
from draftsmith.speculators.export.formats import format_of, layout_of
from draftsmith.speculators.export.headers import Header, pickled_files, read_headers
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Layout
from draftsmith.speculators.export.layouts.format import Format
from draftsmith.speculators.export.quantisation import split_quantisation
from draftsmith.speculators.export.serving_commands import other_table
from draftsmith.speculators.vocab.draft_vocab import from_offsets

CONFIG = "config.json"


@dataclass
class Inspection:
    """The contents of a folder and its faults. `layout` and `config`: None where unknown."""

    folder: Path
    faults: list[Fault] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)  # config.json
    headers: dict[str, Header] = field(default_factory=dict)
    layout: Layout | None = None
    config: DrafterConfig | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by their names in the layout

    @property
    def family(self) -> str | None:
        """Of the drafter; None if no layout knows the folder."""
        return self.layout.family if self.layout else None

    @property
    def sound(self) -> bool:
        """True without a fault; warnings do not count."""
        return all(fault.warning for fault in self.faults)

    @property
    def section(self) -> Mapping[str, Any]:
        """The section `draftsmith` of config.json."""
        return self.fields.get("draftsmith") or {}

    @property
    def target_name(self) -> str | None:
        """The target that config.json names, here or in the speculators format."""
        verifier = (self.fields.get("speculators_config") or {}).get("verifier") or {}
        return (self.section.get("target") or {}).get("name_or_path") or verifier.get(
            "name_or_path"
        )

    @property
    def holds_target(self) -> bool:
        """True if the folder is a target's checkpoint that has a drafter of its own."""
        return self.layout is not None and self.layout.holds_target(set(self.headers))

    def add(self, where: str, text: str, engines: str = "", *, warning: bool = False) -> None:
        """A fault more; `engines`: what they make of it."""
        self.faults.append(Fault(where, text, engines, warning))

    @property
    def dtypes(self) -> list[str]:
        """Of the tensors by name, without those of the vocabularies' tables."""
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
    target_weights: str | None = None,
) -> Inspection:
    """Inspects a folder, or a repository on the Hub.

    `target`: a FrozenTarget, or a sketch with its sizes and config. Without one,
    `num_target_layers` helps with heads that do not name their taps. `tokenizer`: the target's, to
    which a mask token is held. `target_weights`: their sha256, if it is known. CheckpointError only
    if there is no such folder."""
    result = Inspection(resolve(path_or_id))
    _read_files(result)
    if not result.fields or not result.headers:
        return result
    try:
        written_as = layout_of(result.fields, set(result.headers), CONFIG)
        result.layout = written_as.layout
        layers = num_target_layers if target is None else target.num_layers
        result.config = _read_config(result, written_as, layers)
        _read_tensors(result, result.layout, result.config)
    except DraftsmithError as error:
        result.add(CONFIG, str(error).removeprefix(f"{CONFIG}: "))
        return result
    _check_vocabulary(result, result.layout, result.config)
    _check_drafts(result, result.config, tokenizer)
    if target is not None:
        result.faults += _differences(result, result.config, target)
    if target_weights is not None and (text := other_target(result.fields, target_weights)):
        result.add("target", text, warning=True)
    return result


# ------------------------------------------------------------------ files


def _read_files(result: Inspection) -> None:
    folder = result.folder
    try:
        fields = json.loads((folder / CONFIG).read_text())
        if not isinstance(fields, dict):
            raise ValueError("expected an object of fields")
        check_kinds(fields, CONFIG)
        result.fields = fields
    except OSError:
        result.add(CONFIG, "there is no config.json; add the drafter's", base.REFUSES)
    except CheckpointError as error:
        result.add(CONFIG, str(error).removeprefix(f"{CONFIG}: "), base.REFUSES)
    except ValueError as error:
        result.add(CONFIG, f"not JSON: {error}; mend it, or copy it anew", base.REFUSES)
    pickles = pickled_files(folder)
    readable = True
    try:
        result.headers = read_headers(folder)
    except CheckpointError as error:
        result.add("*.safetensors", str(error), base.REFUSES)
        readable = False
    for name in pickles:
        if result.headers:  # as the optimizer's states, beside the drafter
            result.add(name, f"{name} is a pickle, not opened; no engine needs it", warning=True)
        else:
            result.add(name, f"{name} is a pickle, not opened: convert it to safetensors")
    if readable and not result.headers and not pickles:
        result.add("*.safetensors", "there is none; add the drafter's", base.REFUSES)


# ------------------------------------------------------------------ config.json and tensors


def _read_config(result: Inspection, written_as: Format, layers: int | None) -> DrafterConfig:
    """The config in the terms of vLLM's own format. DraftsmithError if it cannot be read."""
    layout = written_as.layout
    names = set(result.headers)
    if layout.bare:
        if prefixed := sorted(name for name in names if name.startswith(base.PREFIX)):
            text = f"{prefixed[0]} and {len(prefixed) - 1} more names begin with it; leave it out"
            result.add(base.PREFIX, text, base.REFUSES)
        names = base.bare_names(names)
    fields, quantization = split_quantisation(result.fields)
    plain = dict(written_as.from_engine(fields, CONFIG))
    readable = layout.architectures if format_of(result.fields) != "speculators" else ()
    if readable and (plain.get("architectures") or [None])[0] not in readable:
        text = f"architectures is {plain.get('architectures')}; expected {' or '.join(readable)}"
        result.add("architectures", text, base.REFUSES)
        plain["architectures"] = readable[:1]
    result.faults += written_as.field_faults(result.fields, plain, names)
    section = plain.get("dflash_config") or {}
    ids = plain.get("target_layer_ids") or section.get("target_layer_ids") or ()
    taps = plain.get("eagle_aux_hidden_state_layer_ids") or ()
    stand_in = layers or max([*taps, *(i + 1 for i in ids), 1])
    config = layout.from_config(base.FolderContents(plain, names, CONFIG, stand_in))
    return config.model_copy(update={"quantization": quantization})


def _read_tensors(result: Inspection, layout: Layout, config: DrafterConfig) -> None:
    result.tensors, faults = layout.inspect(config, result.folder)
    result.faults += faults
    d2t = result.tensors.get("d2t")
    if config.reduced_vocabulary and d2t is not None and d2t.shape == (config.draft_vocab_size,):
        _check_d2t(result, d2t.long(), config.vocab_size)


def _check_vocabulary(result: Inspection, layout: Layout, config: DrafterConfig) -> None:
    if config.reduced_vocabulary and layout.reduced_in_engines:
        text = f"it proposes {config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
        result.add("draft_vocab_size", text, layout.reduced_in_engines, warning=True)


def _check_d2t(result: Inspection, d2t: Tensor, vocabulary: int) -> None:
    """`d2t` holds offsets, and `t2d`, if it is there, marks the same tokens."""
    other = "engines draft other tokens than the head meant"
    try:
        ids = from_offsets(d2t, vocabulary, "d2t")
    except CheckpointError as error:
        result.add("d2t", str(error), other)
        return
    listed = result.tensors.get("t2d")
    if listed is None or listed.shape != (vocabulary,):
        return
    if not torch.equal(ids.sort().values, listed.bool().nonzero().flatten()):
        text = "t2d lists other tokens than d2t, which holds offsets: target id - draft id"
        result.add("d2t", text, other)


# ------------------------------------------------------------------ drafts, and the target


def _check_drafts(result: Inspection, config: DrafterConfig, tokenizer: Any) -> None:
    methods = (result.fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = methods[0].get("speculative_tokens") or result.section.get("num_speculative_tokens")
    if drafts and config.max_drafts is not None and drafts > config.max_drafts:
        text = f"{drafts} drafts per round; {config.max_drafts} were trained"
        result.add("num_speculative_tokens", text, "those behind are hardly ever accepted")
    token = getattr(config, "mask_token_id", None)
    if token is None:
        return
    if token >= config.vocab_size:
        text = f"mask_token_id is {token}; the vocabulary has {config.vocab_size} tokens"
        result.add("mask_token_id", text, "vLLM crashes, SGLang refuses it")
    elif tokenizer is not None and (word := _word_in_texts(tokenizer, token)):
        text = f"mask_token_id {token} is {word!r}, which texts contain; train with a reserved one"
        result.add("mask_token_id", text, "unknown slots look like that token")


def _word_in_texts(tokenizer: Any, token: int) -> str | None:
    """The token's text, if prompts and responses contain it: an ordinary token, one that ends or
    fills texts, or one of the chat template's. None for a mask token, a reserved one and a row that
    no token uses."""
    word = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if word is None or token == tokenizer.mask_token_id:
        return None
    added = tokenizer.added_tokens_decoder.get(token)
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    reserved = added is not None and added.special
    if reserved and token not in (*named, tokenizer.unk_token_id):
        return word if word in str(tokenizer.chat_template or "") else None
    return word


def _differences(result: Inspection, config: DrafterConfig, target: Any) -> Iterator[Fault]:
    """Between a drafter and the target that it is held to."""
    name = result.target_name
    if name and Path(name).name != Path(str(target.name_or_path)).name:
        text = f"it was made for {name}; this is {target.name_or_path}"
        yield Fault("target", text, warning=True)
    if config.family == "draft_model":
        model = str(target.name_or_path)
        if why := other_table(config, str(result.folder), model, target.vocab_size):
            yield Fault("vocab_size", why, base.REFUSES)
        return
    made_for = result.section.get("num_target_layers", result.fields.get("num_target_layers"))
    for where, value, expected, engines in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size, "vLLM crashes"),
        ("vocab_size", config.vocab_size, target.vocab_size, "vLLM crashes"),
        ("num_target_layers", made_for, target.num_layers, "engines read other layers"),
    ):
        if value not in (None, expected):
            text = f"{where} is {value}; the target's is {expected}: serve it with its own target"
            yield Fault(where, text, engines)
    if beyond := [tap for tap in config.tap_layers if tap > target.num_layers]:
        text = f"taps {beyond} are beyond the target's {target.num_layers} layers"
        yield Fault("tap_layers", text, "engines crash")
    if not isinstance(config, DecoderConfig) or getattr(config, "target_fields", None) is not None:
        return
    rope = config.rope_parameters
    target_rope = with_factors_for(rope_of(target.config), config.head_dim)
    names = sorted({*target_rope, *rope})
    if differing := [name for name in names if rope.get(name) != target_rope.get(name)]:
        pairs = (f"{name} {rope.get(name)} for {target_rope.get(name)}" for name in differing)
        text = f"rope_parameters: {'; '.join(pairs)}; right only if it was trained so"
        yield Fault("rope_parameters", text, "engines rotate as config.json says")
    most = getattr(target.config, "max_position_embeddings", None)
    if most is not None and config.max_position_embeddings < most:
        text = f"max_position_embeddings is {config.max_position_embeddings}; the target's {most}"
        engines = "vLLM drafts nothing for a whole batch as soon as one text is longer"
        yield Fault("max_position_embeddings", text, engines)
