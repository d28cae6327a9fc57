"""docs/formats.md, written from the tables that write and read the formats, so that it cannot drift from them.

`python -m speculators.export.format_docs docs/formats.md` writes it; a test holds the file to this text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from speculators.export.faults import KINDS
from speculators.export.formats import FORMATS, LAYOUTS, NATIVE, formats_of
from speculators.export.layouts.base import Layout
from speculators.registry import build_config

INTRODUCTION = f"""# Formats

A drafter is a folder: `config.json` and `*.safetensors`. One table per family and format
(`speculators/export/layouts/`) says which names, shapes and fields are in it; it writes, reads strictly, and made
this page. `export.formats` of a recipe chooses: the first goes to `export`, which is measured, any other to
`export-<format>` beside it. `draftsmith export SOURCE OUT --format F` writes any drafter once more in another one.
Without a word the format is `{NATIVE}`.

| format | for | families |
| --- | --- | --- |
"""
SERVING = """
`draftsmith export` and `draftsmith inspect` print how to serve what they wrote or looked at, in vLLM, SGLang and this
runtime; `draftsmith inspect ngram` (`suffix`, `lookahead`) does for methods that have no folder. SGLang's format is
from reading its loaders; its engine is not among the project's tests.

Tap i is `hidden_states[i]` of transformers, 0 the embedding output, in vLLM's formats and here; SGLang counts layer
outputs, i - 1. Heads carry the target's rotary parameters with their scaling, its head_dim and eps; what a head was
trained with is repeated below `draftsmith`, and a folder whose fields no longer agree is refused by name. A head
rotates all of each attention head: published ones that rotate a part are refused.

Letters: H width of the head, T width of the target, V vocabulary of the target, D draft vocabulary, I width of the MLP,
d head_dim, h and g attention and key/value heads, r a rank; three taps. The last column says what a tensor is there
with.
"""
INSPECT = """
## What can be wrong

`draftsmith inspect DIR` names these in anybody's folder, or repository on the Hub; exit code 1 if there is a fault.
`--model TARGET` compares it with the target's configuration as well. *Swallows*: vLLM 0.32 serves the folder and says
nothing. Warnings are marked °.

| fault | | vLLM | what comes of it | what to do |
| --- | --- | --- | --- | --- |
"""
SYMBOLS = {
    "hidden_size": "H", "target_hidden_size": "T", "vocab_size": "V", "draft_vocab_size": "D", "intermediate_size": "I",
    "head_dim": "d", "num_attention_heads": "h", "num_key_value_heads": "g", "inner_dim": "I", "markov_rank": "r",
    "selector_rank": "r",
}  # fmt: skip
EAGLE3_SWITCHES = ("norm_before_fc", "fc_norm", "qk_norm", "own_embeddings")
_DECODER = dict(
    intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
_COMMON = dict(vocab_size=100, draft_vocab_size=100, hidden_size=32, target_hidden_size=32, num_target_layers=8)
_BLOCK = dict(tap_layers=(1, 2, 3), block_size=8, mask_token_id=99)
# Of each family a small drafter, and what is switched on for the tensors that are not always there.
SAMPLES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "eagle3": (
        dict(**_COMMON, **_DECODER, tap_layers=(1, 2, 3)) | dict(draft_vocab_size=50),
        [dict(num_layers=2), *({switch: True} for switch in EAGLE3_SWITCHES)],
    ),
    "eagle": (
        dict(**_COMMON, **_DECODER),
        [dict(num_layers=2), dict(fc_bias=True), dict(attention_bias=True), dict(own_embeddings=True)],
    ),
    "medusa": (dict(**_COMMON, num_heads=1, fc_bias=False), [dict(fc_bias=True), dict(shared_lm_head=True)]),
    "mlp": (dict(**_COMMON, inner_dim=16, n_predict=1), [dict(n_predict=2)]),
    "mtp": (dict(**_COMMON, **_DECODER), []),
    "peagle": (
        dict(**_COMMON, **_DECODER, tap_layers=(1, 2, 3), num_depths=4, mask_token_id=99) | dict(draft_vocab_size=50),
        [dict(num_layers=2), *({switch: True} for switch in EAGLE3_SWITCHES)],
    ),
    "dflash": (dict(**_COMMON, **_DECODER, **_BLOCK), [dict(draft_vocab_size=50)]),
    "dspark": (
        dict(**_COMMON, **_DECODER, **_BLOCK, markov_rank=4),
        [dict(draft_vocab_size=50), dict(markov_head_type="gated"), dict(markov_head_type="rnn")],
    ),
    "dflash2": (dict(**_COMMON, **_DECODER, **_BLOCK, selector_rank=4), []),
}


NOTES = {
    "mtp": "The `mimo` layout, which can be added to any target. Modules of the target's own kind (`deepseek_v3`, "
    "`qwen3_next`) have the names and tensors of its layer: `speculators/export/layouts/mtp.py`, `NAMES`."
}


class Size(int):
    """A size that remembers how it was made."""

    text: str

    def __new__(cls, value: int, text: str) -> Size:
        size = super().__new__(cls, value)
        size.text = text
        return size

    def __mul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"{self.text}·{getattr(other, 'text', other)}")

    def __rmul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"{other}·{self.text}")


class Lettered:
    """A configuration whose sizes are letters; anything else is the configuration's own."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return Size(value, SYMBOLS[name]) if name in SYMBOLS and value is not None else value


