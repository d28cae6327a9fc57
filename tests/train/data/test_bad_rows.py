"""Damaged data: every line is trained on as it should be, or reported with its place and reason;
none is lost or counted twice, and nothing stops a run but the bounds its recipe sets."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from speculators.errors import DataError
from tests.damaged_conversations import BAD, CUT, Truth, damaged
from train.data.bad_rows import REASONS, UNPROVED, BadRow, BadRows
from train.data.loss_mask import ConversationTokenizer
from train.data.packing import prepare_rows
from train.data.prepare import askable, bad_rows, training_examples
from train.data.readers import rows_of
from train.data.sources import Example, load_sources, parse_row
from train.recipe.data_sections import Source
from train.recipe.recipe import Recipe, make_recipe

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer() -> ConversationTokenizer:
    """That of the embedded target, whose template marks what the assistant writes."""
    return ConversationTokenizer(AutoTokenizer.from_pretrained(TARGET))


def recipe_of(path: Path, tmp_path: Path, regenerate: bool = False, **data) -> Recipe:
    section = {
        "train": [{"path": str(path)}],
        "max_length": MAX_LENGTH,
        "deduplicate": "off",
        **data,
    }
    tree = {
        "name": "damaged",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(TARGET)},
        "data": section,
    }
    return make_recipe({**tree, "regenerate": {"enabled": regenerate}})


def written(lines: list[tuple[bytes, Truth]], folder: Path) -> Path:
    path = folder / "chats.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in lines) + b"\n")
    return path


def line_of(origin: str) -> int:
    return int(origin.rpartition(":")[2])


def expected(tokenizer: ConversationTokenizer, truth: Truth) -> tuple[list[int], list[str]]:
    """Tokens of the conversation up to its last answer, written out by hand in the target's format,
    and the answers."""
    assert truth.messages is not None
    last = max(i for i, (role, _) in enumerate(truth.messages) if role == "assistant")
    kept = truth.messages[: last + 1]
    ends = {"assistant": ""}  # its template goes straight on after an answer
    text = "".join(
        f"<|im_start|>{role}\n{said}<|im_end|>{ends.get(role, chr(10))}" for role, said in kept
    )
    ids = tokenizer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids, [f"{said}<|im_end|>" for role, said in kept if role == "assistant"]


def check_all(
    lines: list[tuple[bytes, Truth]], tokenizer: ConversationTokenizer, tmp_path: Path
) -> None:
    recipe = recipe_of(written(lines, tmp_path), tmp_path, on_bad_row="drop")
    bad = bad_rows(recipe.data, tmp_path / "run")
    examples = training_examples(recipe, bad, tmp_path / "run").examples
    rows, statistics = prepare_rows(examples, tokenizer, max_length=MAX_LENGTH, bad=bad)
    bad.finish()

    listed = [
        json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()
    ]
    reported = {line_of(entry["origin"]): entry for entry in listed}
    assert len(reported) == len(listed) == bad.count(), "each is reported once"
    assert bad.read == len(lines)
    for number, (_, truth) in enumerate(lines, 1):
        if truth.messages is None:
            assert reported[number]["reason"] == truth.reason, (truth, reported[number])
        else:
            assert number not in reported, (truth, reported[number])

    used = [truth for _, truth in lines if truth.messages is not None and truth.kind != CUT]
    cut = sum(truth.kind == CUT for _, truth in lines)
    assert len(rows) == len(used), "a row for each, in their order"
    assert len(rows) + cut + len(reported) == len(lines)
    assert statistics.dropped_cut == cut
    assert statistics.truncated == sum(row.truncated for row in rows)
    for row, truth in zip(rows, used, strict=True):
        ids, answers = expected(tokenizer, truth)
        assert row.truncated == (len(ids) > MAX_LENGTH), truth.kind
        assert row.input_ids.tolist() == ids[:MAX_LENGTH], truth.kind
        if not row.truncated:
            edges = np.flatnonzero(np.diff([0, *row.loss_mask.astype(int), 0])).reshape(-1, 2)
            assert [tokenizer._decode(row.input_ids[a:b]) for a, b in edges] == answers, truth.kind


@pytest.mark.slow
def test_every_kind_of_damage_is_used_or_reported(tokenizer, tmp_path):
    lines = list(damaged(300, seed=1, long=2, tokens=3000))
    assert {truth.kind for _, truth in lines} >= set(BAD)
    check_all(lines, tokenizer, tmp_path)


@pytest.mark.slow
@pytest.mark.slow
def test_two_thousand_conversations_are_used_or_reported(tokenizer, tmp_path):
    check_all(list(damaged(2_000)), tokenizer, tmp_path)


def test_with_regeneration_a_row_without_an_answer_is_a_prompt(tokenizer, tmp_path):
    lines = list(damaged(300, seed=2, long=0))
    recipe = recipe_of(written(lines, tmp_path), tmp_path, regenerate=True)
    bad = bad_rows(recipe.data, tmp_path / "run")
    asked = askable(training_examples(recipe, bad, None).examples, tokenizer, bad)
    reported = {line_of(entry["origin"]): entry["reason"] for entry in bad.entries}
    found = Counter(line_of(example.origin) for example in asked)
    assert set(found.values()) == {1}
    assert {*found, *reported} == set(range(1, len(lines) + 1)) and not {*found} & {*reported}
    for number, (_, truth) in enumerate(lines, 1):
        answered_anew = (
            truth.kind in ("an empty answer", "nobody answers") or truth.reason in UNPROVED
        )
        assert reported.get(number, "") == ("" if answered_anew else truth.reason), truth


# ------------------------------------------------------------------------------------------ bounds


GOOD = {
    "messages": [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello."},
    ]
}
HIDDEN = {
    "messages": [
        GOOD["messages"][0],
        {"role": "assistant", "content": "Yes.", "reasoning": "a secret"},
    ]
}


def rows_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def prepared(path: Path, tmp_path: Path, tokenizer, **data):
    recipe = recipe_of(path, tmp_path, **data)
    bad = bad_rows(recipe.data, tmp_path / "run")
    result = prepare_rows(
        training_examples(recipe, bad, None).examples, tokenizer, max_length=MAX_LENGTH, bad=bad
    )
    bad.finish()
    return result[0], bad


def test_damage_stops_nothing_but_a_mask_that_is_not_proved_does(tokenizer, tmp_path):
    """By default; both are reported where the recipe says to drop."""
    rows, bad = prepared(rows_file(tmp_path, GOOD, "{", GOOD), tmp_path, tokenizer)
    assert (len(rows), bad.count()) == (2, 1)
    path = rows_file(tmp_path, GOOD, HIDDEN)
    with pytest.raises(
        DataError,
        match=r"chats.jsonl:2: turn 2 of 2 .*does not show its reasoning.*on_bad_row: drop",
    ):
        prepared(path, tmp_path, tokenizer)
    rows, bad = prepared(path, tmp_path, tokenizer, on_bad_row="drop")
    assert (len(rows), bad.by_reason()) == (1, {"not_shown": 1})


def test_bounds_stop_with_what_was_wrong(tokenizer, tmp_path):
    path = rows_file(tmp_path, GOOD, "{", GOOD, "[1]", GOOD)
    assert prepared(path, tmp_path, tokenizer, max_bad_rows=2, max_bad_share=0.4)[1].count() == 2
    with pytest.raises(
        DataError,
        match=r"max_bad_rows: more than 1 bad rows, the last of them .*chats.jsonl:4: exp",
    ):
        prepared(path, tmp_path, tokenizer, max_bad_rows=1)
    assert len((tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()) == 2, (
        "what was found is not lost"
    )
    with pytest.raises(
        DataError,
        match=r"max_bad_share: 2 of 5 rows \(40.0%\) are bad, more than 39.0%: .*:2: not J",
    ):
        prepared(path, tmp_path, tokenizer, max_bad_share=0.39)
    with pytest.raises(DataError, match="max_bad_rows: more than 0"):
        prepared(path, tmp_path, tokenizer, max_bad_rows=0)


def test_a_source_without_a_whole_row_says_why(tmp_path):
    with pytest.raises(
        DataError, match=r"holds no examples: all of its 2 rows are bad, .*1 not_json"
    ):
        load_sources([Source(path=str(rows_file(tmp_path, "{", "7")))], bad=BadRows())


def test_rows_that_are_used_twice_are_reported_once(tokenizer, tmp_path):
    path = rows_file(tmp_path, GOOD, HIDDEN)
    sources = [{"path": str(path), "weight": 3.0}]
    rows, bad = prepared(path, tmp_path, tokenizer, on_bad_row="drop", train=sources)
    assert (len(rows), bad.count()) == (3, 1)


def test_uses_are_counted_apart_and_an_old_list_goes(tmp_path):
    (tmp_path / "bad.jsonl").write_text("old\n")
    bad = BadRows(tmp_path / "bad.jsonl", max_rows=1)
    assert not (tmp_path / "bad.jsonl").exists() and str(bad) == ""
    for use in ("train", "validation"):
        bad.begin(use).refuse(BadRow("f:1", "not_json", "x"))
        assert (bad.count(), bad.first()) == (1, "f:1: x")
    assert [json.loads(line)["use"] for line in (tmp_path / "bad.jsonl").open()] == [
        "train",
        "validation",
    ]


def test_a_bad_row_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BadRow("f:1", "not_json", "no")))
    assert (str(error), error.reason, error.origin) == ("f:1: no", "not_json", "f:1")


def test_the_templates_failures_are_bad_rows_too(tokenizer):
    """Whatever a template raises, another row may go through it."""
    for statement in (
        "messages[9].content",
        "1 // 0",
        "messages.x.y",
        "'a' + 1",
        "raise_exception('no')",
    ):
        converter = ConversationTokenizer(
            tokenizer.tokenizer, chat_template="{{ " + statement + " }}"
        )
        with pytest.raises(BadRow, match="the chat template refuses it"):
            converter.rows(parse_row(GOOD, origin="f:1"))


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".zst", ""])
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_compressed_files_are_read_by_their_names(tmp_path, kind, packing):
    import pyarrow

    path = tmp_path / f"chats{kind}{packing}"
    text = (
        json.dumps(GOOD) + "\n{\n" + json.dumps(GOOD)
        if kind == ".jsonl"
        else json.dumps([GOOD, GOOD])
    )
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(text.encode())
    bad = BadRows()
    assert len(load_sources([Source(path=str(path))], bad=bad)) == 2
    assert bad.count() == (kind == ".jsonl")


def test_a_file_that_breaks_off_gives_what_it_has(tmp_path):
    torn = tmp_path / "chats.jsonl.gz"
    whole = gzip.compress(
        "".join(json.dumps({**GOOD, "n": hash((i, "x"))}) + "\n" for i in range(5000)).encode()
    )
    torn.write_bytes(whole[: len(whole) // 2])
    items = tmp_path / "chats.json"
    items.write_text(json.dumps([GOOD, GOOD, GOOD])[:-30])
    for path, least in ((torn, 500), (items, 2)):
        bad = BadRows()
        assert len(load_sources([Source(path=str(path))], bad=bad)) >= least
        assert bad.by_reason()["torn_file"] == 1, bad.entries[-1]
    (tmp_path / "nothing.jsonl.gz").write_bytes(whole[:5])
    with pytest.raises(DataError, match=r"nothing.jsonl.gz: cannot be read"):
        load_sources([Source(path=str(tmp_path / "nothing.jsonl.gz"))], bad=BadRows())


@pytest.mark.parametrize(
    ("text", "good", "reasons"),
    [
        ("[%s, {, %s]", 1, {"torn_file": 1}),
        ("[%s, 7, %s]", 2, {"wrong_type": 1}),
        ("[%s, %s] and more", 2, {"torn_file": 1}),
        ("\n %s\n{\n%s\n", 2, {"not_json": 1}),  # lines, which are often called .json too
        ("%s\n%s", 2, {}),
    ],
)
def test_lists_of_rows(tmp_path, text, good, reasons):
    path, bad = tmp_path / "chats.json", BadRows()
    path.write_text(text % (json.dumps(GOOD), json.dumps(GOOD)))
    assert len(load_sources([Source(path=str(path))], bad=bad)) == good
    assert bad.by_reason() == reasons


def test_a_text_of_a_table_that_is_not_utf8_harms_no_other(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = [b"one", b"t\xffo", b"three"]
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "rows.parquet")
    bad = BadRows()
    found = load_sources([Source(path=str(tmp_path / "rows.parquet"))], bad=bad)
    assert [example.prompt for example in found] == ["one", "three"]
    assert [(e["origin"], e["reason"]) for e in bad.entries] == [
        (f"{tmp_path / 'rows.parquet'} #1", "not_utf8")
    ]


# ------------------------------------------------------------------------------------------
# anything at all

texts = st.text(st.characters(), max_size=8)  # surrogates among them
names = st.sampled_from(
    "messages conversations prompt completion system tools workload role content from value"
    " tool_calls function name arguments reasoning reasoning_content type text user assistant tool"
    " human gpt".split()
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | names
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | texts, inner, max_size=5),
    max_leaves=20,
)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": texts, "arguments": anything}) | anything}
)
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | anything,
        "content": texts | anything,
    },
    optional={
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "reasoning": texts | anything,
        "name": anything,
    },
)
likely_rows = st.fixed_dictionaries(
    {"messages": st.lists(turns, max_size=4) | anything},
    optional={"tools": anything, "system": texts | anything},
)
columns = st.sampled_from(
    [
        None,
        dict(messages="content"),
        dict(user="prompt", assistant="completion", system="system"),
        dict(prompt="text"),
        dict(user="from", input="value", assistant="user", reasoning="text", tools="tools"),
    ]
)


def or_bad(make):
    """What `make` gives, or the BadRow it raises; any other exception is one."""
    try:
        return make()
    except BadRow as error:
        return error


@settings(max_examples=150, deadline=None)
@given(
    row=likely_rows | anything,
    columns=columns,
    field=st.sampled_from(["auto", "messages", "completion"]),
)
@pytest.mark.slow
def test_property_a_row_is_an_example_or_a_bad_row(row, columns, field):
    found = or_bad(lambda: parse_row(row, origin="f:1", columns=columns, field=field))
    assert isinstance(found, Example) or (
        found.reason in REASONS and str(found).startswith("f:1: ")
    )


@settings(max_examples=80, deadline=None)
@given(row=likely_rows)
@pytest.mark.slow
def test_property_an_example_has_rows_and_a_prompt_or_is_bad(tokenizer, row):
    found = or_bad(lambda: tokenizer.rows(parse_row(row, origin="f:1")))
    if isinstance(found, BadRow):
        assert found.reason in REASONS
        return
    (made,) = found
    assert made.loss_mask.any() and not made.loss_mask.all()
    prompt = tokenizer.prompt_ids(parse_row(row, origin="f:1"))
    assert prompt[:1] == made.input_ids[:1].tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.binary(max_size=12) | anything.map(lambda value: json.dumps(value).encode()), max_size=6
    )
)
def test_property_every_line_that_is_not_blank_is_one_row(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    split = path.read_bytes().split(b"\n")
    split[0] = split[0].removeprefix(b"\xef\xbb\xbf")
    found = [origin for origin, _ in rows_of(Source(path=str(path)))]
    assert found == [f"{path}:{number}" for number, line in enumerate(split, 1) if line.strip()]
