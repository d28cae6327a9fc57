"""One side of scripts/bench_peers.py: a process that runs a training step of an EAGLE-3 head whenever it is told to.

    python -P scripts/peer_worker.py ours|speculators FOLDER

FOLDER has `setting.json` (a `Setting`), `batch.safetensors` (what `make_batch` made) and `weights.safetensors`, the
head's weights, which our side writes. Each line of stdin is a command, each line of stdout a JSON answer:

    warm            a step over the first tokens only
    step            a step: its seconds, its CPU seconds, its loss, and its peak memory if the device is a GPU
    gradients FILE  writes the gradients of the last step

The library `speculators` has the name of a package of this project. So our side alone sees the project's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WARM_TOKENS = 64
Tensors = dict[str, Tensor]


def layer_sizes(s: Any) -> dict[str, Any]:
    """What both sides build the head's decoder layer from, as a LlamaConfig has it."""
    heads = s.hidden // 64 or 1
    return {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": 7 * s.hidden // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": s.hidden // heads,
        "max_position_embeddings": s.tokens + s.depths + 1,
    }


class Ours:
    """This project: the micro-step of its Trainer, which is forward and backward of `unroll` and chunked objective.

    The library sums the mean losses of the depths, of which we take a weighted mean; so its weights decay^k are given
    as they are. Over a reduced vocabulary the library renormalises the target's p, we leave it as it is (`forward_kl`).
    With the weight of a term divided by the mass P of its p the gradients are the same, and the losses differ by the
    mean of log P, which is taken off.
    """

    def __init__(self, s: Any, given: Tensors, folder: Path) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from accelerate import Accelerator
        from transformers import LlamaConfig, LlamaForCausalLM

        from scripts.measuring import make_trainer
        from train.data.loss_mask import TokenRow
        from train.recipe.recipe import make_recipe

        self.s, self.given, self.version = s, given, "this project"
        half = s.dtype == "bfloat16"
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **layer_sizes(s)))
        model = model.to(s.device, torch.bfloat16 if half else torch.float32)
        model.get_input_embeddings().weight.data.copy_(given["embed"])
        model.get_output_embeddings().weight.data.copy_(given["lm_head"])
        recipe = make_recipe({
            "name": "bench",
            "target": {"model": "random"},
            "data": {"train": [{"path": "none.jsonl"}], "max_length": s.tokens},
            "drafter": {"unroll_steps": s.depths, "draft_vocab_size": s.draft_vocab, "tap_layers": [1, 2, 3],
                        "step_decay": s.decay},
            "training": {"steps": 1, "batch_size": 1},
        })  # fmt: skip
        accelerator = Accelerator(cpu=s.device == "cpu", mixed_precision="bf16" if half else "no")
        ids = given["input_ids"].cpu().numpy()
        row = TokenRow(ids, given["loss_mask"].cpu().numpy())
        self.trainer = make_trainer(recipe, model, [row], accelerator, folder)
        self.module = self.trainer.module
        self.module.train()
        self._set_weights(folder / "weights.safetensors")
        self.module.lm_head.weight.requires_grad_(s.head)
        self.whole = self.prepare(s.tokens)

    def _set_weights(self, file: Path) -> None:
        """Random weights, which are written where the other side finds them."""
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.copy_(torch.randn(weight.shape) * (weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1))
                if weight.ndim == 1:
                    weight.add_(1.0)
            if self.module.draft_to_target is not None:
                self.module.target_ids.copy_(self.given["draft_ids"])
        save_file({name: weight.detach().cpu().clone() for name, weight in self.module.named_parameters()}, file)

    def features(self, tokens: int) -> Any:
        """The TargetFeatures of the first tokens of the row."""
        from speculators.target.frozen_target import TargetFeatures

        given, dtype = self.given, getattr(torch, self.s.dtype)
        return TargetFeatures(
            **{name: given[name][None, :tokens] for name in ("input_ids", "position_ids", "segment_ids", "loss_mask")},
            taps=given["taps"][None, :tokens].to(dtype),
            last_hidden=normed(given, tokens)[None].to(dtype),
        )

    @torch.no_grad()
    def prepare(self, tokens: int) -> Callable[[], float]:
        """The step over the first tokens of the row."""
        from speculators.drafter import term_paths

        s, features = self.s, self.features(tokens)
        found = [term_paths(features, depth) for depth in range(s.depths)]
        decay = torch.tensor([s.decay**k for k in range(s.depths)], device=s.device)
        scales = decay / torch.stack([valid.sum() for valid, _ in found]).clamp(min=1)
        ids, offset = self.module.draft_to_target, 0.0
        unroll, mass = type(self.module).unroll, torch.ones(tokens, device=s.device)
        if ids is not None:
            rows = features.last_hidden[0].split(128)
            mass = torch.cat([self.trainer.target.logits(r).float().softmax(-1)[:, ids].sum(-1) for r in rows])
            logs = [mass.log()[path[valid]].sum() for valid, path in found]
            offset = float((torch.stack(logs) * scales).sum())

        def weighed(*given: Any) -> Any:
            for term in unroll(self.module, *given):
                yield replace(term, weight=term.weight / mass[term.target_index])

        def step() -> float:
            if ids is not None:
                self.module.unroll = weighed
            return float(self.trainer._micro_step(features, scales).loss) - offset

        return step


