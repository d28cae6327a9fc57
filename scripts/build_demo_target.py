"""Train the quickstart's embedded target from scratch: tokenizer, data, training, evaluation, export.

    python scripts/build_demo_target.py data                 # tokenizer and token files, once
    torchrun --nproc-per-node 2 scripts/build_demo_target.py train --minutes 76
    python scripts/build_demo_target.py export               # bf16 weights, held-out rates, model card

`train` saves every few minutes and continues where it was when run again; the learning rate follows the share of
`--minutes` that is spent, so a run can be lengthened or shortened half-way. Works on CPU processes (gloo) and GPUs.
Reads only the conversations of train.demo and the interpreter's own standard library (train.stdlib_source).
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import typer
from rich.console import Console

from train import demo, stdlib_source

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
VOCAB = 4096
LAYERS = 16
# Conversations of each workload: more of what is harder to learn.
CONVERSATIONS = {"math": 12_000, "python": 7_000, "json": 7_000, "rewrite": 30_000, "table": 30_000, "chat": 9_000}
CODE_WEIGHT = 0.15  # of a token of source code, which is far less predictable than an answer and would drown it
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
WORK = Path("runs/demo-target")
TARGET = Path("recipes/quickstart/target")


# ---------------------------------------------------------------- tokenizer and data


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


@app.command()
def data(snippets: int = 16_000, seed: int = 0):
    """Make the tokenizer (unless the target folder has one) and the token files below runs/demo-target."""
    from transformers import AutoTokenizer

    WORK.mkdir(parents=True, exist_ok=True)
    talks = [c for name, count in CONVERSATIONS.items() for c in demo.conversations("train", count, seed, [name])]
    code = list(stdlib_source.snippets("train", snippets, seed, max_chars=1500))
    if (TARGET / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
    else:
        sample = ["\n".join(m["content"] for m in t.messages) for t in talks[::10]] + code[:3000]
        tokenizer = build_tokenizer(sample)
        TARGET.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(TARGET)
    for split, rows in (
        ("train", (talks, code)),
        (
            "validation",
            (
                list(demo.conversations("validation", 300, seed)),
                list(stdlib_source.snippets("validation", 100, seed, 1500)),
            ),
        ),
    ):
        ids, weights, ends = [], [], []
        for talk in rows[0]:
            out = tokenizer.apply_chat_template(
                talk.messages, tokenize=True, return_assistant_tokens_mask=True, return_dict=True
            )
            ids += out["input_ids"]
            weights += out["assistant_masks"]
            ends.append(len(ids))
        for text in rows[1]:
            tokens = tokenizer(text)["input_ids"][:512]
            ids += tokens
            weights += [1] * len(tokens)
            ends.append(len(ids))
        np.savez(
            WORK / f"{split}.npz",
            ids=np.array(ids, np.uint16),
            weights=np.array(weights, np.uint8),
            ends=np.array(ends, np.int64),
            talks=len(rows[0]),
        )
        console.print(
            f"{split}: {len(rows[0])} conversations, {ends[len(rows[0]) - 1]:,} tokens; "
            f"{len(rows[1])} excerpts, {len(ids) - ends[len(rows[0]) - 1]:,} tokens"
        )


class Batches:
    """Documents of like length, `tokens` per batch, right-padded: no attention is spent across documents.

    `at(step, rank, world)` is a pure function of its arguments, so a resumed run sees what it would have seen.
    """

    def __init__(self, path: Path, tokens: int, code_share: float, drill_share: float = 0.0):
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

    def _sums_drill(self, rng: np.random.Generator):
        """Rows of equations and comparisons such as the workloads need, of which only the results count."""
        from transformers import AutoTokenizer

        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        rows = self.tokens // 120
        x, w = np.full((rows, 120), 3, np.int64), np.zeros((rows, 120), np.float32)
        for i in range(rows):
            at = 0
            while True:
                told, result = _sum(rng)
                a, b = (self.tokenizer(text)["input_ids"] for text in (told, result))
                end = at + len(a) + len(b)
                if end > 120:
                    break
                x[i, at:end], w[i, at + len(a) : end] = [*a, *b], 1.0
                at = end
        return torch.from_numpy(x), torch.from_numpy(w)

    def at(self, step: int, rank: int, world: int):
        shared, rng = np.random.default_rng([step, 7]), np.random.default_rng([step, rank, 7])
        if shared.random() < self.drill_share:  # all ranks draw rows of like length: none waits for another
            return self._sums_drill(rng) if step % 3 else self._copy_drill(int(shared.integers(24, 120)), rng)
        pool = self.by_length[int(shared.random() < self.code_share)]
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


def _sum(rng: np.random.Generator) -> tuple[str, str]:
    """A task of the size that occurs in the workloads, and what completes it."""
    kind = rng.integers(4)
    a, b = (int(n) for n in rng.integers(1, 60, 2))
    if kind == 0:
        m, n = (int(n) for n in rng.integers(2, 10, 2))
        return f"{m} * {n} =", f" {m * n}. "
    if kind == 1:
        a, b = max(a, b) + int(rng.integers(0, 12)), min(a, b)
        return f"{a} - {b} =", f" {a - b}. "
    if kind == 2:
        return f"{a} + {b} =", f" {a + b}. "
    a, b = (int(n) for n in rng.choice(np.arange(1, 100), 2, replace=False))
    return f"{a}, {b}:", f" {max(a, b)} is more than {min(a, b)}. "


# ---------------------------------------------------------------- training


def build_model(layers: int = LAYERS, vocab: int = VOCAB):
    """Deep and narrow, as real targets are relative to their heads: Qwen3, 16 layers of 256."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=3,
        bos_token_id=None,
        initializer_range=0.02,
    )
    model = Qwen3ForCausalLM(config)
    for name, p in model.named_parameters():  # residual writes start small in a deep net
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.data.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


