"""Damaged data: every line is trained on as it should be, or reported with its place and reason, or
stops the run; none is lost or counted twice."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example, parse_row
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import prepare_rows
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.data.readers import rows_of
from draftsmith.train.data.sources import load_sources
from draftsmith.train.data.tokenising import prompts_of
from draftsmith.train.recipe.data_sections import Source
from draftsmith.train.recipe.recipe import Recipe, make_recipe
from tests.support.damaged_conversations import BAD, BOM, MESSAGES, UNPROVED, WHOLE, row
from tests.support.errors import raises_at

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer() -> ConversationTokenizer:
    """That of the embedded target, whose template marks what the assistant writes."""
    return ConversationTokenizer(AutoTokenizer.from_pretrained(TARGET))


def recipe_of(path: Path, tmp_path: Path, regenerate: bool = False, **data) -> Recipe:
    tree = {
        "name": "damaged",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(TARGET)},
        "data": {
            "train": [{"path": str(path)}],
            "max_length": MAX_LENGTH,
            "max_bad_row_share": 1.0,
            **data,
        },
        "regenerate": {"enabled": regenerate},
    }
    return make_recipe(tree)


@pytest.fixture
def every_line_counts(monkeypatch):
    """Repeated conversations are not left out."""
    monkeypatch.setattr("draftsmith.train.data.prepare.deduplicate", lambda lists, **_: (lists, []))


def written(folder: Path, lines: dict[str, bytes]) -> Path:
    path = folder / "chats.jsonl"
    path.write_bytes(BOM + b"\n".join(lines.values()) + b"\n")
    return path


def line_of(origin: str) -> int:
    return int(origin.rpartition(":")[2])


def expected(tokenizer: ConversationTokenizer, messages: list[dict]) -> list[int]:
    """Tokens of the conversation up to its last answer, by hand in the target's format."""
    ends = {"assistant": ""}  # its template goes straight on after an answer
    text = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>{ends.get(m['role'], chr(10))}"
        for m in messages
    )
    return tokenizer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def test_every_line_is_used_or_reported(tokenizer, tmp_path, every_line_counts):
    """Of long conversations what fits; that of a long question has no answer in reach."""
    text = "the quick brown fox jumps. " * 300
    long = [MESSAGES[1], MESSAGES[2] | {"content": text}]
    cut = [MESSAGES[1] | {"content": text}, MESSAGES[2]]
    lines = WHOLE | {"a long answer": row(long), "a long question": row(cut)} | BAD | UNPROVED
    recipe = recipe_of(written(tmp_path, lines), tmp_path, on_bad_row="drop")
    bad = bad_rows(recipe.data, tmp_path / "run")
    examples = training_examples(recipe, bad, tmp_path / "run").examples
    rows, statistics = prepare_rows(examples, tokenizer, max_length=MAX_LENGTH, bad=bad)

    listed = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").open()]
    kinds = [[*lines][line_of(entry["origin"]) - 1] for entry in listed]
    assert sorted(kinds) == sorted(BAD | UNPROVED) and all(entry["what"] for entry in listed)
    assert (bad.read, len(bad.reasons)) == (len(lines), len(listed))
    assert len(rows) == len(WHOLE) + 1 and statistics.dropped_cut == 1
    for used in rows[:-1]:
        assert used.input_ids.tolist() == expected(tokenizer, MESSAGES) and not used.truncated
        edges = np.flatnonzero(np.diff([0, *used.loss_mask.astype(int), 0])).reshape(-1, 2)
        answers = [tokenizer._decode(used.input_ids[a:b]) for a, b in edges]
        assert answers == [f"{MESSAGES[2]['content']}<|im_end|>"]
    assert rows[-1].truncated
    assert rows[-1].input_ids.tolist() == expected(tokenizer, long)[:MAX_LENGTH]


