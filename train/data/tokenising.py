"""Examples become tokens: in this process, or in several where there are many.

Each process renders and tokenises a stretch of the examples and writes an Arrow table of its own;
this one maps their tables, in the order of the examples. So the tokens are never copied through a
pipe, and never lie in memory as a whole."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from draftsmith.inference.progress import Advance, unwatched
from draftsmith.inference.provenance import text_sha256
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.export import disk_errors
from draftsmith.train.data.arrow_tables import SCRATCH
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example
from draftsmith.train.data.list_column import ListColumn
from draftsmith.train.data.loss_mask import ConversationTokenizer, TokenRow
from draftsmith.version import package_version

Convert = Callable[[Example], list[TokenRow]]

WORTH_A_PROCESS = 5_000  # examples; a process takes some seconds to start
BATCH = 100  # examples that a process converts between two writes


def process_count(num_proc: int | None, examples: int) -> int:
    """Processes that tokenise: `num_proc`, or by default one per core and WORTH_A_PROCESS examples.
    1: this process."""
    if num_proc is None:
        num_proc = min(_cores(), examples // WORTH_A_PROCESS)
    return max(1, min(num_proc, examples))


def tokenise_examples(
    examples: Sequence[Example],
    convert: Convert,
    *,
    num_proc: int | None = None,
    scratch: Path | None = None,
    progress: Advance = unwatched,
) -> Iterator[list[TokenRow] | BadRow]:
    """What `convert` makes of each example, in their order: its rows, or the BadRow that it raised.

    num_proc   as in `process_count`
    scratch    a folder for the tables of several processes, made if need be; None: among the
               temporary ones

    Rows of several processes are views on mapped files, which live as long as the rows."""
    count = process_count(num_proc, len(examples))
    if count == 1:
        for done, example in enumerate(examples, 1):
            yield _converted(convert, example)
            progress(done)
        return
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(SCRATCH, ".", scratch, ignore_cleanup_errors=True) as folder:
        for done, outcome in enumerate(_in_processes(examples, convert, count, Path(folder)), 1):
            yield outcome
            progress(done)


def prompts_of(
    examples: Sequence[Example],
    tokenizer: ConversationTokenizer,
    bad: BadRows,
    *,
    num_proc: int | None = None,
    scratch: Path | None = None,
    progress: Advance = unwatched,
) -> dict[int, np.ndarray]:
    """The tokens (int32) of the prompt of each example that makes one, by the example's number; the
    other examples go to `bad`. The last three: as in `tokenise_examples`. DataError if none is
    left, or `bad` takes no more."""
    prompts = {}
    outcomes = tokenise_examples(
        examples, tokenizer.prompt_rows, num_proc=num_proc, scratch=scratch, progress=progress
    )
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, BadRow):
            bad.refuse(outcome)
        else:
            prompts[number] = outcome[0].input_ids
    if not prompts:
        raise DataError(f"no prompt can be made of any of {len(examples)} examples: {bad}")
    bad.check_share()
    return prompts


def examples_address(
    examples: Sequence[Example], tokenizer: ConversationTokenizer, *settings: Any
) -> str:
    """The hash of everything that tokens of `examples` depend on: their content and places, the
    tokenizer, the template with its variables and date, the packages that render and tokenise,
    and `settings`."""
    words = tokenizer.tokenizer
    versions = [package_version(), transformers.__version__, tokenizers.__version__]
    kind = [type(words).__name__, words.special_tokens_map, tokenizer_sha256(words)]
    if not words.is_fast:
        kind.append(words.init_kwargs)
    facts = [versions, kind, tokenizer.template_facts(), tokenizer.reasoning, settings]
    digest = hashlib.blake2b(_line(facts), digest_size=12)
    for e in examples:
        parts = [e.workload, e.origin, e.messages, e.tools, e.prompt, e.completion]
        digest.update(_line(parts))
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of how a tokenizer cuts text; of one that is not fast, of its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(text_sha256(backend.to_str() if backend else str(tokenizer.get_vocab())))


def _line(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode() + b"\n"


def _converted(convert: Convert, example: Example) -> list[TokenRow] | BadRow:
    try:
        return convert(example)
    except BadRow as error:
        return error


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------
# several processes


def _in_processes(
    examples: Sequence[Example], convert: Convert, count: int, folder: Path
) -> Iterator[list[TokenRow] | BadRow]:
    """`tokenise_examples` in `count` processes, with their tables in `folder`."""
    import datasets

    pickled = folder / "examples.arrow"
    with disk_errors(pickled):
        _write_examples(examples, pickled)
    features = {
        "example": datasets.Value("int32"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("uint8")),
        "refusal": datasets.Value("string"),
    }
    with _spawning():
        try:
            table = datasets.Dataset.from_file(str(pickled)).map(
                _convert_batch,
                fn_kwargs={"convert": convert},
                with_indices=True,
                batched=True,
                batch_size=BATCH,
                remove_columns=["pickled"],
                features=datasets.Features(features),
                num_proc=count,
                cache_file_name=str(folder / "tokens.arrow"),
                new_fingerprint="tokens",  # `examples_address` is the one that counts
                load_from_cache_file=False,
            )
        except RuntimeError as error:
            raise DataError(
                f"one of {count} processes that tokenise has ended ({error}); set it to 1 to"
                " tokenise in this process, which also shows why",
                where="data.num_proc",
            ) from error
    return _outcomes(examples, table.data)


def _write_examples(examples: Sequence[Example], path: Path) -> None:
    """One pickle per example: JSON has no dates and bytes, which columns of parquet files may."""
    schema = pyarrow.schema({"pickled": pyarrow.binary()})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for start in range(0, len(examples), BATCH):
            pickles = [pickle.dumps(example) for example in examples[start : start + BATCH]]
            writer.write_batch(pyarrow.record_batch([pyarrow.array(pickles)], schema=schema))


def _convert_batch(
    batch: dict[str, list[bytes]], numbers: list[int], *, convert: Convert
) -> pyarrow.Table:
    """Rows of a batch of examples, each with the number of its example; a bad one is an empty row
    with the reason. Runs in a process of its own."""
    places: list[int] = []
    rows: list[TokenRow] = []
    refusals: list[str | None] = []
    for number, content in zip(numbers, batch["pickled"], strict=True):
        outcome = _converted(convert, pickle.loads(content))
        refusal = None
        if isinstance(outcome, BadRow):
            refusal = outcome.what
            outcome = [TokenRow(np.array([]), np.array([]))]
        places += [number] * len(outcome)
        refusals += [refusal] * len(outcome)
        rows += outcome
    columns = {
        "example": pyarrow.array(places, pyarrow.int32()),
        "input_ids": ListColumn.arrow([row.input_ids for row in rows]),
        "loss_mask": ListColumn.arrow([row.loss_mask.view(np.uint8) for row in rows]),
        "refusal": pyarrow.array(refusals, pyarrow.string()),
    }
    return pyarrow.table(columns)


def _outcomes(examples: Sequence[Example], table: Any) -> Iterator[list[TokenRow] | BadRow]:
    """The rows of `_convert_batch`, of all processes, by their examples."""
    places = table.column("example").to_numpy()
    ids = ListColumn(table.column("input_ids"))
    masks = ListColumn(table.column("loss_mask"))
    refusals = table.column("refusal")
    for number, group in groupby(range(len(places)), key=places.__getitem__):
        example = examples[number]
        members = list(group)
        refusal = refusals[members[0]].as_py()
        if refusal is not None:
            yield BadRow(example.origin, refusal)
            continue
        yield [TokenRow(ids[i], masks[i].view(bool), example.workload) for i in members]


@contextmanager
def _spawning() -> Iterator[None]:
    """Processes of `datasets` start afresh within the block: this one may have threads and a
    device, which a fork does not survive. Its bars are off, as the run has its own."""
    import datasets
    import multiprocess

    method = multiprocess.get_start_method(allow_none=True)
    bars = datasets.is_progress_bar_enabled()
    multiprocess.set_start_method("spawn", force=True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        multiprocess.set_start_method(method, force=True)
        if bars:
            datasets.enable_progress_bars()
