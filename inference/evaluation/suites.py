"""Evaluation suites by name: the public files on which acceptance lengths are published, read as
conversations.

No file of a suite comes with this package. It is given by path; `SUITES` names the command that
fetches it (docs/evaluate.md). Prompts are sent as they stand in the file, as the user's turns.
Imports nothing of an engine, since load generation and the selection of training data read suites
too."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import ConfigError, DataError

DIR = "suites"  # where files lie that no path is given for, each under its suite's name
SENTINEL = (  # in place of texts that SPEED-Bench may not ship
    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
)


@dataclass(frozen=True)
class Conversation:
    """The user's turns of one row; the answers are still to be written. `origin` is for errors, as
    `f.jsonl:12`."""

    category: str
    turns: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Suite:
    """A suite, and the shape of its file: a JSON object a line.

    columns     the first of these that a row has holds its turns: a text, a list of texts, or
                messages of the user
    category    the column that groups rows; None: all are of one category, called like the suite
    members     suites that this one consists of, each a category; it has no file of its own, but a
                folder of theirs
    fetch       shell command that writes the file
    compare     what published results are of, in a few words
    """

    title: str
    compare: str
    fetch: str = ""
    columns: tuple[str, ...] = ()
    category: str | None = None
    members: tuple[str, ...] = ()


def _from_hub(name: str, data_set: str, split: str, config: str | None = None) -> str:
    where = ", ".join(repr(part) for part in (data_set, config) if part)
    code = (
        f"from datasets import load_dataset as load; load({where},"
        f" split={split!r}).to_json({f'{DIR}/{name}.jsonl'!r})"
    )
    return f'python -c "{code}"'


SUITES: dict[str, Suite] = {
    "spec_al": Suite(
        "five suites that most papers report, bare prompts, as aiperf's spec_al_* data sets",
        "each category with the paper's own row; `all` is pooled over verifications",
        members=("gsm8k", "math500", "humaneval", "mbpp", "mt_bench"),
    ),
    "spec_bench": Suite(
        "Spec-Bench, 480 questions, some of two turns",
        "Spec-Bench's leaderboard, whose MT-bench column holds the eight categories that MT-Bench"
        " has too",
        fetch=(
            f"curl -Lo {DIR}/spec_bench.jsonl "
            "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
        ),
        columns=("turns",),
        category="category",
    ),
    "mt_bench": Suite(
        "MT-Bench, 80 questions of two turns",
        "MT-Bench columns of EAGLE, EAGLE-3, DFlash and later papers",
        fetch=(
            f"curl -Lo {DIR}/mt_bench.jsonl https://raw.githubusercontent.com/lm-sys/FastChat/main/"
            "fastchat/llm_judge/data/mt_bench/question.jsonl"
        ),
        columns=("turns", "prompt"),
        category="category",
    ),
    "gsm8k": Suite(
        "GSM8K, 1319 word problems (test)",
        "GSM8K columns; a paper that asks for steps or a boxed answer has another prompt",
        fetch=_from_hub("gsm8k", "openai/gsm8k", "test", "main"),
        columns=("question",),
    ),
    "math500": Suite(
        "MATH-500, 500 problems (test)",
        "MATH-500 columns; a paper that asks for a boxed answer has another prompt",
        fetch=_from_hub("math500", "HuggingFaceH4/MATH-500", "test"),
        columns=("problem",),
    ),
    "humaneval": Suite(
        "HumanEval, 164 functions to complete (test)",
        "HumanEval columns; a paper that continues the text without a chat template measures"
        " something else",
        fetch=_from_hub("humaneval", "openai/openai_humaneval", "test"),
        columns=("prompt",),
    ),
    "mbpp": Suite(
        "MBPP, 500 tasks (full, test); the sanitized split has the column prompt",
        "MBPP columns; a paper that adds the tests to the task has another prompt",
        fetch=_from_hub("mbpp", "google-research-datasets/mbpp", "test", "full"),
        columns=("text", "prompt"),
    ),
    "speed_bench": Suite(
        "SPEED-Bench, 80 questions of each of 11 categories (qualitative), or a throughput split",
        "SPEED-Bench's and InferenceX's acceptance lengths, the latter of the category coding",
        fetch=(
            f"curl -Lo {DIR}/prepare.py"
            " https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/main/nemo_skills/dataset/speed-bench/prepare.py"
            f" && python {DIR}/prepare.py --config qualitative --output_dir {DIR} && mv"
            f" {DIR}/qualitative.jsonl {DIR}/speed_bench.jsonl"
        ),
        columns=("messages", "turns"),
        category="category",
    ),
}


def default_path(name: str, folder: str = DIR) -> str:
    """Where the file of a suite lies that no path is given for: `<folder>/<name>.jsonl`, or the
    folder of a group."""
    return folder if SUITES[name].members else str(Path(folder) / f"{name}.jsonl")


def suite_files(name: str, path: str | Path) -> list[Path]:
    """The files of a suite that is given as `path`. DataError for one that is not there, with the
    command for it."""
    suite, path = SUITES[name], Path(path)
    files = {member: path / f"{member}.jsonl" for member in suite.members} or {name: path}
    missing = [f"{file}: no such file" for file in files.values() if not file.is_file()]
    if missing:
        commands = "; ".join(
            SUITES[part].fetch for part, file in files.items() if not file.is_file()
        )
        raise DataError(
            f"{'; '.join(missing)}. Fetch it (docs/evaluate.md): mkdir -p {DIR}; {commands}",
            where=f"suite {name}",
        )
    return list(files.values())


def load_suite(name: str, path: str | Path) -> list[Conversation]:
    """The conversations of a suite's file, in its order; of a group, those of its members one after
    the other.

    DataError names the file and line of a row that has not the suite's shape, and a file without
    rows."""
    suite = SUITES[name]
    if suite.members:
        files = zip(suite.members, suite_files(name, path))
        return [
            replace(one, category=part) for part, file in files for one in load_suite(part, file)
        ]
    (file,) = suite_files(name, path)
    conversations = []
    for origin, row in json_lines(file):
        try:
            conversations.append(_conversation(name, suite, row, origin))
        except ValueError as error:
            raise DataError(f"{error}: {json.dumps(row)[:80]}", where=origin) from None
    if not conversations:
        raise DataError(f"there are no rows; expected {suite.title}", where=f"{file}")
    return conversations


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(`path:line`, value) of every line of a JSONL file, `.gz` or not. ConfigError if it cannot be
    read, DataError for a line that is no JSON."""
    try:
        data = path.read_bytes()
        lines = (
            (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
        )
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"could not be read as lines of JSON: {error}", where=f"{path}"
        ) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}: {line[:80]}") from None


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes (hex)."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _conversation(name: str, suite: Suite, row: Any, origin: str) -> Conversation:
    """ValueError says what was expected."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a mapping with {' or '.join(suite.columns)}")
    column = next((column for column in suite.columns if row.get(column)), None)
    turns = _turns(row[column]) if column else []
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError(f"expected {' or '.join(suite.columns)}, the turns of the user")
    if any(SENTINEL in turn for turn in turns):
        raise ValueError(
            f"a text of others is left out of this file; make the whole one with: {suite.fetch}"
        )
    category = name if suite.category is None else row.get(suite.category)
    # reports call all categories together `all`
    if not isinstance(category, str) or category in ("", "all"):
        raise ValueError(f"expected {suite.category}, a text other than all")
    return Conversation(category, tuple(turns), origin)


def _turns(value: Any) -> list[Any]:
    """Texts of the user from a text, a list of texts, or a list of messages; empty if it is none of
    them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return []
    texts = [
        one.get("content") if isinstance(one, dict) and one.get("role") == "user" else one
        for one in value
    ]
    return texts if all(isinstance(text, str) for text in texts) else []