@torch.no_grad()
def start_with_copying(model) -> None:
    """Initial weights that already look back: what followed the last time this token stood here?

    Copying from the request is what the workloads have in common, and small models find it late: it takes two layers
    that are no use without each other. So the first layer begins with two heads that look at the tokens one and two
    places back, the second with two that look for the place where these are the current ones. All of it is trained
    on, and whatever serves better replaces it. (Circuit: Olsson et al., arXiv 2209.11895.)
    """
    config, last = model.config, model.config.hidden_size - 1
    D, half = config.head_dim, config.head_dim // 2
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=0.05)
    embedding[:, last] = 0.5  # the same for all tokens: what a head reads that only asks where, not what

    def directions(count: int) -> torch.Tensor:
        """Random orthonormal rows [count, H] that do not read the constant."""
        rows = torch.linalg.qr(torch.randn(last, count)).Q.T
        return torch.nn.functional.pad(rows, (0, 1))

    reads, writes, copies = directions(D), directions(2 * D), directions(2 * D)
    one_back, two_back = writes[:D], writes[D:]
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    for attention in (first, second):
        attention.q_norm.weight.fill_(2.0)
        attention.k_norm.weight.fill_(1.5)
    sharp = torch.arange(5)  # rotary pairs quick enough to tell neighbouring places apart
    turn = config.rope_parameters["rope_theta"] ** (-sharp / half)
    first.k_proj.weight[:D] = 0.0
    first.k_proj.weight[sharp, last] = 5.0
    for head, distance, into in ((0, 1, one_back), (1, 2, two_back)):
        rows = slice(head * D, (head + 1) * D)
        first.q_proj.weight[rows] = 0.0
        first.q_proj.weight[head * D + sharp, last] = 5 * torch.cos(distance * turn)
        first.q_proj.weight[head * D + half + sharp, last] = -5 * torch.sin(distance * turn)
        first.o_proj.weight[:, rows] = 0.4 * into.T
    first.v_proj.weight[:D] = 0.2 * reads
    slow = torch.arange(half - 12, half)  # rotary pairs that hardly turn within a conversation: what, not where
    places = torch.cat([slow, slow + half])
    for group, (query, key) in enumerate(((reads, one_back), (one_back, two_back))):
        head, kv = 2 * group * D, group * D
        second.q_proj.weight[head : head + D] = second.k_proj.weight[kv : kv + D] = 0.0
        second.q_proj.weight[head + places] = 5 * query[:24]
        second.k_proj.weight[kv + places] = 5 * key[:24]
        copied = copies[kv : kv + D]
        second.v_proj.weight[kv : kv + D] = 0.3 * copied
        second.o_proj.weight[:, head : head + D] = 0.4 * copied.T


