"""A hook of mkdocs: the reference tables of the documentation, made from the code when the site is
built.

A page names a table by `<!-- table: NAME -->` on a line of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import sympy

from inference.evaluation.suites import DIR, SUITES
from inference.report.schema import SUMMARY_KEYS, AcceptanceReport
from speculators.export.faults import KINDS
from speculators.export.formats import FORMATS, LAYOUTS, NATIVE, formats_of
from speculators.export.layouts.base import Layout
from speculators.registry import build_config

MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
SYMBOLS = {  # sizes of a configuration, and their letters in the tables of shapes
    "hidden_size": "H",
    "target_hidden_size": "T",
    "vocab_size": "V",
    "draft_vocab_size": "D",
    "intermediate_size": "I",
    "head_dim": "d",
    "num_attention_heads": "h",
    "num_key_value_heads": "g",
    "inner_dim": "I",
    "markov_rank": "r",
    "selector_rank": "r",
}
_DECODER = dict(
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
_COMMON = dict(
    vocab_size=100, draft_vocab_size=100, hidden_size=32, target_hidden_size=32, num_target_layers=8
)
_BLOCK = dict(tap_layers=(1, 2, 3), block_size=8, mask_token_id=99)
_EAGLE3 = [dict(num_layers=2), dict(sliding_window=64)]
_EAGLE3 += [{key: True} for key in ("norm_before_fc", "fc_norm", "qk_norm", "own_embeddings")]
# A small drafter of each family, and the options that add further tensors to it.
SAMPLES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "eagle3": (
        dict(**_COMMON, **_DECODER, tap_layers=(1, 2, 3)) | dict(draft_vocab_size=50),
        _EAGLE3,
    ),
    "eagle": (
        dict(**_COMMON, **_DECODER),
        [
            dict(num_layers=2),
            dict(fc_bias=True),
            dict(attention_bias=True),
            dict(own_embeddings=True),
        ],
    ),
    "medusa": (
        dict(**_COMMON, num_heads=1, fc_bias=False),
        [dict(fc_bias=True), dict(shared_lm_head=True)],
    ),
    "mlp": (dict(**_COMMON, inner_dim=16, n_predict=1), [dict(n_predict=2)]),
    "mtp": (dict(**_COMMON, **_DECODER), []),
    "peagle": (
        dict(**_COMMON, **_DECODER, tap_layers=(1, 2, 3), num_depths=4, mask_token_id=99)
        | dict(draft_vocab_size=50),
        _EAGLE3,
    ),
    "dflash": (dict(**_COMMON, **_DECODER, **_BLOCK), [dict(draft_vocab_size=50)]),
    "dspark": (
        dict(**_COMMON, **_DECODER, **_BLOCK, markov_rank=4),
        [dict(draft_vocab_size=50), dict(markov_head_type="gated"), dict(markov_head_type="rnn")],
    ),
    "dflash2": (dict(**_COMMON, **_DECODER, **_BLOCK, selector_rank=4), []),
}


class Lettered:
    """A configuration whose sizes are symbols, so that shapes made of them print as products of
    letters."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return (
            sympy.Symbol(SYMBOLS[name], commutative=False)
            if name in SYMBOLS and value is not None
            else value
        )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its tables; mkdocs calls it for every page. Raises KeyError for a table that
    nothing makes."""
    return MARK.sub(lambda match: "\n".join(["", *TABLES[match[1]](), ""]), markdown)


def _table(heads: str, rows: Any) -> list[str]:
    """Lines of a table whose first column is code."""
    rule = " | ".join("---" for _ in heads.split("|"))
    return [
        f"| {heads} |",
        f"| {rule} |",
        *(f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows),
    ]


# ------------------------------------------------------------------ docs/suites.md


def _suites() -> list[str]:
    rows = []
    for name, suite in SUITES.items():
        columns = (
            " or ".join(f"`{column}`" for column in suite.columns)
            or "the files of its members, in one folder"
        )
        category = (
            f"`{suite.category}`"
            if suite.category
            else "one per member"
            if suite.members
            else f"`{name}`"
        )
        rows.append((name, suite.title, columns, category, suite.compare))
    commands = [suite.fetch for suite in SUITES.values() if suite.fetch]
    table = _table("suite | what it is | turns of the user are in | category | compare with", rows)
    return [*table, "", "```bash", f"mkdir -p {DIR}", *commands, "```"]


# ------------------------------------------------------------------ docs/formats.md


def _formats() -> list[str]:
    families = {
        name: ", ".join(f"`{family}`" for format_, family in LAYOUTS if format_ == name)
        for name in FORMATS
    }
    return _table(
        "format | for | families", ((name, told, families[name]) for name, told in FORMATS.items())
    )


def _family(family: str) -> list[str]:
    native = LAYOUTS[NATIVE, family]
    lines = [*_tensors(native), "", *_fields(native)]
    for name in formats_of(family):
        layout = LAYOUTS[name, family]
        if name == NATIVE:
            continue
        if (rows := _tensors(layout)) != _tensors(native):
            lines += ["", f"### {family} in the format {name}", "", *rows]
        if layout.meanings != native.meanings:
            lines += ["", f"Fields of the format {name}:", "", *_fields(layout)]
        elif rows == _tensors(native):
            lines += ["", f"The format {name} is the same."]
    return lines


def _tensors(layout: Layout) -> list[str]:
    always, switched = SAMPLES[layout.family]
    rows: dict[str, tuple[str, str]] = {}
    for switches in [{}, *switched]:
        config = build_config("docs", layout.family, **always | switches)
        lettered: Any = Lettered(config)
        table = {name: shape for name, (_, shape) in layout.tensors(lettered).items()}
        table |= {f"{name} (zeros)": shape for name, shape in layout.zeros(lettered).items()}
        if config.reduced_vocabulary:
            table |= {"d2t (int64, offsets)": ("D",), "t2d (bool, not read)": ("V",)}
        given = ", ".join(f"`{switch}: {json.dumps(value)}`" for switch, value in switches.items())
        for name, shape in table.items():
            rows.setdefault(name, (f"[{', '.join(map(str, shape))}]".replace("*", "·"), given))
    return _table("tensor | shape | with", ((name, *row) for name, row in rows.items()))


def _fields(layout: Layout) -> list[str]:
    return _table("field |", layout.meanings.items())


def _faults() -> list[str]:
    lines = _table("fault | | engines | what comes of it | what to do", ())
    for name, kind in KINDS.items():
        verdict = "; ".join(
            [kind.vllm, *(f"{family}: {does}" for family, (does, _) in kind.exceptions.items())]
        )
        verdict += f"; SGLang: {kind.sglang}" if kind.sglang else ""
        cells = [
            f"`{name}`{'°' if kind.warning else ''}",
            kind.meaning,
            verdict,
            kind.then,
            kind.todo,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------ docs/acceptance-json.md


def _models() -> list[str]:
    """A table of fields for the file, and one for every model inside it."""
    schema, lines = AcceptanceReport.model_json_schema(mode="serialization"), list[str]()
    for name, model in {"The file": schema, **schema["$defs"]}.items():
        fields = (
            (field, _type(value), value["description"])
            for field, value in model["properties"].items()
        )
        about = " ".join(model["description"].split())
        lines += ["", f"### {name}", "", about, "", *_table("field | type | meaning", fields)]
    return lines[1:]


def _type(field: dict[str, Any]) -> str:
    """A field's type in JSON's words; a model's name links to its table."""
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f'`"{field["const"]}"`'
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object":
        values = field["additionalProperties"]
        return f"object of {_type(values) if isinstance(values, dict) else 'any'}"
    return field["type"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "formats": _formats,
    "faults": _faults,
    "draft_model": lambda: _fields(LAYOUTS[NATIVE, "draft_model"]),
    "summary": lambda: _table("key | meaning", SUMMARY_KEYS.items()),
    "fields": _models,
    "suites": _suites,
    **{name: partial(_family, name) for name in SAMPLES},
}