def test_with_regeneration_a_row_without_an_answer_is_a_prompt(
    tokenizer, tmp_path, every_line_counts
):
    lines = WHOLE | BAD | UNPROVED
    recipe = recipe_of(written(tmp_path, lines), tmp_path, regenerate=True, on_bad_row="drop")
    bad = bad_rows(recipe.data, tmp_path / "run")
    examples = training_examples(recipe, bad, None).examples
    asked = [examples[number].origin for number in prompts_of(examples, tokenizer, bad)]
    assert sorted([*lines][line_of(origin) - 1] for origin in asked) == sorted(WHOLE | UNPROVED)
    assert {[*lines][line_of(origin) - 1] for origin in bad.reasons} == {*BAD}


# ------------------------------------------------------------------------------------ error or drop


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


@pytest.mark.parametrize("line", ["{", json.dumps(HIDDEN)], ids=["damaged", "unproved"])
def test_a_bad_row_stops_the_run_or_is_left_out(tokenizer, tmp_path, line):
    """As the recipe says; used several times, it is listed once."""
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(GOOD) + f"\n{line}\n")

    def rows(**data) -> tuple[list, BadRows]:
        recipe = recipe_of(path, tmp_path, train=[{"path": str(path), "weight": 3.0}], **data)
        bad = bad_rows(recipe.data, tmp_path / "run")
        examples = training_examples(recipe, bad, None).examples
        return prepare_rows(examples, tokenizer, max_length=MAX_LENGTH, bad=bad)[0], bad

    with pytest.raises(DataError, match=r"chats.jsonl:2: .*data.on_bad_row: drop"):
        rows()
    kept, bad = rows(on_bad_row="drop")
    assert len(kept) == 3 and [line_of(origin) for origin in bad.reasons] == [2]
    assert (len(bad.reasons), bad.read) == (1, 2)


def test_bad_rows_beyond_their_share_stop_the_run(tokenizer, tmp_path):
    """Whether they are damaged or found to be bad when they are tokenised."""
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*[json.dumps(GOOD)] * 6, "{", json.dumps(HIDDEN)]))

    def read(share: float) -> tuple[list[Example], BadRows]:
        data = recipe_of(path, tmp_path, on_bad_row="drop", max_bad_row_share=share).data
        bad = bad_rows(data)
        return load_sources(data.train, bad=bad), bad

    with raises_at(DataError, "data.max_bad_row_share"):
        read(0.1)
    examples, bad = read(0.2)
    with raises_at(DataError, "data.max_bad_row_share"):
        prepare_rows(examples, tokenizer, max_length=MAX_LENGTH, bad=bad)
    examples, bad = read(0.25)
    assert len(prepare_rows(examples, tokenizer, max_length=MAX_LENGTH, bad=bad)[0]) == 6


def test_bad_rows_of_held_out_data_are_not_bounded(tmp_path):
    """A few rows may be unlucky."""
    recipe = recipe_of(tmp_path, tmp_path, max_bad_row_share=0.1)
    assert bad_rows(recipe.data, use="validation").max_share == 1.0


def test_conversations_that_begin_with_the_assistant_lose_those_turns(tmp_path):
    """They are parts of longer ones; what is left begins with the user, and is no bad row."""
    user, assistant = GOOD["messages"]
    conversations = [[assistant, user, assistant], [assistant, assistant, user], [user, assistant]]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns}) for turns in conversations))
    bad = BadRows(stop=True)
    examples = load_sources([Source(path=str(path))], bad=bad)
    assert [list(example.messages) for example in examples] == [
        [user, assistant],
        [user],
        [user, assistant],
    ]
    assert bad.shortened == 2 and not bad.reasons
    assert "2 of 3 conversations begin with the assistant" in str(bad)