def grow(small):
    """A model of LAYERS layers that computes what `small` does: the layers put between add nothing at first.

    Most of what the workloads ask is learnt with few layers, at a third of the cost of a step.
    """
    model, kept = build_model(), len(small.model.layers)
    state = {name: t for name, t in small.state_dict().items() if ".layers." not in name}
    places = [round((i + 0.5) * LAYERS / kept - 0.5) for i in range(kept)]
    for layer in set(range(LAYERS)) - set(places):
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[layer].get_submodule(part).weight.data.zero_()
    for place, layer in zip(places, small.model.layers):
        model.model.layers[place].load_state_dict(layer.state_dict())
    model.load_state_dict(state, strict=False)
    return model.to(next(small.parameters()).device).train()


def make_optimizers(model, lr: float, adam_lr: float):
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(hidden, lr=lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model, x, w):
    """Weighted next-token cross-entropy: (sum, sum of weights)."""
    # On CPU plain attention is quicker than the fused kernel's backward at these lengths.
    model.config._attn_implementation = "eager" if x.device.type == "cpu" else "sdpa"
    hidden = model.model(input_ids=x, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    keep = (w[:, 1:] > 0).flatten()
    labels, weights = x[:, 1:].flatten()[keep], w[:, 1:].flatten()[keep]
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[keep]).float(), labels, reduction="none")
    return (losses * weights).sum(), weights.sum()


@torch.no_grad()
def validate(model, batches: Batches, device) -> dict[str, float]:
    model.eval()
    out = {}
    for name, share in (("talk", 0.0), ("code", 1.0)):
        batches.code_share, total, count = share, 0.0, 0.0
        for step in range(4):
            x, w = (t.to(device) for t in batches.at(step, 0, 1))
            with torch.autocast(device.type, torch.bfloat16):
                s, n = loss_of(model, x, (w > 0).float())
            total, count = total + s.item(), count + n.item()
        out[name] = total / count
    model.train()
    return out


