"""Prompts of a load: random ones, rows of a file, or the conversations of a suite
(inference/evaluation/suites.py).

A file is shuffled by the seed and repeated where it is shorter than the load, as in vLLM.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inference.bench.options import BenchOptions
from inference.evaluation.suites import SUITES, json_lines, load_suite
from speculators.errors import ConfigError, DataError

DEFAULT_OUTPUT_LEN = 256  # tokens, of files with turns
RETOKENISATIONS = 8  # attempts at a text with the wanted number of tokens


@dataclass(frozen=True)
class Question:
    """One request: a text to continue, or a conversation. `output_len`: most tokens of its answer;
    `later`: turns of the user that are asked after it, each when the answer before it is there."""

    output_len: int
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    later: tuple[str, ...] = ()

    def then(self, answer: str) -> Question:
        """The next turn of the conversation, after `answer`."""
        turns = ({"role": "assistant", "content": answer}, *_user(self.later[0]))
        return replace(self, prompt=None, messages=(*self.messages, *turns), later=self.later[1:])


def load_questions(options: BenchOptions, tokenizer: Any) -> list[Question]:
    """`num_prompts` questions of the dataset, the same for the same options. DataError names a bad
    row."""
    if options.dataset_path is None:
        return _random(options, tokenizer)
    questions = (
        _suite(options)
        if options.dataset_name in SUITES
        else _custom(options, Path(options.dataset_path))
    )
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(questions)
    if not options.no_oversample:
        questions = [questions[i % len(questions)] for i in range(options.num_prompts)]
    return questions[: options.num_prompts]


def as_text(question: Question, tokenizer: Any, *, raw: bool) -> Question:
    """A conversation as a text, by the chat template. `raw`: the plain contents of the messages."""
    if question.prompt is not None:
        return question
    if raw:
        return replace(
            question, prompt="\n\n".join(str(message["content"]) for message in question.messages)
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the dataset holds conversations and the tokenizer has no chat template: use --backend"
            " openai-chat, whose server applies its own, or --skip-chat-template to send the plain"
            " contents of the messages"
        )
    text = tokenizer.apply_chat_template(
        list(question.messages), tokenize=False, add_generation_prompt=True
    )
    bos = tokenizer.bos_token
    if bos and tokenizer(text).input_ids[:2] == [tokenizer.bos_token_id] * 2:
        text = text.removeprefix(bos)  # the server adds it again
    return replace(question, prompt=text)


def as_chat(question: Question) -> Question:
    """A text as a message of the user."""
    return replace(
        question, prompt=None, messages=question.messages or _user(question.prompt or "")
    )


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _random(options: BenchOptions, tokenizer: Any) -> list[Question]:
    if tokenizer is None:
        raise ConfigError(
            "--dataset-name random needs the server's tokenizer; name its folder or id with"
            " --tokenizer"
        )
    rng = np.random.default_rng([options.seed, 0])
    special = set(tokenizer.all_special_ids)
    texts = {
        i: tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in range(len(tokenizer))
    }
    # tokens with a text of their own, and not a part of a character
    allowed = [
        i
        for i, text in texts.items()
        if i not in special and text and "\N{REPLACEMENT CHARACTER}" not in text
    ]
    prefix = rng.choice(allowed, options.random_prefix_len).tolist()
    added = tokenizer.num_special_tokens_to_add()

    def length(mean: int) -> int:
        low, high = (
            int(mean * (1 - options.random_range_ratio)),
            math.ceil(mean * (1 + options.random_range_ratio)),
        )
        return int(rng.integers(low, high + 1)) if low < high else mean

    def text_of(tokens: int) -> str:
        """A text of about `tokens` tokens: the tokenizer may read fewer in the text of random
        ones."""
        ids, text = prefix, ""
        for _ in range(RETOKENISATIONS):
            ids = [*ids, *rng.choice(allowed, max(0, tokens - len(ids))).tolist()][:tokens]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if len(ids) == tokens:
                break
        return text

    questions = []
    for _ in range(options.num_prompts):
        text = text_of(len(prefix) + max(1, length(options.random_input_len) - added))
        questions.append(
            Question(max(1, length(options.output_len or options.random_output_len)), text)
        )
    return questions


def require_room(options: BenchOptions, context: int | None) -> None:
    """ConfigError for random prompts and answers that are longer than the model's context. Only the
    server knows the lengths in tokens of other datasets."""
    if not options.load_only or context is None:
        return
    longest = 1 + options.random_range_ratio
    prompt = options.random_prefix_len + math.ceil(options.random_input_len * longest)
    answer = math.ceil((options.output_len or options.random_output_len) * longest)
    if prompt + answer > context:
        raise ConfigError(
            f"--dataset-name random: prompts of up to {prompt} tokens and answers of up to {answer}"
            f" are {prompt + answer} together, and the server's model has a context of {context};"
            " lower --random-input-len or --random-output-len, or serve a model with a longer one"
        )


def _custom(options: BenchOptions, path: Path) -> list[Question]:
    questions = []
    for origin, row in json_lines(path):
        try:
            questions.append(_custom_row(row, options))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{origin}: {error}: {json.dumps(row)[:80]}") from None
    if not questions:
        raise DataError(f"{path}: there are no rows")
    return questions


def _suite(options: BenchOptions) -> list[Question]:
    """The conversations of a suite, of one category if the options name one."""
    path, category = str(options.dataset_path), options.spec_bench_category
    length = options.output_len or DEFAULT_OUTPUT_LEN
    read = [
        one for one in load_suite(options.dataset_name, path) if category in (None, one.category)
    ]
    if not read:
        raise DataError(f"{path}: there are no rows of category {category!r}")
    last = 1 if options.first_turns_only else None
    return [Question(length, messages=_user(one.turns[0]), later=one.turns[1:last]) for one in read]


def _custom_row(row: dict[str, Any], options: BenchOptions) -> Question:
    """ValueError says what was expected."""
    prompt, messages, length = (
        row.get("prompt"),
        row.get("messages"),
        options.output_len or options.custom_output_len,
    )
    if length == -1:
        length = row.get("output_tokens", 0)
        if not isinstance(length, int) or length < 1:
            raise ValueError("expected output_tokens, a number of tokens; or give --output-len")
    if isinstance(prompt, str) and prompt:
        return Question(length, messages=_user(prompt))
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        answered = (
            len(messages) > 1 and messages[-1]["role"] == "assistant"
        )  # the server is to write this answer
        return Question(length, messages=tuple(messages[:-1] if answered else messages))
    raise ValueError("expected prompt, a text, or messages, turns with a role")