def formats_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION.rstrip("\n")]
    for name, purpose in FORMATS.items():
        families = ", ".join(f"`{family}`" for format_, family in LAYOUTS if format_ == name)
        parts.append(f"| `{name}` | {purpose} | {families} |")
    parts.append(SERVING.rstrip("\n"))
    for family in SAMPLES:
        parts += _family(family)
    parts += ["", "## draft_model", "", *_fields(LAYOUTS[NATIVE, "draft_model"])]
    parts += [
        "",
        "Tensors are those of the model's class in transformers. All its formats are one.",
        INSPECT.rstrip("\n"),
    ]
    for kind, entry in KINDS.items():
        verdict = "; ".join([entry.vllm, *(f"{family}: {does}" for family, does, _ in entry.exceptions)])
        mark = "°" if entry.warning else ""
        parts.append(f"| `{kind}`{mark} | {entry.meaning} | {verdict} | {entry.then} | {entry.todo} |")
    return "\n".join(parts) + "\n"


def _family(family: str) -> list[str]:
    lines = ["", f"## {family}", "", *([NOTES[family], ""] if family in NOTES else [])]
    lines += _tensors(LAYOUTS[NATIVE, family])
    lines += ["", *_fields(LAYOUTS[NATIVE, family])]
    for name in formats_of(family):
        layout = LAYOUTS[name, family]
        if name == NATIVE:
            continue
        if (rows := _tensors(layout)) != _tensors(LAYOUTS[NATIVE, family]):
            lines += ["", f"### {family} in the format {name}", "", *rows]
        if layout.meanings != LAYOUTS[NATIVE, family].meanings:
            lines += ["", f"Fields of the format {name}:", "", *_fields(layout)]
        elif rows == _tensors(LAYOUTS[NATIVE, family]):
            lines += ["", f"The format {name} is the same."]
    return lines


def _tensors(layout: Layout) -> list[str]:
    always, switched = SAMPLES[layout.family]
    lines, seen = ["| tensor | shape | with |", "| --- | --- | --- |"], set()
    for switches in [{}, *switched]:
        config = build_config("docs", layout.family, **always | switches)
        lettered: Any = Lettered(config)
        table = {name: shape for name, (_, shape) in layout.tensors(lettered).items()}
        table |= {f"{name} (zeros)": shape for name, shape in layout.zeros(lettered).items()}
        if config.reduced_vocabulary:
            table |= {"d2t (int64, offsets)": (Size(50, "D"),), "t2d (bool, not read)": (Size(100, "V"),)}
        for name, shape in table.items():
            if name not in seen:
                seen.add(name)
                told = ", ".join(getattr(size, "text", str(size)) for size in shape)
                given = ", ".join(f"`{switch}: {json.dumps(value)}`" for switch, value in switches.items())
                lines.append(f"| `{name}` | [{told}] | {given} |")
    return lines


def _fields(layout: Layout) -> list[str]:
    return ["| field | |", "| --- | --- |", *(f"| `{name}` | {told} |" for name, told in layout.meanings.items())]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(formats_markdown(), encoding="utf-8")
