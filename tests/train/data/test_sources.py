"""Sources: presets and columns, directories, slices, streams, shares; and which of the examples are
used."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import datasets
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from speculators.errors import DataError
from train.data.bad_rows import REASONS, BadRow
from train.data.prepare import bad_rows, training_examples
from train.data.selection import decontaminate, deduplicate, fan_out
from train.data.sources import Example, load_sources, mix, parse_row, read_sources
from train.recipe.data_sections import PRESETS, DataSection, Source, markdown
from train.recipe.load import load_recipe
from train.recipe.recipe import make_recipe

ROOT = Path(__file__).resolve().parents[3]

# A row of each preset, with the columns its data set has and text of our own.
_SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
_METADATA = {
    "uuid": "0",
    "model": "m",
    "gen_input_configs": {"temperature": 1.0},
    "task_category": "x",
}
ROWS = {
    "sharegpt": {
        "id": "a_0",
        "conversations": [{**turn, "markdown": None, "text": None} for turn in _SHAREGPT],
    },
    "ultrachat": {
        "prompt": "Q",
        "prompt_id": "0",
        "messages": [{"content": "Q", "role": "user"}, {"content": "A", "role": "assistant"}],
    },
    "magpie": {**_METADATA, "instruction": "Q", "response": "A", "conversations": _SHAREGPT},
    "magpie-qwen2.5": {
        **_METADATA,
        "instruction": "Q",
        "response": "A",
        "conversations": _SHAREGPT,
    },
    "open-perfectblend": {"conversations": _SHAREGPT, "source": "somewhere"},
    "openhermes": {
        "conversations": [{"from": "system", "value": "S", "weight": None}, *_SHAREGPT],
        "source": "x",
        "system_prompt": None,
        "category": None,
        "skip_prompt_formatting": False,
    },
    "gsm8k": {"question": "Q", "answer": "A"},
    "codealpaca": {"instruction": "Q", "input": "", "output": "A"},
    "magicoder-evol": {"instruction": "Q", "response": "A"},
    "magicoder-oss": {
        "lang": "python",
        "raw_index": 1,
        "index": 2,
        "seed": "s",
        "openai_fingerprint": "f",
        "problem": "Q",
        "solution": "A",
    },
    "opencodeinstruct": {
        "id": "0",
        "input": "Q",
        "output": "A",
        "domain": "generic",
        "generation_algorithm": "x",
        "llm_judgement": "{}",
        "unit_tests": "[]",
        "tests_execution_status": "[]",
        "average_test_score": "1",
    },
}


def said(example: Example) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in example.messages]


def jsonl(path: Path, *rows: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts: str, **more) -> dict:
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)
        ],
        **more,
    }


# ---------------------------------------------------------------------------- presets and columns


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_preset_reads_its_data_set(preset, streaming, monkeypatch):
    """From the Hub, through `datasets`: the id, configuration and split asked for, and every turn
    in its role."""
    asked = {}

    def load_dataset(name, config, **options):
        asked.update(options, name=name, config=config)
        table = datasets.Dataset.from_list([ROWS[preset], ROWS[preset]])
        return table.to_iterable_dataset() if options["streaming"] else table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(preset=preset, limit=1, streaming=streaming, revision="r")
    (example,) = load_sources([source])
    system = [("system", "S")] if preset == "openhermes" else []
    assert said(example) == [*system, ("user", "Q"), ("assistant", "A")]
    assert example.workload == preset and source.label == preset
    known = PRESETS[preset]
    assert asked == {
        "name": known.name,
        "config": known.config,
        "split": known.split,
        "streaming": streaming,
        "revision": "r",
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_local_copy_of_a_preset_is_read_the_same(preset, tmp_path):
    path = jsonl(tmp_path / "copy.jsonl", ROWS[preset])
    (example,) = load_sources([Source(preset=preset, path=path)])
    assert said(example)[-2:] == [("user", "Q"), ("assistant", "A")] and example.workload == preset


def test_the_presets_are_those_of_the_manual():
    assert markdown() in (ROOT / "docs" / "data.md").read_text()
    assert set(ROWS) == set(PRESETS)


def test_the_manuals_recipe_is_one():
    text = (ROOT / "docs" / "data.md").read_text()
    section = DataSection.model_validate(
        yaml.safe_load(text.split("```yaml")[1].split("```")[0])["data"]
    )
    assert sum(source.share or 0 for source in section.train) == 1
    assert all(f"| `{reason}` | {words} |" in text for reason, words in REASONS.items())


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
    names = {
        "user": "ask",
        "input": "with",
        "assistant": "say",
        "reasoning": "think",
        "system": "sys",
    }
    columns = {**names, "workload": "kind", "tools": "fns"}
    (example,) = load_sources([Source.model_validate({"path": path, "columns": columns})])
    assert said(example) == [
        ("system", "Be brief."),
        ("user", "Do it.\n\nx = 1"),
        ("assistant", "Done."),
    ]
    assert example.messages[-1]["reasoning_content"] == "hm"
    assert (example.workload, example.tools) == ("code", ({"name": "f"},))
    (turns,) = load_sources(
        [Source.model_validate({"path": path, "columns": {"messages": "talk"}})]
    )
    assert said(turns) == [("user", "Q"), ("assistant", "A")]
    (text,) = load_sources(
        [Source.model_validate({"path": path, "columns": {"prompt": "ask", "completion": "say"}})]
    )
    assert (text.prompt, text.completion) == ("Do it.", "Done.")
    with pytest.raises(
        BadRow,
        match=r"rows.jsonl:1: the row has no column 'question', which columns.user names; it",
    ):
        load_sources([Source.model_validate({"path": path, "columns": {"user": "question"}})])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"preset": "ultrachet"}, "expected one of sharegpt, ultrachat"),
        (
            {"preset": "gsm8k", "name": "a/b"},
            "exactly one of path, name, preset, got name and preset",
        ),
        ({"name": "a/b", "streaming": True}, "streaming needs a limit"),
        (
            {"name": "a/b", "streaming": True, "limit": 5, "split": "train[:9]"},
            "a stream has no slices",
        ),
        ({"name": "a/b", "shuffle_buffer": 5}, "shuffle_buffer needs streaming"),
        ({"path": "a.jsonl", "streaming": True, "limit": 5}, "streaming has no meaning for a path"),
        (
            {"path": "a.jsonl", "columns": {"user": "a", "messages": "b"}},
            "exactly one of messages, user, prompt",
        ),
        ({"path": "a.jsonl", "columns": {"assistant": "a", "prompt": "b"}}, "assistant needs user"),
        (
            {"path": "a.jsonl", "columns": {"user": "a"}, "field": "messages"},
            "field and columns say the same",
        ),
        ({"path": "a.jsonl", "share": 0.5, "weight": 2.0}, "share and weight"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(source, message):
    with pytest.raises(ValidationError, match=message):
        Source.model_validate(source)


# ------------------------------------------------------------------------------------------
# directories and slices


def test_directories_hold_shards_of_splits(tmp_path):
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test", "c")):
        jsonl(tmp_path / "set" / f"{name}.jsonl", chat(text, "x"))
    (tmp_path / "set" / "README.md").write_text("about")

    def first(**options) -> list[str]:
        return [
            e.messages[0]["content"]
            for e in load_sources([Source(path=str(tmp_path / "set"), **options)])
        ]

    assert first() == ["a", "b"]
    assert first(split="test") == ["c"]
    assert first(split="test+train[1:]") == ["c", "b"]
    assert (
        load_sources([Source(path=str(tmp_path / "set"))])[0].origin
        == f"{tmp_path / 'set' / 'train-0.jsonl'}:1"
    )
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        first(split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the directory holds no"):
        load_sources([Source(path=str(tmp_path / "empty"))])


def test_slices_count_the_rows_of_a_file(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", *(chat(str(i), "x") for i in range(10)))

    def some(split: str) -> str:
        return "".join(
            e.messages[0]["content"] for e in load_sources([Source(path=path, split=split)])
        )

    assert (some("train[:3]"), some("train[-2:]"), some("train[50%:70%]")) == ("012", "89", "56")
    with pytest.raises(DataError, match="a single file has the split train alone"):
        some("test")


def test_a_saved_dataset_is_read(tmp_path):
    datasets.Dataset.from_list([chat("a", "b"), chat("c", "d")]).save_to_disk(tmp_path / "saved")
    assert len(load_sources([Source(path=str(tmp_path / "saved"))])) == 2
    assert len(load_sources([Source(path=str(tmp_path / "saved"), split="train[1:]")])) == 1


def test_a_stream_is_shuffled_by_its_seed_and_stops_in_time(monkeypatch):
    drawn = []

    def rows():
        for i in range(10_000):
            drawn.append(i)
            yield chat(str(i), "x")

    stream = lambda *args, **options: datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    source = Source(name="a/b", streaming=True, limit=20, shuffle_buffer=50)
    first, again, other = (
        [e.messages[0]["content"] for e in load_sources([source], seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again != other and sorted(first) != first
    assert len(drawn) < 3 * 100


def test_a_data_set_that_breaks_off_is_an_error(monkeypatch):
    def rows():
        yield chat("a", "b")
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows())
    with pytest.raises(DataError, match=r"a/b: split 'train' breaks off after 1 rows: gone"):
        load_sources([Source(name="a/b")])


# ------------------------------------------------------------------------------------------
# mixtures


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    parts=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
@example(counts=[1, 2, 1], parts=[3, 8, 6, 1])  # half an example: rounded down or up
def test_property_shares_are_kept_and_nothing_is_repeated(counts, parts):
    parts = parts[: len(counts)]
    sources = [Source(path=f"{i}.jsonl", share=part / sum(parts)) for i, part in enumerate(parts)]
    found = [[Example(str(i), f"{i}:{j}") for j in range(count)] for i, count in enumerate(counts)]
    mixed = mix(sources, found, seed=3)
    total = min(count * sum(parts) / part for count, part in zip(counts, parts))
    used = Counter(example.workload for example in mixed)
    assert all(
        abs(used[str(i)] - part / sum(parts) * total) <= 0.5 + 1e-9 for i, part in enumerate(parts)
    )
    assert len({example.origin for example in mixed}) == len(mixed)
    assert any(used[str(i)] == count for i, count in enumerate(counts)), "the scarcest is used up"
    assert mixed == mix(sources, found, seed=3)


def test_shares_are_given_to_all_sources_and_add_up():
    for shares, message in (
        ((0.5, None), "give all of them one"),
        ((0.5, 0.4), "add up to 1, got 0.9"),
    ):
        with pytest.raises(ValidationError, match=message):
            DataSection.model_validate(
                {"train": [{"path": f"{s}.jsonl", "share": s} for s in shares]}
            )


# --------------------------------------------------------------------------------- which are used


def example(*texts: str, origin: str = "x", system: str = "") -> Example:
    row = chat(*texts)
    if system:
        row["messages"].insert(0, {"role": "system", "content": system})
    return parse_row(row, origin=origin)


def test_fan_out_gives_every_answer_its_own_example():
    whole = example("a", "b", "c", "d", "e", system="s")
    found = fan_out(whole)
    assert [[m["content"] for m in one.messages] for one in found] == [
        ["s", "a", "b"],
        ["s", "a", "b", "c", "d"],
        ["s", "a", "b", "c", "d", "e"],
    ]
    assert [one.origin for one in found] == ["x, turn 3", "x, turn 5", "x, turn 6"]
    for alone in (example("a", "b"), example("a"), parse_row({"prompt": "a"}, origin="x")):
        assert fan_out(alone) == [alone]


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
    assert [[e.origin for e in some] for some in kept] == [["1"], ["4"], ["5", "6"]]
    assert {(each.origin, each.like, each.why) for each in out} == {
        (o, "1", "duplicate") for o in "237"
    }
    kept, _ = deduplicate(lists, responses=True)
    assert [[e.origin for e in some] for some in kept] == [
        ["1", "2"],
        ["4"],
        ["5", "6"],
    ], "another answer is new"


def test_contaminated_examples_ask_what_is_measured():
    long = "one two three four five six seven eight nine ten"
    held = [
        example("What is 2 + 2?", "4", origin="h1"),
        example(f"{long}?", "x", origin="h2", system="You are here."),
    ]
    lists = [
        [
            example("what is 2 + 2?", "four", origin="1"),
            example(f"Well, {long.upper()} or so", "x", origin="2"),
            example("three four five", "x", origin="3"),
            example("a", f"{long}", origin="4"),
            example("b", "c", origin="5", system="You are here."),
        ]
    ]
    kept, out = decontaminate(lists, held)
    assert [each.origin for each in out] == ["1"]
    kept, out = decontaminate(lists, held, ngram=8)
    assert [e.origin for e in kept[0]] == ["3", "4", "5"], "answers and system prompts do not count"
    assert [(each.like, each.detail) for each in out] == [
        ("h1", ""),
        ("h2", " ".join(long.split()[:8])),
    ]


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
    recipe = recipe_of(tmp_path, rows, [chat("Held")], fan_out=True)
    prepared = training_examples(recipe, bad_rows(recipe.data), tmp_path / "run")
    assert [len(e.messages) for e in prepared.examples] == [2, 2, 4]
    assert str(prepared) == "1 duplicate, 1 contaminated of 5 examples left out"
    listed = [
        json.loads(line) for line in (tmp_path / "run" / "left_out.jsonl").read_text().splitlines()
    ]
    assert [(each["origin"].rpartition(":")[2], each["why"]) for each in listed] == [
        ("2", "duplicate"),
        ("4", "contaminated"),
    ]
    assert listed[1]["like"] == f"{tmp_path / 'held.jsonl'}:1"
    off = recipe_of(tmp_path, rows, [chat("Held")], deduplicate="off", decontaminate="off")
    assert len(training_examples(off, bad_rows(off.data), tmp_path / "run").examples) == 4
    assert not (tmp_path / "run" / "left_out.jsonl").exists(), "an old list would be of other data"
    answered = recipe_of(tmp_path, rows, [chat("Held")], regenerate=False)
    assert len(training_examples(answered, bad_rows(answered.data)).examples) == 3, (
        "another answer is another example"
    )
    with pytest.raises(
        DataError, match=r"no example is left: 4 contaminated of 4 examples left out"
    ):
        everything = recipe_of(tmp_path, rows, rows, deduplicate="off")
        training_examples(everything, bad_rows(everything.data))


def test_questions_of_a_suite_are_not_trained_on(tmp_path):
    """Whole prompts, and turns of five words and more wherever they stand: behind a system prompt,
    or later."""
    path = jsonl(
        tmp_path / "question.jsonl",
        {"category": "qa", "turns": ["Why is the sky blue?", "Now in one word."]},
        {"category": "qa", "turns": ["Hi"]},
    )
    tree = recipe_of(
        tmp_path,
        [
            chat("hi", "1"),
            chat("Hi", "2", "and so", "3"),  # as short a turn as this is everybody's
            chat("why is the  sky blue?", "4"),
            {
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    *chat("Why is the sky blue?", "5")["messages"],
                ]
            },
            chat("a", "b", "Why is the sky blue?", "6"),
            chat("now in one word.", "7"),
            chat("c", "Why is the sky blue?"),
        ],
        [chat("Held")],
    ).model_dump(mode="json")
    tree["evaluation"]["suites"] = {"mt_bench": path}
    recipe = make_recipe(tree)
    prepared = training_examples(recipe, bad_rows(recipe.data))
    assert [e.origin.rpartition(":")[2] for e in prepared.examples] == ["2", "7"]
    assert {each.like for each in prepared.left_out} == {f"{path}:1", f"{path}:2"}
    tree["data"]["decontaminate"] = "off"
    off = make_recipe(tree)
    assert len(training_examples(off, bad_rows(off.data)).examples) == 7


def test_fanning_out_needs_regeneration(tmp_path):
    with pytest.raises(
        ValidationError, match=r"data.fan_out: without regeneration every assistant turn is learnt"
    ):
        recipe_of(tmp_path, [chat("a", "b")], [chat("c")], regenerate=False, fan_out=True)


@pytest.mark.slow
def test_the_quickstart_trains_on_what_it_did_before_there_was_a_selection():
    """Its generated prompts are all different, and none is the evaluation's."""
    recipe = load_recipe(ROOT / "recipes" / "quickstart" / "eagle3.yaml")
    prepared = training_examples(recipe, bad_rows(recipe.data))
    assert prepared.left_out == [] and prepared.bad.count() == 0
    assert prepared.examples == [e for some in read_sources(recipe.data.train) for e in some]
