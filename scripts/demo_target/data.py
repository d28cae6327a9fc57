"""Training data of the quickstart's target: its tokenizer, token files, batches, and drills made on the fly.

The conversations are those of corpus.py, more of them than are committed; the code is the interpreter's standard
library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch

from scripts.demo_target.corpus import TEXT, conversations, draw_table, markdown
from scripts.demo_target.model import VOCAB
from train.data import stdlib_source

# Conversations of each workload: more of what is harder to learn.
CONVERSATIONS = {"math": 12_000, "python": 7_000, "json": 7_000, "rewrite": 30_000, "table": 30_000, "chat": 9_000}
CODE_WEIGHT = 0.15  # of a token of source code, which is far less predictable than an answer and would drown it
COMPARED = TEXT["table"]["compared"]  # columns of numbers
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]
# Digits stand alone, so that arithmetic is over digits; words keep their leading space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Pairs = Iterator[tuple[str, str]]  # (shown, completion)
WORK = Path("runs/demo-target")
TARGET = Path("recipes/quickstart/target")


def build_tokenizer(texts):
    """Byte-level BPE of VOCAB tokens with ChatML markers and a template that marks what the assistant says."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
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
    """Make the tokenizer, unless TARGET has one, and the token files below WORK; `say` gets their sizes."""
    from transformers import AutoTokenizer

    WORK.mkdir(parents=True, exist_ok=True)
    training = [c for name, count in CONVERSATIONS.items() for c in conversations("train", count, seed, [name])]
    code = list(stdlib_source.snippets("train", snippets, seed, max_chars=1500))
    if (TARGET / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
    else:
        sample = ["\n".join(m["content"] for m in t.messages) for t in training[::10]] + code[:3000]
        tokenizer = build_tokenizer(sample)
        TARGET.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(TARGET)
    held_out = list(conversations("validation", 300, seed)), list(stdlib_source.snippets("validation", 100, seed, 1500))
    for split, (talks, texts) in {"train": (training, code), "validation": held_out}.items():
        ids, weights, ends = [], [], []
        for talk in talks:
            out = tokenizer.apply_chat_template(
                talk.messages, tokenize=True, return_assistant_tokens_mask=True, return_dict=True
            )
            ids += out["input_ids"]
            weights += out["assistant_masks"]
            ends.append(len(ids))
        for text in texts:
            tokens = tokenizer(text)["input_ids"][:512]
            ids += tokens
            weights += [1] * len(tokens)
            ends.append(len(ids))
        np.savez(
            WORK / f"{split}.npz",
            ids=np.array(ids, np.uint16),
            weights=np.array(weights, np.uint8),
            ends=np.array(ends, np.int64),
            talks=len(talks),
        )
        say(
            f"{split}: {len(talks)} conversations, {ends[len(talks) - 1]:,} tokens; "
            f"{len(texts)} excerpts, {len(ids) - ends[len(talks) - 1]:,} tokens"
        )


class Batches:
    """Documents of like length, `tokens` per batch, right-padded: no attention is spent across documents.

    `at(step, rank, world)` is a pure function of its arguments, so a resumed run sees what it would have seen.
    """

    def __init__(self, path: Path, tokens: int, code_share: float, drill_share: float = 0.0, table_share: float = 0.0):
        file = np.load(path)
        self.ids, self.weights, ends = (
            file["ids"].astype(np.int64),
            file["weights"].astype(np.float32),
            file["ends"],
        )
        self.weights[ends[int(file["talks"]) - 1] :] *= CODE_WEIGHT
        self.spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], 1)
        self.talks, self.tokens, self.code_share = int(file["talks"]), tokens, code_share
        lengths = self.spans[:, 1] - self.spans[:, 0]
        order = np.argsort(lengths, kind="stable")
        self.by_length = [order[order < self.talks], order[order >= self.talks]]
        self.lengths, self.drill_share, self.tokenizer = lengths, drill_share, None
        self.table_share = table_share  # of the steps, on tables alone: they are learnt last
        before = sum(list(CONVERSATIONS.values())[: list(CONVERSATIONS).index("table")])
        self.tables = order[(order >= before) & (order < before + CONVERSATIONS["table"])]

    def _copy_drill(self, length: int, rng: np.random.Generator):
        """Rows of unrelated tokens of which spans come again in any order: only looking back predicts them.

        What the six workloads have in common is copying from the request; drilled alone it is learnt in minutes.
        """
        rows = max(self.tokens // (2 * length), 1)
        x, w = np.zeros((rows, 2 * length), np.int64), np.zeros((rows, 2 * length), np.float32)
        for i in range(rows):
            places = rng.integers(0, len(self.ids), length)
            x[i, :length], at = self.ids[places], length
            while at < 2 * length:
                size = min(int(rng.integers(2, 16)), 2 * length - at)
                start = int(rng.integers(0, length - size + 1))
                x[i, at : at + size] = x[i, start : start + size]
                w[i, at + 1 : at + size] = 1.0  # the first token of a span cannot be known
                at += size
        return torch.from_numpy(x), torch.from_numpy(w)

    def _pair_drill(self, width: int, rng: np.random.Generator, pieces: Callable[[np.random.Generator], Pairs]):
        """Rows of `width` tokens of (shown, completion) pairs; only the completions have weight."""
        from transformers import AutoTokenizer

        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        rows = self.tokens // width
        x, w = np.full((rows, width), 3, np.int64), np.zeros((rows, width), np.float32)
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
        return self._pair_drill(120, rng, _sum) if step % 3 == 1 else self._pair_drill(240, rng, _lookups)

    def at(self, step: int, rank: int, world: int):
        shared, rng = np.random.default_rng([step, 7]), np.random.default_rng([step, rank, 7])
        if shared.random() < self.drill_share:  # all ranks draw rows of like length: none waits for another
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
        x, w = np.full((len(picked), width), 3, np.int64), np.zeros((len(picked), width), np.float32)
        for i, doc in enumerate(picked):
            a, b = self.spans[doc]
            x[i, : b - a], w[i, : b - a] = self.ids[a:b], self.weights[a:b]
        return torch.from_numpy(x), torch.from_numpy(w)


def _lookups(rng: np.random.Generator) -> Pairs:
    """A table, and cells of it asked for one after the other; two numbers of a column are compared."""
    draw = Random(int(rng.integers(2**32)))
    _, table = draw_table(draw)
    yield markdown(table) + "\n\n", ""
    names = next(iter(table.values()))
    for _ in range(8):
        column = draw.choice(list(table)[1:])
        values = dict(zip(names, table[column]))
        first, second = draw.sample(names, 2)
        yield f"{column}. {first}:", f" {values[first]}"
        more, less = sorted((first, second), key=lambda name: re.sub(r"\D", "", values[name]).zfill(3), reverse=True)
        compared = f". {values[more]} ({more}) is more than {values[less]} ({less})."
        yield f", {second}:", f" {values[second]}{compared if column in COMPARED else '.'}"
        yield "\n", ""


def _sum(rng: np.random.Generator) -> Pairs:
    """A sum or a comparison of the size that occurs in the workloads, and its completion."""
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
