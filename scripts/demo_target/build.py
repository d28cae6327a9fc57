"""Writes the quickstart's conversations, and trains its embedded target from scratch.

    python scripts/demo_target/build.py conversations        # recipes/quickstart/data, as it is
    committed python scripts/demo_target/build.py data                 # tokenizer and token files,
    once torchrun --nproc-per-node 2 scripts/demo_target/build.py train --minutes 76 python
    scripts/demo_target/build.py export               # bf16 weights, held-out rates, model card

`train` saves every few minutes and resumes when it is run again; the learning rate follows the
spent share of `--minutes`, so that a run can be lengthened or shortened half-way. It runs on CPU
processes (gloo) and on GPUs. The training text is the conversations of corpus.py and the
interpreter's own standard library (train.data.stdlib_source)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from string import Template

import torch
import typer
from transformers import AutoTokenizer, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from inference import LLM, SamplingParams
from scripts.demo_target.answers import is_right
from scripts.demo_target.corpus import CHECKABLE, WORKLOADS, write_files
from scripts.demo_target.corpus import prompts as held_out_prompts
from scripts.demo_target.data import TARGET, WORK, Batches, write_token_files
from scripts.demo_target.model import LAYERS, VOCAB, build_model, grow, start_with_copying

FIRST_LAYERS, GROW_AT = (
    6,
    0.86,
)  # layers of the first part of a training, and the share of it after which the rest come
RATES = (0.02, 3e-3)  # peak learning rates of Muon and AdamW
WARM_UP, DECAY_FROM = (
    60,
    0.2,
)  # steps, and the share of a training after which the rates fall to zero
SAVE_EVERY = 50  # steps
PROMPT_SEED = 23  # not 5: those prompts were looked at during development

app = typer.Typer(
    add_completion=False, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command()
def conversations(out: Path = TARGET.parent / "data"):
    """Write the conversations that the quickstart's recipes read, as compressed JSONL."""
    write_files(out)


@app.command()
def data(snippets: int = 16_000, seed: int = 0):
    """Make the tokenizer (unless the target folder has one) and the token files below
    runs/demo-target."""
    write_token_files(snippets, seed, print)


