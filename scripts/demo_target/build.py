"""Write the quickstart's conversations, and train its embedded target from scratch.

    python scripts/demo_target/build.py conversations        # recipes/quickstart/data, as it is committed
    python scripts/demo_target/build.py data                 # tokenizer and token files, once
    torchrun --nproc-per-node 2 scripts/demo_target/build.py train --minutes 76
    python scripts/demo_target/build.py export               # bf16 weights, held-out rates, model card

`train` saves every few minutes and continues where it was when run again; the learning rate follows the share of
`--minutes` that is spent, so a run can be lengthened or shortened half-way. Works on CPU processes (gloo) and GPUs.
It learns the conversations of corpus.py and the interpreter's own standard library (train.data.stdlib_source), nothing
else.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.demo_target.card import answer_rates, write_card
from scripts.demo_target.corpus import write_files
from scripts.demo_target.data import TARGET, WORK, Batches, write_token_files
from scripts.demo_target.model import LAYERS, build_model, grow, start_with_copying

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()


@app.command()
def conversations(out: Path = TARGET.parent / "data"):
    """Write the conversations that the quickstart's recipes read, as compressed JSONL."""
    write_files(out)


@app.command()
def data(snippets: int = 16_000, seed: int = 0):
    """Make the tokenizer (unless the target folder has one) and the token files below runs/demo-target."""
    write_token_files(snippets, seed, console.print)


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
    table_share: float = 0.0,
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
        Batches(WORK / "train.npz", tokens, code_share, drill_share, table_share),
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


if __name__ == "__main__":
    app()
