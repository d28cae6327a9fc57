"""Prompts of a load: random tokens, rows of a file, or the first turns of a suite
(inference/evaluation/suites.py).

A file is shuffled by the seed and repeated where it is shorter than the load, as in vLLM.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.evaluation.suites import SUITES, json_lines, load_suite
from draftsmith.speculators.errors import ConfigError, DataError

# a text, token ids, or the messages of a chat
RequestPrompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One request. `output_len`: most tokens of its answer."""

    prompt: RequestPrompt
    output_len: int


def load_questions(options: BenchOptions, tokenizer: Any = None) -> list[Question]:
    """`num_prompts` questions of the dataset, the same for the same options. DataError names a bad
    row. `tokenizer`: of random prompts."""
    if options.random:
        generator = np.random.default_rng([options.seed, 0])
        allowed = sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids})
        rows = generator.choice(allowed, (options.num_prompts, options.random_input_len))
        return [Question(ids.tolist(), options.random_output_len) for ids in rows]
    path = Path(str(options.dataset_path))
    if options.dataset_name in SUITES:
        conversations = load_suite(options.dataset_name, path)
        prompts = [_templated(row.turns[0], options) for row in conversations]
    else:
        prompts = [_custom(row, origin, options) for origin, row in json_lines(path)]
    if not prompts:
        raise DataError("there are no rows", where=f"{path}")
    random.Random(options.seed).shuffle(prompts)
    chosen = (prompts[i % len(prompts)] for i in range(options.num_prompts))
    return [Question(prompt, options.output_len) for prompt in chosen]


def _custom(row: Any, origin: str, options: BenchOptions) -> RequestPrompt:
    """The text or the messages of a row; an answer at their end is left to the server."""
    match row:
        case {"prompt": str(prompt)} if prompt:
            return _templated(prompt, options)
        case {"messages": [_, *_] as messages} if all(map(_is_turn, messages)):
            if not options.chat:
                raise ConfigError("messages need --backend openai-chat", where=origin)
            answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
            return messages[:-1] if answered else messages
    raise DataError("expected prompt, a text, or messages, turns with a role", where=origin)


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message


def _templated(text: str, options: BenchOptions) -> RequestPrompt:
    return [{"role": "user", "content": text}] if options.chat else text
