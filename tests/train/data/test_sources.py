"""Sources: known data sets and columns, directories, slices, streams; and which of the examples are
used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from pydantic import ValidationError

from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow
from draftsmith.train.data.examples import Example, parse_row
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.data.readers import SHUFFLED_ROWS
from draftsmith.train.data.selection import deduplicate
from draftsmith.train.data.sources import errors_of_option, load_sources
from draftsmith.train.recipe.data_sections import PRESETS, Source
from draftsmith.train.recipe.recipe import make_recipe
from tests.support.errors import raises_at

ROOT = Path(__file__).resolve().parents[3]

# Rows of known data sets, with the columns that they have and text of our own.
_SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
ROWS = {
    "openhermes": {
        "conversations": [{"from": "system", "value": "S", "weight": None}, *_SHAREGPT],
        "system_prompt": None,
    },
    "gsm8k": {"question": "Q", "answer": "A"},
    "codealpaca": {"instruction": "Q", "input": "", "output": "A"},
}


def turns_of(example: Example) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in example.messages]


def first_texts(**source) -> list[str]:
    return [e.messages[0]["content"] for e in load_sources([Source.model_validate(source)])]


def jsonl(path: Path, *rows: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts: str, **more) -> dict:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns, **more}


def test_workload_of_a_source_is_never_that_of_all(tmp_path) -> None:
    """Reports call all workloads together "all"."""
    row = chat("Q", "A")
    for name, expected in {"all.jsonl": "all.jsonl", "math.jsonl": "math"}.items():
        source = Source(path=jsonl(tmp_path / name, row))
        assert [example.workload for example in load_sources([source])] == [expected]
    assert Source(name="org/all@v1").default_workload == "org/all"
    with pytest.raises(ValidationError):
        Source(path="x.jsonl", workload="all")


# ------------------------------------------------------------------------- known sets and columns


@pytest.mark.parametrize("name", ROWS)
def test_a_known_data_set_is_read_by_its_name(name, monkeypatch):
    """From the Hub, through `datasets`: its id, configuration and split, and every turn in its
    role."""
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((*arguments, options["split"], options["streaming"]))
        return datasets.Dataset.from_list([ROWS[name], ROWS[name]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (example,) = load_sources([Source(name=name, limit=1)])
    system = [("system", "S")] if name == "openhermes" else []
    assert turns_of(example) == [*system, ("user", "Q"), ("assistant", "A")]
    assert example.workload == name
    known = PRESETS[name]
    assert calls == [(known["name"], known.get("config"), known.get("split", "train"), False)]


def test_keys_beside_a_known_name_and_a_revision(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: calls.append((a, o)) or [])
    calls = []
    for source in ({"name": "ultrachat", "split": "test_sft"}, {"name": "a/b@v1"}):
        with pytest.raises(DataError, match="holds no examples"):
            load_sources([Source.model_validate(source)])
    (_, first), (arguments, second) = calls
    assert first["split"] == "test_sft" and (arguments[0], second["revision"]) == ("a/b", "v1")


def test_columns_of_any_name(tmp_path):
    row = {
        "ask": "Do it.",
        "with": "x = 1",
        "say": "Done.",
        "think": "hm",
        "sys": "Be brief.",
        "kind": "code",
        "fns": json.dumps([{"name": "f"}]),
        "talk": _SHAREGPT,
    }
    path = jsonl(tmp_path / "rows.jsonl", row)

    def read(**columns: str) -> Example:
        (example,) = load_sources([Source(path=path, columns=columns)])
        return example

    question = {"user": "ask", "input": "with", "assistant": "say", "reasoning": "think"}
    example = read(**question, system="sys", workload="kind", tools="fns")
    assert turns_of(example) == [
        ("system", "Be brief."),
        ("user", "Do it.\n\nx = 1"),
        ("assistant", "Done."),
    ]
    assert example.messages[-1]["reasoning_content"] == "hm"
    assert (example.workload, example.tools) == ("code", ({"name": "f"},))
    assert turns_of(read(messages="talk")) == [("user", "Q"), ("assistant", "A")]
    text = read(prompt="ask", completion="say")
    assert (text.prompt, text.completion) == ("Do it.", "Done.")
    with pytest.raises(BadRow, match=r"rows.jsonl:1: .*'question', which columns.user names"):
        read(user="question")


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"name": "ultrachet"}, "name"),
        ({"name": "gsm8k", "path": "a.jsonl"}, "path, name"),
        ({"name": "a/b", "streaming": True}, "streaming"),
        ({"path": "a.jsonl", "columns": {"user": "a", "messages": "b"}}, "columns"),
        ({"path": "a.jsonl", "columns": {"assistant": "a", "prompt": "b"}}, "columns"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(source, key):
    with pytest.raises(ValidationError, match=key):
        Source.model_validate(source)


# -------------------------------------------------------------------------------- files and tables


def test_directories_hold_shards_of_splits(tmp_path):
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test", "c")):
        jsonl(tmp_path / "set" / f"{name}.jsonl", chat(text, "x"))
    (tmp_path / "set" / "README.md").write_text("about")
    path = str(tmp_path / "set")
    assert first_texts(path=path) == ["a", "b"]
    assert first_texts(path=path, split="test+train[1:]") == ["c", "b"]
    assert load_sources([Source(path=path)])[0].origin == f"{path}/train-0.jsonl:1"
    with raises_at(DataError, path):
        first_texts(path=path, split="dev")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("set", "'train', but of test, validation; give"),
        ("empty", "a folder without a file of .jsonl"),
        ("notes.txt", "no file of .jsonl"),
        ("nowhere", "no such file or directory"),
    ],
)
def test_a_path_without_rows_is_refused_with_what_is_there(name, what, tmp_path):
    for split in ("test", "dev"):  # which is another name of validation
        jsonl(tmp_path / "set" / f"{split}.jsonl", chat("a", "x"))
    (tmp_path / "set" / "README.md").write_text("about")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: ") + f".*{what}"):
        first_texts(path=str(tmp_path / name))


@pytest.mark.parametrize("option", ["--data", "--prompts"])
def test_errors_of_a_path_name_the_option_that_gave_it(option, tmp_path):
    bad, nowhere = tmp_path / "bad.csv", tmp_path / "nowhere.jsonl"
    bad.write_text("question,reply\na,b\n")
    for path, place in ((bad, f"{bad}:2"), (nowhere, nowhere)):
        with raises_at(DataError, f"{option} {place}"), errors_of_option(option, path):
            load_sources([Source(path=str(path))])
    with raises_at(DataError, nowhere), errors_of_option(option, bad):
        load_sources([Source(path=str(nowhere))])


def test_slices_count_the_rows_of_a_file(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", *(chat(str(i), "x") for i in range(10)))
    slices = {"train[:3]": "012", "train[-2:]": "89", "train[50%:70%]": "56"}
    for split, expected in slices.items():
        assert "".join(first_texts(path=path, split=split)) == expected


def test_tables_are_read(tmp_path):
    """Parquet, whose nulls are those that Arrow adds; CSV, all text; what `save_to_disk` wrote."""
    turns = [{"role": "user", "content": "a", "name": "me"}, {"role": "assistant", "content": "b"}]
    table = datasets.Dataset.from_list([{"messages": turns}, chat("c", "d")])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.csv").write_text('ask,say\nQ,"A,\nb"\n1 + 1?,2\n')
    first, _ = load_sources([Source(path=str(tmp_path / "rows.parquet"))])
    assert list(first.messages) == turns and first.workload == "rows"
    assert first.origin == f"{tmp_path / 'rows.parquet'} #0"
    saved = str(tmp_path / "saved")
    assert first_texts(path=saved, split="train[1:]") == ["c"]
    datasets.DatasetDict(sft=table, test=table).save_to_disk(tmp_path / "splits")
    splits = str(tmp_path / "splits")
    assert first_texts(path=splits, split="sft[1:]+test") == ["c", "a", "c"]
    for path, split in ((saved, "test"), (splits, "train")):
        with raises_at(DataError, path):
            first_texts(path=path, split=split)
    columns = {"user": "ask", "assistant": "say"}
    row, number = load_sources([Source(path=str(tmp_path / "rows.csv"), columns=columns)])
    assert turns_of(row) == [("user", "Q"), ("assistant", "A,\nb")]
    assert turns_of(number)[1] == ("assistant", "2") and number.origin.endswith("rows.csv:4")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="torn.parquet: cannot be read after 0 rows"):
        first_texts(path=str(tmp_path / "torn.parquet"))


def test_a_stream_is_shuffled_by_its_seed_and_stops_in_time(monkeypatch):
    drawn = []

    def rows():
        for i in range(100 * SHUFFLED_ROWS):
            drawn.append(i)
            yield chat(str(i), "x")

    stream = lambda *args, **options: datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    monkeypatch.setattr("draftsmith.train.data.readers.SHUFFLED_ROWS", 50)
    source = Source(name="a/b", streaming=True, limit=20)
    first, again = ([e.messages[0]["content"] for e in load_sources([source])] for _ in range(2))
    assert first == again and sorted(first) != first
    assert len(drawn) < 2 * 100


def test_a_data_set_that_breaks_off_is_an_error(monkeypatch):
    def rows():
        yield chat("a", "b")
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows())
    with pytest.raises(DataError, match=r"a/b train: cannot be read after 1 rows: gone"):
        load_sources([Source(name="a/b")])


def test_limits_weights_and_labels(tmp_path):
    rows = [chat(f"q{i}", f"a{i}", **({"workload": "odd"} if i % 2 else {})) for i in range(10)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    examples = load_sources([Source(path=str(path))])
    assert [e.workload for e in examples] == ["chats", "odd"] * 5
    assert examples[1].origin == f"{path}:3", "the line in the file, blank ones counted"
    assert {e.workload for e in load_sources([Source(path=str(path), workload="mine")])} == {"mine"}
    weighted = load_sources([Source(path=str(path), limit=4, weight=2.5)])
    assert len(weighted) == 10
    assert weighted == load_sources([Source(path=str(path), limit=4, weight=2.5)])


# --------------------------------------------------------------------------------- which are used


def example(*texts: str, origin: str = "x", system: str = "") -> Example:
    row = chat(*texts)
    if system:
        row["messages"].insert(0, {"role": "system", "content": system})
    return parse_row(row, origin=origin)


def test_duplicates_differ_in_nothing_that_matters():
    lists = [
        [example("Say  Hello", "Hi", origin="1"), example("say hello", "Hey", origin="2")],
        [example("SAY\nHELLO ", "Hi", origin="3"), example("Say hello!", "Hi", origin="4")],
        [
            example("Say hello", "Hi", "Say hello", "Hi", origin="5"),
            example("say hello", "Hi", system="s", origin="6"),
            example("\uff33\uff41\uff59 hello", "Hi", origin="7"),
        ],
    ]
    kept, out = deduplicate(lists, responses=False)
    assert [[e.origin for e in examples] for examples in kept] == [["1"], ["4"], ["5", "6"]]
    assert {(item.origin, item.like, item.why) for item in out} == {
        (o, "1", "duplicate") for o in "237"
    }
    kept, _ = deduplicate(lists, responses=True)
    assert [[e.origin for e in examples] for examples in kept] == [["1", "2"], ["4"], ["5", "6"]], (
        "another answer is new"
    )


def test_duplicates_of_which_other_turns_are_learned_are_new_where_responses_are():
    talk = example("a", "b", "c", "d", origin="1")
    messages = [*talk.messages[:1], talk.messages[1] | {"weight": 0}, *talk.messages[2:]]
    lists = [[talk, replace(talk, messages=tuple(messages))]]
    for responses, count in ((True, 2), (False, 1)):
        (kept,), _ = deduplicate(lists, responses=responses)
        assert len(kept) == count


def recipe_of(tmp_path: Path, rows: list[dict], held: list[dict], regenerate: bool = True, **data):
    tree = {
        "name": "x",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": "t"},
        "data": {"train": [{"path": jsonl(tmp_path / "train.jsonl", *rows)}], **data},
        "evaluation": {"prompts": [{"path": jsonl(tmp_path / "held.jsonl", *held)}]},
        "regenerate": {"enabled": regenerate},
    }
    return make_recipe(tree)


def test_a_recipe_selects_and_lists_what_it_leaves_out(tmp_path):
    rows = [chat("a", "1"), chat("A ", "2"), chat("b", "3", "c", "4"), chat("held", "5")]
    recipe, listing = recipe_of(tmp_path, rows, [chat("Held")]), tmp_path / "run/left_out.jsonl"
    prepared = training_examples(recipe, bad_rows(recipe.data), tmp_path / "run")
    assert [len(e.messages) for e in prepared.examples] == [2, 4]
    listed = [json.loads(line) for line in listing.read_text().splitlines()]
    assert [(item["origin"][-1], item["why"]) for item in listed] == [
        ("2", "duplicate"),
        ("4", "contaminated"),
    ]
    assert listed[1]["like"] == f"{tmp_path / 'held.jsonl'}:1"
    off = recipe_of(tmp_path, rows[2:], [chat("Held")], decontaminate=False)
    assert len(training_examples(off, bad_rows(off.data), tmp_path / "run").examples) == 2
    assert not listing.read_text(), "an old list would be of other data"
    answered = recipe_of(tmp_path, rows, [chat("Held")], regenerate=False)
    assert len(training_examples(answered, bad_rows(answered.data)).examples) == 3, (
        "another answer is another example"
    )
    everything = recipe_of(tmp_path, rows, rows)
    with raises_at(DataError, "data.train"):
        training_examples(everything, bad_rows(everything.data))
    source = {"path": recipe.data.train[0].path, "weight": 0.1}
    hardly = recipe_of(tmp_path, rows, [chat("Held")], train=[source])
    with raises_at(DataError, "data.train.0.weight"):
        training_examples(hardly, bad_rows(hardly.data))


def test_questions_of_a_suite_are_not_trained_on(tmp_path):
    """Whole prompts, and turns of five words and more wherever they stand: behind a system prompt,
    or later."""
    path = jsonl(
        tmp_path / "question.jsonl",
        {"category": "qa", "turns": ["Why is the sky blue?", "Now in one word."]},
        {"category": "qa", "turns": ["Hi"]},
    )
    system = {"role": "system", "content": "Be kind."}
    rows = [
        chat("hi", "1"),
        # turns this short occur in any data set, so they do not count as contamination
        chat("Hi", "2", "and so", "3"),
        chat("why is the  sky blue?", "4"),
        {"messages": [system, *chat("Why is the sky blue?", "5")["messages"]]},
        chat("a", "b", "Why is the sky blue?", "6"),
        chat("now in one word.", "7"),
        chat("c", "Why is the sky blue?"),
        {"prompt": "Why is the sky blue?", "completion": "8"},
    ]
    tree = recipe_of(tmp_path, rows, [chat("Held")]).model_dump(mode="json")
    tree["evaluation"]["suites"] = {"mt_bench": path}
    recipe = make_recipe(tree)
    prepared = training_examples(recipe, bad_rows(recipe.data))
    assert [e.origin.rpartition(":")[2] for e in prepared.examples] == ["2", "7"]
    assert {item.like for item in prepared.left_out} == {f"{path}:1", f"{path}:2"}
