"""What can be wrong with a drafter's folder, whether vLLM would notice, and what to do: one table.

`draftsmith inspect` names faults by it and docs/formats.md prints it. What it says of vLLM was seen in vLLM 0.32 where
`tests/vllm` can show it, and read in its loaders elsewhere. Opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REFUSES, CRASHES, SWALLOWS, HARMLESS = "refuses", "crashes", "swallows", "harmless"


class Kind(NamedTuple):
    """One kind of fault."""

    meaning: str
    vllm: str  # what vLLM does: refuses to load, crashes when it drafts, swallows it, or harmless there
    then: str  # what comes of it in vLLM
    todo: str
    exceptions: tuple[tuple[str, str, str], ...] = ()  # (family, vllm, then) where a family differs
    warning: bool = False  # no fault by itself


_UNTRAINED = "the module runs with the values it was made with, and accepts nothing or less"
_NOTHING = "it loads and accepts next to nothing"
_EXPORT = "export the drafter again"
_STRICT = (  # families whose loaders in vLLM want every tensor
    ("medusa", REFUSES, "a weight is not initialised from the checkpoint"),
    ("mtp", REFUSES, "a weight is not initialised from the checkpoint"),
    ("draft_model", REFUSES, "a weight is not initialised from the checkpoint"),
)

KINDS: dict[str, Kind] = {
    "no_config": Kind("no config.json that can be read", REFUSES, "no configuration", "add the drafter's config.json"),
    "no_weights": Kind("no weights", REFUSES, "no model weights", "add the drafter's *.safetensors"),
    "pickled_weights": Kind(
        "weights in a pickle, which is never opened here",
        SWALLOWS,
        "it unpickles them (tensors only)",
        "convert them to safetensors where the file can be trusted, and take the pickle away",
    ),
    "damaged_file": Kind("a file that is no safetensors", REFUSES, "it cannot be read", "copy or download it again"),
    "missing_file": Kind(
        "the index names a file that is not there", REFUSES, "tensors are missing", "copy or download the folder again"
    ),
    "unknown_drafter": Kind(
        "not a drafter of a family known here", REFUSES, "it has no class for it", "check `architectures`"
    ),
    "architecture": Kind(
        "`architectures` names a class that does not load this family",
        REFUSES,
        "it has no such class for the method",
        "write the name that docs/formats.md has for the format",
    ),
    "field": Kind(
        "a field of config.json is missing or wrong", REFUSES, "shapes do not fit", "put in the value that fits"
    ),
    "changed_field": Kind(
        "a field of the layers is not what the drafter was trained with",
        SWALLOWS,
        "it drafts with the wrong layer and accepts less",
        "put back what it was trained with",
    ),
    "missing_taps": Kind(
        "no tap ids",
        SWALLOWS,
        "it taps layers of its own choice, 2, n/2 and n-3",
        "write eagle_aux_hidden_state_layer_ids with the layers it was trained on",
    ),
    "ambiguous_taps": Kind(
        "tap ids in eagle_config alone",
        SWALLOWS,
        "it reads them as taps; SGLang, whose section it is, as layer outputs, one more",
        "write eagle_aux_hidden_state_layer_ids at the top with the taps it was trained on",
        warning=True,
    ),
    "tap_count": Kind(
        "num_aux_hidden_states, the tap ids and fc disagree",
        REFUSES,
        "fc has another shape",
        "write the number of taps that fc was trained for, and as many ids",
    ),
    "taps_out_of_range": Kind(
        "a tap that the target does not have",
        CRASHES,
        "that state is never captured, so that fc gets too little",
        "check the numbering, and that this is the target",
    ),
    "missing_tensor": Kind("a tensor is missing", SWALLOWS, _UNTRAINED, _EXPORT, _STRICT),
    "missing_norm": Kind("a norm is missing", SWALLOWS, "it runs with ones", _EXPORT, _STRICT),
    "missing_d2t": Kind(
        "a reduced vocabulary without d2t",
        SWALLOWS,
        "every draft id is taken for a target id, and next to nothing is accepted",
        "add d2t (offsets: target id - draft id)",
    ),
    "missing_lm_head": Kind(
        "a reduced vocabulary without lm_head",
        SWALLOWS,
        _NOTHING,
        _EXPORT,
    ),
    "unexpected_tensor": Kind(
        "a tensor that the format does not have",
        REFUSES,
        "it has no module of that name",
        "take it away, or set the switch it belongs to",
        (("medusa", SWALLOWS, "it is not read"),),
    ),
    "prefix": Kind(
        "names begin with `model.`", REFUSES, "it has no module of that name", "write the names without the prefix"
    ),
    "dropped_bias": Kind(
        "a bias whose module has none",
        SWALLOWS,
        "the bias is dropped without a word, and less is accepted than it was trained to",
        "train without it, or serve it with Draftsmith",
    ),
    "medusa_bias": Kind(
        "biases of the blocks, but medusa_fc_bias is not true",
        SWALLOWS,
        "the biases are dropped without a word",
        "set medusa_fc_bias: true",
    ),
    "shape": Kind("a tensor of another shape", REFUSES, "the shapes do not fit", "check sizes in config.json"),
    "not_finite": Kind(
        "values that are not finite", SWALLOWS, "it drafts nonsense", "go back to an earlier checkpoint"
    ),
    "not_zero": Kind("a bias that the drafter does not have is not zero", SWALLOWS, "it is dropped", _EXPORT),
    "all_zero": Kind("a matrix of zeros", SWALLOWS, _NOTHING, "the tensor was never written: export again"),
    "zero_d2t": Kind(
        "d2t with the full vocabulary",
        REFUSES,
        "it has no place for it",
        "leave d2t out; draft_vocab_size equals vocab_size",
    ),
    "d2t_ids": Kind(
        "d2t holds target ids instead of offsets",
        SWALLOWS,
        "draft ids are mapped to other tokens, or beyond the vocabulary",
        "subtract each draft id from its entry",
    ),
    "d2t_invalid": Kind(
        "d2t maps outside the vocabulary, or two draft ids to one token",
        SWALLOWS,
        "drafts are other tokens than the head meant",
        _EXPORT,
    ),
    "t2d_disagrees": Kind(
        "t2d names other tokens than d2t", HARMLESS, "t2d is not read", "find out which of the two is right"
    ),
    "other_dtype": Kind(
        "tensors are not in the precision that config.json names",
        HARMLESS,
        "it casts to the target's anyway",
        "write `dtype` as the tensors are",
        warning=True,
    ),
    "norm_ones": Kind(
        "a norm whose weights are all one, as if it had been left out",
        SWALLOWS,
        "it runs with ones",
        "compare with the checkpoint that was trained",
        warning=True,
    ),
    # against a target
    "wrong_width": Kind(
        "made for a target of another width",
        CRASHES,
        "states do not fit fc: it crashes, or accepts nothing",
        "serve it with the target it was made for",
    ),
    "wrong_vocabulary": Kind(
        "made for another vocabulary size",
        CRASHES,
        "its logits have another width than the target's",
        "serve it with the target it was made for",
    ),
    "wrong_depth": Kind(
        "made for a target of another number of layers",
        SWALLOWS,
        "it reads other layers",
        "serve it with the target it was made for",
    ),
    "rope": Kind(
        "rotary parameters unlike the target's",
        SWALLOWS,
        "it rotates as config.json says; right only if it was trained so",
        "write the target's, if it was trained with them",
    ),
    "short_positions": Kind(
        "max_position_embeddings is below the target's",
        SWALLOWS,
        "it drafts nothing for a whole batch as soon as one text is longer",
        "write the target's, if it was trained on rows as long",
    ),
    "other_target": Kind(
        "config.json names another target", HARMLESS, "it serves whatever it is given", "check the name", warning=True
    ),
}


@dataclass(frozen=True)
class Fault:
    """One fault of one folder: what and where, and what the table says of its kind for the family."""

    kind: str
    what: str
    vllm: str
    then: str
    todo: str
    warning: bool


def fault(kind: str, what: str, family: str | None = None) -> Fault:
    """The fault with what vLLM makes of it in a drafter of `family`."""
    entry = KINDS[kind]
    vllm, then = entry.vllm, entry.then
    for name, does, comes in entry.exceptions:
        if name == family:
            vllm, then = does, comes
    return Fault(kind, what, vllm, then, entry.todo, entry.warning)