class Library:
    """The library: what its Trainer does in a step, over a row that its own collate function made.

    It asks the mask about the token that a depth reads, we about the one that it predicts: each document's mask is
    shifted by one. It lets the last slots of a document predict tokens of the next, so the documents of a `Setting`
    begin with tokens that nobody learns.
    """

    def __init__(self, s: Any, given: Tensors, folder: Path) -> None:
        from transformers import LlamaConfig

        core, losses = import_module("speculators.models.eagle3.core"), import_module("speculators.losses")
        config = LlamaConfig(num_hidden_layers=1, **layer_sizes(s))
        config._attn_implementation = s.attention
        made = core.Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=s.draft_vocab,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        )
        self.s, self.given, self.version = s, given, f"speculators {metadata.version('speculators')}"
        self.module = core.Eagle3DraftModel(made)
        weights = load_file(folder / "weights.safetensors") | {
            "embed_tokens.weight": given["embed"],
            "verifier_lm_head.weight": given["lm_head"][given["draft_ids"]],
            "verifier_norm.weight": given["norm"],
        }
        missing, unknown = self.module.load_state_dict(weights, strict=False)
        if unknown or set(missing) - {"t2d", "d2t"}:
            raise ValueError(f"the heads have different weights: {missing} are missing, {unknown} are unknown")
        self.module.to(s.device).train()
        self.module.lm_head.weight.requires_grad_(s.head)
        fused = "fused" if s.device == "cuda" else "eager"
        self.options = {
            "ttt_steps": s.depths,
            "ttt_step_loss_decay": s.decay,
            "loss_config": losses.resolve_loss_config("kl_div", fused),
        }
        self.whole = self.prepare(s.tokens)

    def prepare(self, tokens: int) -> Callable[[], float]:
        """The step over the first tokens of the row."""
        data, shift = import_module("speculators.train.data"), import_module("speculators.models.eagle3.data")
        given, device, dtype = self.given, self.s.device, getattr(torch, self.s.dtype)
        samples = []
        for document in given["segment_ids"][:tokens].unique():
            at = (given["segment_ids"][:tokens] == document).nonzero().flatten()
            mask = given["loss_mask"][at]
            sample = {
                "input_ids": given["input_ids"][at],
                "hidden_states": given["taps"][at],
                "verifier_last_hidden_states": given["state"][at],
                "loss_mask": torch.cat([mask[1:], mask[:1] & False]),
                "lengths": torch.tensor([len(at)]),
                "position_ids": torch.arange(len(at)),
            }
            samples.append({name: each.cpu() for name, each in sample.items()})
        collate = data.CollateFn(tokens, self.s.hidden, dtype=dtype, preprocess=shift.shift_batch)
        batch = {name: each.to(device) for name, each in collate(samples).items() if isinstance(each, Tensor)}

        def step() -> float:
            with torch.autocast(device, torch.bfloat16, enabled=self.s.dtype == "bfloat16"):
                _, loss, _ = self.module(**batch, **self.options)
            loss.backward()
            return float(loss.detach())

        return step


def normed(given: Tensors, tokens: int) -> Tensor:
    """The target's last hidden states [T, H]: the library gets them before the target's final norm."""
    return nn.functional.rms_norm(given["state"][:tokens].float(), given["norm"].shape, given["norm"].float(), 1e-6)


SIDES: dict[str, Callable[[Any, Tensors, Path], Ours | Library]] = {"ours": Ours, "speculators": Library}


def answer(side: Ours | Library, command: str, file: str = "") -> dict[str, Any]:
    """Does what a line of stdin says."""
    device = side.s.device
    if command == "gradients":
        found = {name: p.grad for name, p in side.module.named_parameters() if p.grad is not None}
        save_file({name: grad.float().cpu().contiguous() for name, grad in found.items()}, file.strip())
        return {}
    step = side.prepare(WARM_TOKENS) if command == "warm" else side.whole
    side.module.zero_grad(set_to_none=True)
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start, cpu = time.perf_counter(), time.process_time()
    loss = step()  # whose value waits for the device's forward
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "loss": loss,
        "peak": torch.cuda.max_memory_allocated() - before if device == "cuda" else None,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    folder = Path(sys.argv[2])
    s = SimpleNamespace(**json.loads((folder / "setting.json").read_text()))
    torch.set_num_threads(s.threads)
    given = {name: each.to(s.device) for name, each in load_file(folder / "batch.safetensors").items()}
    side = SIDES[sys.argv[1]](s, given, folder)
    print(json.dumps({"version": side.version, "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, *line.split(maxsplit=1))), file=answers, flush=True)


if __name__ == "__main__":
    main()
