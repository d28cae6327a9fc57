"""Responses written by the target itself, so that a head learns what it will be asked to predict.

Every example becomes a prompt (all before its last response) and the target continues it at the recipe's sampling
settings. Finished responses are appended to a JSONL file named after everything they depend on, so a killed run
continues where it was and a changed target, template or setting starts afresh. They are written a chunk at a time and
a chunk counts only whole: the batches after a kill are those there would have been, and so are the responses, also
where low precision makes a token depend on the shape of its batch.
Knows nothing of drafters, losses or packing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference import LLM, SamplingParams
from speculators.errors import DataError
from train.masks import ConversationTokenizer, TokenRow
from train.recipe_data import RegenerateSection, TemperatureShare
from train.sources import Example

Progress = Callable[[int, int], None]  # done, total
CHUNK_END = "{}"


@dataclass(frozen=True)
class Response:
    """One prompt and what the target wrote, as tokens."""

    workload: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float

    def row(self) -> TokenRow:
        return TokenRow.from_response(self.prompt_ids, self.output_ids, self.workload)


def temperatures_of(shares: Sequence[TemperatureShare], count: int) -> list[float]:
    """The temperature of each of `count` examples: the shares of the recipe, spread evenly and in a fixed order."""
    spent = [0.0] * len(shares)
    chosen = []
    for i in range(count):
        behind = [entry.share * (i + 1) - done for entry, done in zip(shares, spent)]
        index = max(range(len(behind)), key=behind.__getitem__)
        spent[index] += 1
        chosen.append(shares[index].temperature)
    return chosen


def settings_hash(section: RegenerateSection, target_hash: str) -> str:
    """What every response depends on beside its prompt: the target's weights and the sampling settings."""
    settings = {"target": target_hash, **section.model_dump(include={"top_p", "top_k", "max_new_tokens", "seed"})}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def regenerate(
    llm: LLM,
    examples: Sequence[Example],
    tokenizer: ConversationTokenizer,
    section: RegenerateSection,
    *,
    target_hash: str,
    folder: Path,
    max_length: int,
    temperatures: Sequence[float] | None = None,
    progress: Progress | None = None,
) -> list[Response]:
    """The target's responses to `examples`, in order; `temperatures` (one per example) overrides the recipe's shares.

    A prompt that leaves no room in `max_length` is left out; DataError if none is left.
    """
    temperatures = temperatures if temperatures is not None else temperatures_of(section.temperatures, len(examples))
    prompts = [tuple(tokenizer.prompt_ids(example)) for example in examples]
    room = min(max_length, llm.engine.max_model_len) - 2
    wanted = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
    if not wanted:
        raise DataError(f"regenerate: all {len(prompts)} prompts are longer than {room} tokens; raise data.max_length")
    path = folder / f"{settings_hash(section, target_hash)}.jsonl"
    keys = {i: _key(prompts[i], temperatures[i], i) for i in wanted}
    known = _read(path)
    missing = [i for i in wanted if keys[i] not in known]
    done = len(wanted) - len(missing)
    if progress is not None:
        progress(done, len(wanted))
    folder.mkdir(parents=True, exist_ok=True)
    by_length = sorted(missing, key=lambda i: len(prompts[i]))  # like lengths together: little padding
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, len(by_length), 8 * section.batch_size):
            chunk = by_length[start : start + 8 * section.batch_size]
            params = [
                _params(section, temperatures[i], i, min(section.max_new_tokens, room + 2 - len(prompts[i])))
                for i in chunk
            ]
            inputs = [{"prompt_token_ids": list(prompts[i])} for i in chunk]
            for i, output in zip(chunk, llm.generate(inputs, params, use_tqdm=False)):
                known[keys[i]] = list(output.outputs[0].token_ids)
            lines = [json.dumps({"key": keys[i], "token_ids": known[keys[i]]}) for i in chunk]
            file.write("\n".join([*lines, CHUNK_END]) + "\n")
            file.flush()
            done += len(chunk)
            if progress is not None:
                progress(done, len(wanted))
    return [
        Response(examples[i].workload, prompts[i], tuple(known[keys[i]]), temperatures[i])
        for i in wanted
        if known[keys[i]]
    ]


def _params(section: RegenerateSection, temperature: float, index: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_tokens=max_tokens,
        seed=int.from_bytes(hashlib.sha256(f"{section.seed}/{index}".encode()).digest()[:6], "big"),
    )


def _key(prompt: tuple[int, ...], temperature: float, index: int) -> str:
    """One response's name: prompt, temperature and place (equal prompts get different samples)."""
    text = json.dumps([list(prompt), temperature, index if temperature else 0])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, list[int]]:
    """The whole chunks that an earlier run wrote; one torn by a kill is cut off the file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    end = text.rfind(CHUNK_END + "\n")
    whole = text[: end + len(CHUNK_END) + 1] if end >= 0 else ""
    if len(whole) < len(text):
        path.write_text(whole, encoding="utf-8")
    entries = [json.loads(line) for line in whole.splitlines() if line != CHUNK_END]
    return {entry["key"]: entry["token_ids"] for entry in entries}