def make_optimizers(model):
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    hidden, rest = (
        [p for n, p in model.named_parameters() if (n in matrices) == is_matrix]
        for is_matrix in (True, False)
    )
    return [
        torch.optim.Muon(hidden, lr=RATES[0], momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=RATES[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model, x, w):
    """Weighted next-token cross-entropy: (sum, sum of weights)."""
    # On a CPU plain attention is faster than the fused kernel's backward at these lengths.
    model.config._attn_implementation = "eager" if x.device.type == "cpu" else "sdpa"
    hidden = model.model(input_ids=x, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    keep = (w[:, 1:] > 0).flatten()
    labels, weights = x[:, 1:].flatten()[keep], w[:, 1:].flatten()[keep]
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[keep]).float(), labels, reduction="none"
    )
    return (losses * weights).sum(), weights.sum()


@app.command()
def train(
    minutes: float = 90.0,
    tokens: int = 3072,
    code_share: float = 0.25,
    drill_share: float = 0.15,
    table_share: float = 0.0,
    out: Path = WORK / "checkpoint.pt",
):
    """Train for `minutes` of training time in all, over every resumption."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    saved = torch.load(out, map_location=device, weights_only=True) if out.exists() else None
    model = build_model(saved["layers"] if saved else FIRST_LAYERS)
    start_with_copying(model)
    model = model.to(device).train()
    optimizers, step, spent, warm_from = make_optimizers(model), 0, 0.0, 0
    if saved:
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        step, spent, warm_from = saved["step"], saved["spent"], saved["warm_from"]
    batches, shown = Batches(WORK / "train.npz", tokens, code_share, drill_share, table_share), None
    while spent < minutes * 60:
        began, share = time.monotonic(), spent / (minutes * 60)
        if share >= GROW_AT and len(model.model.layers) < LAYERS:
            model = grow(model)
            optimizers, warm_from = make_optimizers(model), step
        batches.drill_share = drill_share if len(model.model.layers) < LAYERS else drill_share / 2
        scale = min(1.0, (step - warm_from + 1) / WARM_UP) * min(
            1.0, (1 - share) / (1 - DECAY_FROM)
        )
        for optimizer, peak in zip(optimizers, RATES):
            optimizer.param_groups[0]["lr"] = peak * max(scale, 1e-3)
        x, w = (t.to(device) for t in batches.at(step, rank, world))
        with torch.autocast(device.type, torch.bfloat16):
            total, count = loss_of(model, x, w)
        (total / x.numel()).backward()
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.distributed.all_reduce(flat)
            for p, g in zip(
                model.parameters(), flat.split([p.numel() for p in model.parameters()])
            ):
                p.grad.copy_(g.view_as(p) / world)
        torch.nn.utils.clip_grad_norm_(optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        lasted = torch.tensor(time.monotonic() - began)
        if world > 1:
            torch.distributed.broadcast(lasted, 0)
        spent += min(lasted.item(), 10.0)  # a process that was suspended did not train
        loss = (total / count).item()
        shown = loss if shown is None else 0.95 * shown + 0.05 * loss
        if rank == 0 and step % 10 == 0:
            rate = x.numel() * world / lasted.item()
            print(
                f"step {step} loss {shown:.3f} spent {spent / 60:.1f} min lr {scale:.3f} {rate:.0f}"
                " tok/s",
                flush=True,
            )
        if rank == 0 and (step % SAVE_EVERY == 0 or spent >= minutes * 60):
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
            }
            state |= {"spent": spent, "warm_from": warm_from, "layers": len(model.model.layers)}
            torch.save(state, f"{out}.tmp")
            os.replace(f"{out}.tmp", out)


@torch.no_grad()
def held_out_loss(model, code_share: float) -> float:
    """Cross-entropy per token on held-out conversations (code_share 0) or on code (1)."""
    batches = Batches(WORK / "validation.npz", 4096, code_share)
    sums = [
        loss_of(model, x, (w > 0).float()) for x, w in (batches.at(step, 0, 1) for step in range(6))
    ]
    return (sum(total for total, _ in sums) / sum(count for _, count in sums)).item()


def answer_rates(model: Path, count: int) -> dict[str, dict[str, float]]:
    """Shares of right answers and of answers that end, per workload, of greedy answers to `count`
    held-out prompts."""
    llm, rates = LLM(str(model), max_num_seqs=32), {}
    for workload in WORKLOADS:
        chats = list(held_out_prompts("test", count, seed=PROMPT_SEED, workloads=[workload]))
        params = SamplingParams(temperature=0.0, max_tokens=320)
        answers = [
            o.outputs[0]
            for o in llm.chat([messages for messages, _ in chats], params, use_tqdm=False)
        ]
        right = [
            is_right(workload, made.expected, answer.text)
            for (_, made), answer in zip(chats, answers)
        ]
        ended = sum(answer.finish_reason == "stop" for answer in answers)
        rates[workload] = {"right": sum(right) / count, "ended": ended / count}
    return rates


@app.command()
def export(
    checkpoint: Path = WORK / "checkpoint.pt",
    out: Path = TARGET,
    prompts: int = 60,
    card: bool = True,
):
    """Write bf16 weights to `out`, answer held-out prompts greedily, and write the rates into the
    model card."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = build_model()
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16).eval()
    model.config._attn_implementation = "sdpa"
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=3, do_sample=False)
    model.save_pretrained(out)
    if out != TARGET:
        AutoTokenizer.from_pretrained(TARGET).save_pretrained(out)
    rates = answer_rates(out, prompts)
    rows = [
        f"| {w} | {'right answer' if w in CHECKABLE else 'well-formed answer'} | {r['right']:.0%} |"
        f" {r['ended']:.0%} |"
        for w, r in rates.items()
    ]
    print("\n".join(rows))
    if card:
        text = Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8")).substitute(
            parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}",
            vocabulary=VOCAB,
            steps=state["step"],
            minutes=f"{state['spent'] / 60:.0f}",
            prompts=prompts,
            seed=PROMPT_SEED,
            conversations=f"{held_out_loss(model, 0.0):.3f}",
            code=f"{held_out_loss(model, 1.0):.3f}",
            rows="\n".join(rows),
        )
        (out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app()