def test_a_source_without_a_whole_row_says_why(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{\n7\n")
    with pytest.raises(DataError, match=r"2 of 2 rows .*chats.jsonl:1: not JSON"):
        load_sources([Source(path=str(tmp_path / "chats.jsonl"))], bad=BadRows())


def test_the_templates_failures_are_bad_rows_too(tokenizer):
    """Whatever a template raises, another row may go through it."""
    for statement in ("messages[9].content", "1 // 0", "'a' + 1", "raise_exception('no')"):
        template = "{{ " + statement + " }}"
        converter = ConversationTokenizer(tokenizer.tokenizer, chat_template=template)
        with raises_at(BadRow, "f:1"):
            converter.rows(parse_row(GOOD, origin="f:1"))


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".zst", ""])
def test_compressed_files_are_read_by_their_names(tmp_path, packing):
    import pyarrow

    good = json.dumps(GOOD)
    for name, text in (("a.jsonl", f"{good}\n{{\n{good}"), ("b.json", f" [{good},\n{good}]")):
        with pyarrow.output_stream(str(tmp_path / (name + packing)), compression="detect") as file:
            file.write(text.encode())
        bad = BadRows()
        assert len(load_sources([Source(path=str(tmp_path / (name + packing)))], bad=bad)) == 2
        assert len(bad.reasons) == (name == "a.jsonl")


def test_a_file_that_breaks_off_is_refused_as_nobody_knows_what_is_lost(tmp_path):
    torn = tmp_path / "chats.jsonl.gz"
    text = "".join(json.dumps({**GOOD, "n": hash((i, "x"))}) + "\n" for i in range(5000))
    whole = gzip.compress(text.encode())
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"chats.jsonl.gz: the file breaks off behind row \d{3}"):
        load_sources([Source(path=str(torn))], bad=BadRows())
    for name, data in (("nothing.jsonl.gz", whole[:5]), ("list.json", b'[{"prompt": "a"}, {')):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            load_sources([Source(path=str(tmp_path / name))], bad=BadRows())


@pytest.mark.parametrize(
    "row, what",
    [
        (b"caf\xe9,good", "not UTF-8: the byte 0xe9 behind 'caf'; save the file as UTF-8"),
        (b'"a" b,good', "not CSV"),
        (b"one, two,good", "1 more fields than names"),
    ],
    ids=["not UTF-8", "text behind a quote", "a comma without quotes"],
)
def test_a_bad_row_of_csv_harms_no_other(tmp_path, row, what):
    file = tmp_path / "chats.csv"
    rows = [b"prompt,completion", b"a,b", row, b'"long ' + b"x" * 200_000 + b'",c', b"d,e"]
    file.write_bytes(b"\n".join(rows) + b"\n")
    bad = BadRows()
    assert len(load_sources([Source(path=str(file))], bad=bad)) == 3
    assert len(bad.reasons) == 1 and f"{file}:3: " in str(bad) and what in str(bad)


def test_a_quote_that_is_never_closed_is_refused(tmp_path):
    file = tmp_path / "chats.csv"
    file.write_text('prompt,completion\na,b\n"c,d\n' + "e,f\n" * 50)
    with pytest.raises(DataError, match="breaks off behind row 2"):
        load_sources([Source(path=str(file))], bad=BadRows())


# ------------------------------------------------------------------ anything at all

texts = st.text(st.characters(), max_size=8)  # surrogates among them
names = st.sampled_from(
    "messages conversations prompt completion system tools workload role content from value"
    " tool_calls function name arguments reasoning type text user assistant human gpt".split()
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
    optional={"tool_calls": st.lists(calls, max_size=2) | anything, "reasoning": texts | anything},
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


@settings(max_examples=120, deadline=None)
@given(row=likely_rows | anything, columns=columns)
@pytest.mark.slow
def test_property_a_row_is_an_example_or_a_bad_row(tokenizer, row, columns):
    """And an example has rows and a prompt, or is bad; nothing else is raised."""
    refusal = None
    try:
        example = parse_row(row, origin="f:1", columns=columns)
        rows = tokenizer.rows(example)
    except BadRow as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith("f:1: ") and refusal.encode()
        return
    assert isinstance(example, Example)
    for row in rows:
        assert row.loss_mask.any() and (example.prompt or not row.loss_mask.all())


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
    origins = [origin for origin, _ in rows_of(Source(path=str(path)))]
    assert origins == [f"{path}:{number}" for number, line in enumerate(split, 1) if line.strip()]