@app.command()
def train(
    minutes: float = 90.0,
    tokens: int = 3072,
    lr: float = 0.02,
    adam_lr: float = 3e-3,
    code_share: float = 0.25,
    drill_share: float = 0.15,
    first_layers: int = 6,
    grow_at: float = 0.86,
    decay_from: float = 0.2,
    save_every: int = 50,
    out: Path = WORK / "checkpoint.pt",
    continue_from: Path | None = None,
):
    """Train for `minutes` of training time in all (over every resumption); `continue_from`: an exported target."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    if continue_from is None:
        model = build_model(first_layers)
        start_with_copying(model)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(continue_from, dtype=torch.float32)
    model = model.to(device).train()
    optimizers = make_optimizers(model, lr, adam_lr)
    peaks, step, spent, warm_from = [lr, adam_lr], 0, 0.0, 0
    if out.exists():
        state = torch.load(out, map_location=device, weights_only=True)
        if state["layers"] == LAYERS:
            model = build_model().to(device).train()
            optimizers = make_optimizers(model, lr, adam_lr)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step, spent, warm_from = state["step"], state["spent"], state["warm_from"]
    batches, held_out = (
        Batches(WORK / "train.npz", tokens, code_share, drill_share),
        Batches(WORK / "validation.npz", tokens, 0),
    )
    shown = 0.0
    while spent < minutes * 60:
        began = time.monotonic()
        share = spent / (minutes * 60)
        if share >= grow_at and len(model.model.layers) < LAYERS:
            model = grow(model)
            optimizers, warm_from = make_optimizers(model, lr, adam_lr), step
        batches.drill_share = drill_share if len(model.model.layers) < LAYERS else drill_share / 2
        scale = min(1.0, (step - warm_from + 1) / 60) * min(1.0, (1 - share) / (1 - decay_from))
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * max(scale, 1e-3)
        x, w = (t.to(device) for t in batches.at(step, rank, world))
        with torch.autocast(device.type, torch.bfloat16):
            total, count = loss_of(model, x, w)
        (total / x.numel()).backward()
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.distributed.all_reduce(flat)
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.grad.copy_(g.view_as(p) / world)
        torch.nn.utils.clip_grad_norm_(optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        lasted = torch.tensor(time.monotonic() - began)
        if world > 1:
            torch.distributed.broadcast(lasted, 0)
        spent += min(lasted.item(), 10.0)  # a process that was stopped for a while did not train
        shown = 0.95 * shown + 0.05 * (total / count).item() if shown else (total / count).item()
        if rank == 0 and step % 10 == 0:
            print(
                f"step {step} loss {shown:.3f} ({(total / count).item():.2f}) spent {spent / 60:.1f} min "
                f"lr {scale:.3f} "
                f"{x.numel() * world / lasted.item():.0f} tok/s",
                flush=True,
            )
        if rank == 0 and (step % save_every == 0 or spent >= minutes * 60):
            if step % (4 * save_every) == 0:
                print(f"validation {validate(model, held_out, device)}", flush=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "step": step,
                    "spent": spent,
                    "warm_from": warm_from,
                    "layers": len(model.model.layers),
                },
                f"{out}.tmp",
            )
            os.replace(f"{out}.tmp", out)


# ---------------------------------------------------------------- export


@app.command()
def export(checkpoint: Path = WORK / "checkpoint.pt", out: Path = TARGET, prompts: int = 60, card: bool = True):
    """Write bf16 weights to `out`, answer held-out prompts greedily, and write the rates into the model card."""
    from transformers import AutoTokenizer, GenerationConfig

    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = build_model()
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16).eval()
    model.config._attn_implementation = "sdpa"
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=3, do_sample=False)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    if out != TARGET:
        tokenizer.save_pretrained(out)
    rates = answer_rates(out, prompts)
    for workload, rate in rates.items():
        console.print(f"{workload}: {rate}")
    if card:
        validation = {}
        for name, share in (("conversations", 0.0), ("code", 1.0)):
            held_out, total, count = Batches(WORK / "validation.npz", 4096, share), 0.0, 0.0
            for step in range(6):
                x, w = held_out.at(step, 0, 1)
                with torch.no_grad():
                    loss, n = loss_of(model, x, (w > 0).float())
                total, count = total + loss.item(), count + n.item()
            validation[name] = total / count
        write_card(out, model, state, rates, validation, prompts)


def answer_rates(model: Path, count: int) -> dict[str, dict[str, float]]:
    """Per workload on `count` held-out prompts, greedy: share of right answers, and of answers that end."""
    from inference import LLM, SamplingParams

    llm = LLM(str(model), max_num_seqs=32)
    params = SamplingParams(temperature=0.0, max_tokens=320)
    rates = {}
    for workload in demo.WORKLOADS:
        asked = list(demo.prompts("test", count, seed=5, workloads=[workload]))
        outputs = llm.chat([messages for messages, _ in asked], params, use_tqdm=False)
        right = [demo.check(conversation, o.outputs[0].text) for (_, conversation), o in zip(asked, outputs)]
        ended = [o.outputs[0].finish_reason == "stop" for o in outputs]
        rates[workload] = {"right": sum(right) / count, "ended": sum(ended) / count}
    return rates


def write_card(out: Path, model, state, rates, validation, count: int) -> None:
    """README.md of the target: what it is, how it was made, what it can do."""
    rows = "\n".join(
        f"| {w} | {'right answer' if w in demo.CHECKABLE else 'well-formed answer'} "
        f"| {r['right']:.0%} | {r['ended']:.0%} |"
        for w, r in rates.items()
    )
    parameters = sum(p.numel() for p in model.parameters())
    (out / "README.md").write_text(
        f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [draftsmith, speculative-decoding, demo]
---

# The quickstart's target

A Qwen3-architecture language model of {parameters / 1e6:.1f} M parameters (16 layers of width 256, vocabulary
{VOCAB}, tied embeddings, bfloat16), trained from scratch so that speculative decoding can be tried with nothing to
download. Deep and narrow on purpose: a one-layer head costs a few per cent of one of its steps, as on real targets.

It is a measuring instrument, not an assistant: outside of the six kinds of request below and Python source it knows
nothing.

## Training

`scripts/build_demo_target.py`: {state["step"]} steps of two times 3,072 tokens, {state["spent"] / 60:.0f} minutes
on two CPU cores; Muon for the matrices, AdamW for the rest. The first part is trained with six layers, among which
ten are then put that add nothing at first. Four attention heads start with weights that look up what followed the
current token earlier in the text; everything else starts random. Text: conversations generated by `train/demo` (six
workloads, no copied text), drills in copying random tokens and in sums, and the source files of Python's standard
library, read from the interpreter that ran the training and not contained here.
Held-out cross-entropy per token: {validation["conversations"]:.3f} (answers of conversations),
{validation["code"]:.3f} (standard library).

## Held-out requests

Greedy answers to {count} prompts per workload that no training conversation contains
(`python scripts/build_demo_target.py export`):

| workload | checked | right | ends by itself |
| --- | --- | --- | --- |
{rows}
"""
    )


if __name__ == "__main__":
    app()
