"""Training data of the quickstart's target: its tokenizer, token files, batches, and drills
generated on the fly.

The conversations are those of corpus.py, more of them than are committed; the code is the
interpreter's standard library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scripts.demo_target.corpus import TEXT, conversations, draw_table, markdown
from scripts.demo_target.model import VOCAB
from train.data import stdlib_source

# Conversations of each workload: more of what is harder to learn.
CONVERSATIONS = {
    "math": 12_000,
    "python": 7_000,
    "json": 7_000,
    "rewrite": 30_000,
    "table": 30_000,
    "chat": 9_000,
}
# of a token of source code, which is far less predictable than an answer and would drown it
CODE_WEIGHT = 0.15
COMPARED = TEXT["table"]["compared"]  # columns of numbers
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]
# Digits stand alone, so that arithmetic is over digits; words keep their leading space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] =="
    " 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n{% else"
    " %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
PAD = 3
Pairs = Iterator[tuple[str, str]]  # (shown, completion)
WORK = Path("runs/demo-target")
TARGET = Path("recipes/quickstart/target")


def build_tokenizer(texts):
    """Byte-level BPE of VOCAB tokens with ChatML markers, and a template that marks the assistant's
    tokens."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, **options))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        mask_token="<|mask|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def write_token_files(snippets: int, seed: int, say: Callable[[str], None]) -> None:
    """Makes the tokenizer, unless TARGET has one, and the token files below WORK; `say` gets their
    sizes."""
    WORK.mkdir(parents=True, exist_ok=True)
    training = [
        c
        for name, count in CONVERSATIONS.items()
        for c in conversations("train", count, seed, [name])
    ]
    code = list(stdlib_source.snippets("train", snippets, seed, max_chars=1500))
    if (TARGET / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
    else:
        sample = ["\n".join(m["content"] for m in t.messages) for t in training[::10]] + code[:3000]
        tokenizer = build_tokenizer(sample)
        tokenizer.save_pretrained(TARGET)
    held_out = (
        list(conversations("validation", 300, seed)),
        list(stdlib_source.snippets("validation", 100, seed, 1500)),
    )
    for split, (talks, texts) in {"train": (training, code), "validation": held_out}.items():
        ids, weights, ends = [], [], []
        for talk in talks:
            out = tokenizer.apply_chat_template(
                talk.messages, return_assistant_tokens_mask=True, return_dict=True
            )
            ids += out["input_ids"]
            weights += out["assistant_masks"]
            ends.append(len(ids))
        of_talks = len(ids)
        for text in texts:
            tokens = tokenizer(text)["input_ids"][:512]
            ids += tokens
            weights += [1] * len(tokens)
            ends.append(len(ids))
        arrays = {
            "ids": np.array(ids, np.uint16),
            "weights": np.array(weights, np.uint8),
            "ends": np.array(ends),
        }
        np.savez(WORK / f"{split}.npz", talks=len(talks), **arrays)
        say(
            f"{split}: {len(talks)} conversations, {of_talks:,} tokens; {len(ids) - of_talks:,}"
            " tokens of code"
        )


class Batches:
    """Documents of similar length, about `tokens` per batch, right-padded, so that no attention
    crosses documents.

    `at(step, rank, world)` is a pure function of its arguments, so that a resumed run continues
    with the same batches. `code_share`, `drill_share`, `table_share`: of the steps, those on code,
    on drills, on tables alone."""

    def __init__(
        self,
        path: Path,
        tokens: int,
        code_share: float,
        drill_share: float = 0.0,
        table_share: float = 0.0,
    ):
        file = np.load(path)
        self.ids, self.weights, ends = (
            file["ids"].astype(np.int64),
            file["weights"].astype(np.float32),
            file["ends"],
        )
        talks = int(file["talks"])
        self.weights[ends[talks - 1] :] *= CODE_WEIGHT
        self.spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], 1)
        self.lengths = self.spans[:, 1] - self.spans[:, 0]
        order = np.argsort(self.lengths, kind="stable")
        self.by_length = [order[order < talks], order[order >= talks]]
        before = sum(list(CONVERSATIONS.values())[: list(CONVERSATIONS).index("table")])
        self.tables = order[(order >= before) & (order < before + CONVERSATIONS["table"])]
        self.tokens, self.code_share, self.drill_share = tokens, code_share, drill_share
        self.table_share, self.tokenizer = table_share, None

    def _copy_drill(self, length: int, rng: np.random.Generator):
        """Rows of random tokens, spans of which are repeated in random order: only looking back
        predicts them.

        The six workloads have in common that answers copy from the request; this drill teaches it
        within minutes."""
        rows = max(self.tokens // (2 * length), 1)
        x, w = np.zeros((rows, 2 * length), np.int64), np.zeros((rows, 2 * length), np.float32)
        for i in range(rows):
            places = rng.integers(0, len(self.ids), length)
            x[i, :length], at = self.ids[places], length
            while at < 2 * length:
                size = min(int(rng.integers(2, 16)), 2 * length - at)
                start = int(rng.integers(0, length - size + 1))
                x[i, at : at + size] = x[i, start : start + size]
                w[i, at + 1 : at + size] = 1.0  # the first token of a span cannot be predicted
                at += size
        return torch.from_numpy(x), torch.from_numpy(w)

    def _pair_drill(
        self, width: int, rng: np.random.Generator, pieces: Callable[[np.random.Generator], Pairs]
    ):
        """Rows of `width` tokens of (shown, completion) pairs; only the completions have weight."""
        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        rows = self.tokens // width
        x, w = np.full((rows, width), PAD, np.int64), np.zeros((rows, width), np.float32)
        for i in range(rows):
            at, end = 0, 0
            while end <= width:
                for shown, completion in pieces(rng):
                    a, b = (self.tokenizer(text)["input_ids"] for text in (shown, completion))
                    end = at + len(a) + len(b)
                    if end > width:
                        break
                    x[i, at:end], w[i, at + len(a) : end] = [*a, *b], 1.0
                    at = end
        return torch.from_numpy(x), torch.from_numpy(w)

    def _drill(self, step: int, shared: np.random.Generator, rng: np.random.Generator):
        if step % 3 == 0:
            return self._copy_drill(int(shared.integers(24, 120)), rng)
        return (
            self._pair_drill(120, rng, _sum)
            if step % 3 == 1
            else self._pair_drill(240, rng, _lookups)
        )

    def at(self, step: int, rank: int, world: int):
        shared, rng = np.random.default_rng([step, 7]), np.random.default_rng([step, rank, 7])
        if shared.random() < self.drill_share:  # all ranks draw rows of similar length
            return self._drill(step, shared, rng)
        pool = self.by_length[int(shared.random() < self.code_share)]
        if self.table_share and shared.random() < self.table_share:
            pool = self.tables
        centre = int(shared.integers(len(pool)))
        length = int(self.lengths[pool[centre]])
        rows = max(self.tokens // max(length, 1), 1)
        near = np.unique(pool[max(0, centre - 16 * rows) : centre + 16 * rows + 1])
        picked = rng.choice(near, size=min(rows, len(near)), replace=False)
        width = int(self.lengths[picked].max())
        x, w = (
            np.full((len(picked), width), PAD, np.int64),
            np.zeros((len(picked), width), np.float32),
        )
        for i, doc in enumerate(picked):
            a, b = self.spans[doc]
            x[i, : b - a], w[i, : b - a] = self.ids[a:b], self.weights[a:b]
        return torch.from_numpy(x), torch.from_numpy(w)


def _lookups(rng: np.random.Generator) -> Pairs:
    """A table, then questions about its cells; two numbers of a column are compared."""
    draw = Random(int(rng.integers(2**32)))
    _, table = draw_table(draw)
    yield markdown(table) + "\n\n", ""
    names = next(iter(table.values()))
    for _ in range(8):
        column = draw.choice(list(table)[1:])
        values = dict(zip(names, table[column]))
        first, second = draw.sample(names, 2)
        yield f"{column}. {first}:", f" {values[first]}"
        more, less = sorted(
            (first, second), key=lambda name: re.sub(r"\D", "", values[name]).zfill(3), reverse=True
        )
        compared = f". {values[more]} ({more}) is more than {values[less]} ({less})."
        yield f", {second}:", f" {values[second]}{compared if column in COMPARED else '.'}"
        yield "\n", ""


def _sum(rng: np.random.Generator) -> Pairs:
    """A sum or a comparison of the sizes that occur in the workloads, and its completion."""
    kind = rng.integers(4)
    a, b = (int(n) for n in rng.integers(1, 60, 2))
    if kind == 0:
        m, n = (int(n) for n in rng.integers(2, 10, 2))
        yield f"{m} * {n} =", f" {m * n}. "
    elif kind == 1:
        a, b = max(a, b) + int(rng.integers(0, 12)), min(a, b)
        yield f"{a} - {b} =", f" {a - b}. "
    elif kind == 2:
        yield f"{a} + {b} =", f" {a + b}. "
    else:
        a, b = (int(n) for n in rng.choice(np.arange(1, 100), 2, replace=False))
        yield f"{a}, {b}:", f" {max(a, b)} is more than {min(a, b)}. "
