"""What a load asks: prompts drawn from a seed, or read from files. Knows no server and sends nothing.

A file is shuffled by the seed and begun again where it is shorter than the load, as in vLLM.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speculators.errors import ConfigError, DataError

Message = dict[str, Any]
LOAD_ONLY = "random: load only; acceptance on random tokens says nothing about a drafter"
FILES = ("custom", "spec_bench", "mt_bench")
DATASETS = ("random", *FILES)
DEFAULT_OUTPUT_LEN = 256  # tokens, of every dataset but random
RANDOM_OUTPUT_LEN = 128
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no text are written as
TRIES = 8  # rounds of writing and reading random tokens until their number is right


@dataclass(frozen=True)
class Question:
    """One request to be: a text to go on with, or a conversation; `output_len`: most tokens of its answer."""

    output_len: int
    prompt: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class DatasetOptions:
    """vLLM's options of these names. `output_len`: instead of the dataset's own; -1 in a custom file: the rows' own."""

    name: str
    path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    input_len: int = 1024
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    category: str | None = None
    shuffle: bool = True
    oversample: bool = True


def load_questions(options: DatasetOptions, tokenizer: Any) -> list[Question]:
    """The questions of a dataset, `num_prompts` of them; the same for the same options. ConfigError for options that do
    not fit, DataError for a row."""
    if options.name not in DATASETS:
        raise ConfigError(f"--dataset-name {options.name}: unknown; expected one of {', '.join(DATASETS)}")
    if (options.path is not None) != (options.name in FILES):
        wanted = "needs --dataset-path, a JSONL file" if options.path is None else "takes no --dataset-path"
        raise ConfigError(f"--dataset-name {options.name} {wanted}")
    if options.path is None:
        return _random(options, tokenizer)
    found = _file(options, Path(options.path))
    if options.shuffle:
        random.Random(options.seed).shuffle(found)
    if options.oversample:
        found = [found[i % len(found)] for i in range(options.num_prompts)]
    return found[: options.num_prompts]


def as_texts(questions: Sequence[Question], tokenizer: Any, *, raw: bool) -> list[Question]:
    """Conversations written out for an endpoint that takes texts, by the chat template; `raw`: what was said alone."""
    return [each if each.prompt is not None else _written(each, tokenizer, raw) for each in questions]


def as_chats(questions: Sequence[Question]) -> list[Question]:
    """Texts as what a user says, for an endpoint that takes conversations."""
    return [Question(q.output_len, messages=q.messages or _said(q.prompt or "")) for q in questions]


def _said(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _written(question: Question, tokenizer: Any, raw: bool) -> Question:
    if raw:
        return replace(question, prompt="\n\n".join(str(m["content"]) for m in question.messages), messages=())
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the dataset holds conversations and the tokenizer has no chat template: use --backend openai-chat, whose "
            "server applies its own, or --skip-chat-template to send what was said as it is"
        )
    text = tokenizer.apply_chat_template(list(question.messages), tokenize=False, add_generation_prompt=True)
    bos = tokenizer.bos_token
    if bos and tokenizer(text).input_ids[:2] == [tokenizer.bos_token_id] * 2:
        text = text.removeprefix(bos)  # the server writes it again
    return replace(question, prompt=text, messages=())


# ---------------------------------------------------------------------------------------------------- random


def _random(options: DatasetOptions, tokenizer: Any) -> list[Question]:
    if tokenizer is None:
        raise ConfigError(
            "--dataset-name random: prompts of so many tokens need the server's tokenizer; name its folder or "
            "repository id with --tokenizer"
        )
    if not 0 <= options.range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {options.range_ratio:g}: expected a number from 0 to below 1")
    rng = np.random.default_rng([options.seed, 0])
    allowed = _plain_tokens(tokenizer)
    prefix = rng.choice(allowed, options.prefix_len).tolist()
    added = tokenizer.num_special_tokens_to_add()
    questions = []
    for _ in range(options.num_prompts):
        length = max(1, _around(rng, options.input_len, options.range_ratio) - added)
        text = _text_of_length(rng, tokenizer, allowed, prefix, len(prefix) + length)
        output_len = _around(rng, options.output_len or RANDOM_OUTPUT_LEN, options.range_ratio)
        questions.append(Question(max(1, output_len), text))
    return questions


def require_room(options: DatasetOptions, context: int | None) -> None:
    """ConfigError for random prompts and answers that cannot fit into the model's context; of other datasets only the
    server knows."""
    if options.name != "random" or context is None:
        return
    prompt = options.prefix_len + math.ceil(options.input_len * (1 + options.range_ratio))
    answer = math.ceil((options.output_len or RANDOM_OUTPUT_LEN) * (1 + options.range_ratio))
    if prompt + answer > context:
        raise ConfigError(
            f"--dataset-name random: prompts of up to {prompt} tokens and answers of up to {answer} are "
            f"{prompt + answer} together, and the server's model has a context of {context}. Lower "
            "--random-input-len or --random-output-len, or serve a model with a longer one"
        )


def _plain_tokens(tokenizer: Any) -> np.ndarray:
    """Tokens with a text of their own: neither special nor a part of a character."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    texts = (tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids)
    return np.array([i for i, text in zip(ids, texts, strict=True) if text and UNREADABLE not in text])


def _around(rng: np.random.Generator, length: int, ratio: float) -> int:
    return int(rng.integers(int(length * (1 - ratio)), int(np.ceil(length * (1 + ratio))) + 1)) if ratio else length


def _text_of_length(
    rng: np.random.Generator, tokenizer: Any, allowed: np.ndarray, prefix: list[int], length: int
) -> str:
    """A text of `length` tokens, or nearly: what tokens are written as may be read as others, and fewer."""
    ids, text = prefix, ""
    for _ in range(TRIES):
        ids = [*ids, *rng.choice(allowed, max(0, length - len(ids))).tolist()][:length]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == length:
            break
    return text


# ----------------------------------------------------------------------------------------------------- files


def _file(options: DatasetOptions, path: Path) -> list[Question]:
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: could not be read: {error}") from error
    read = _custom_row if options.name == "custom" else _turns_row
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}; expected one object a line") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object, got {line[:60]}")
        question = read(row, options, where)
        if question is not None:
            found.append(question)
    if not found:
        kept = f" of category {options.category!r}" if options.category else ""
        raise DataError(f"{path}: there are no rows{kept}")
    return found


def _custom_row(row: dict[str, Any], options: DatasetOptions, where: str) -> Question:
    length: Any = DEFAULT_OUTPUT_LEN if options.output_len is None else options.output_len
    if length == -1:
        length = row.get("output_tokens")
        if not isinstance(length, int) or length < 1:
            raise DataError(f"{where}: expected output_tokens, a number of tokens, got {length}; or give --output-len")
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return Question(length, messages=_said(prompt))
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        answered = len(messages) > 1 and messages[-1]["role"] == "assistant"  # the server is to write this answer
        return Question(length, messages=tuple(messages[:-1] if answered else messages))
    raise DataError(f"{where}: expected prompt, a text, or messages, turns with a role; its keys are {', '.join(row)}")


def _turns_row(row: dict[str, Any], options: DatasetOptions, where: str) -> Question | None:
    """The first turn, as vLLM asks it; None: of another category."""
    if options.category is not None and row.get("category") != options.category:
        return None
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise DataError(f"{where}: expected turns, a list of texts; its keys are {', '.join(row)}")
    return Question(options.output_len or DEFAULT_OUTPUT_LEN, messages=_said(turns[0]))
