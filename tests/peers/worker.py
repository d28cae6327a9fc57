"""One side of scripts/bench_peers.py: a process that runs a training step of a head whenever it is
told to.

    python -P tests/peers/worker.py ours|speculators FOLDER

FOLDER has `setting.json` (a `Setting`), `batch.safetensors` (what `make_batch` made) and
`weights.safetensors`, the head's weights, which our side writes, as it does the anchors that it
draws for a row of DFlash (`anchors-<tokens>.safetensors`). Each line of stdin is a command, each
line of stdout a JSON answer:

    warm            a step over the first tokens only
    step            a step: its seconds, its CPU seconds, its loss, and its peak memory if the
                    device is a GPU
    gradients FILE  writes the gradients of the last step
"""

from __future__ import annotations

import json
import math
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

WARM_TOKENS = 128
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
    """This project: the micro-step of its Trainer, which is forward and backward of `unroll` and
    chunked objective.

    We take a weighted mean of the mean losses of the depths; the library sums them (EAGLE-3), or
    divides the weighted sum of all terms by their number (DFlash). So its weights decay^k are given
    as they are, over its normaliser. Over a reduced vocabulary the library renormalises the
    target's p, we leave it as it is (`forward_kl`). With the weight of a term divided by the mass P
    of its p the gradients are the same, and the losses differ by the mean of log P, which is taken
    off."""

    def __init__(self, s: Any, batch: Tensors, folder: Path) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from accelerate import Accelerator
        from transformers import LlamaConfig, LlamaForCausalLM

        from draftsmith.train.data.loss_mask import TokenRow
        from draftsmith.train.recipe.recipe import make_recipe
        from scripts.measuring import make_trainer

        self.s, self.row, self.folder, self.version = s, batch, folder, "this project"
        half = s.dtype == "bfloat16"
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **layer_sizes(s)))
        model = model.to(s.device, torch.bfloat16 if half else torch.float32)
        model.get_input_embeddings().weight.data.copy_(batch["embed"])
        model.get_output_embeddings().weight.data.copy_(batch["lm_head"])
        head = {"unroll_steps": s.depths, "num_layers": s.layers, "tap_layers": [1, 2, 3]}
        head["draft_vocab_size"] = s.draft_vocab
        if s.family == "dflash":
            head |= {"block_size": s.depths + 1, "mask_token_id": 0, "anchors_per_row": s.anchors}
        recipe = make_recipe(
            {
                "name": "bench",
                "family": s.family,
                "target": {"model": "random"},
                "data": {"train": [{"path": "none.jsonl"}], "max_length": s.tokens},
                "drafter": head,
                "loss": {"forward_kl": 1.0},
                "training": {"steps": 1, "batch_size": 1},
            }
        )
        accelerator = Accelerator(cpu=s.device == "cpu", mixed_precision="bf16" if half else "no")
        ids = batch["input_ids"].cpu().numpy()
        row = TokenRow(ids, batch["loss_mask"].cpu().numpy())
        self.trainer = make_trainer(recipe, model, [row], accelerator, folder)
        self.module = self.trainer.module
        self.module.train()
        self._set_weights(folder / "weights.safetensors")
        if hasattr(self.module, "lm_head"):  # not where it is the target's
            self.module.lm_head.weight.requires_grad_(s.head)
        self.whole = self.prepare(s.tokens)

    def _set_weights(self, file: Path) -> None:
        """Random weights, which are written where the other side finds them."""
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.module.parameters():
                matrix = weight.ndim > 1
                size = weight.shape[-1] ** -0.5 if matrix else 0.1
                weight.copy_(torch.randn(weight.shape) * size + (not matrix))
            if self.module.draft_to_target is not None:
                self.module.target_ids.copy_(self.row["draft_ids"])
        weights = dict(self.module.named_parameters())
        save_file({name: weight.detach().cpu().clone() for name, weight in weights.items()}, file)

    def features(self, tokens: int) -> Any:
        """The TargetFeatures of the first tokens of the row."""
        from draftsmith.speculators.target.frozen_target import TargetFeatures

        batch, dtype = self.row, getattr(torch, self.s.dtype)
        names = ("input_ids", "position_ids", "segment_ids", "loss_mask")
        return TargetFeatures(
            **{name: batch[name][None, :tokens] for name in names},
            taps=batch["taps"][None, :tokens].to(dtype),
            last_hidden=normed(batch, tokens)[None].to(dtype),
        )

    @torch.no_grad()
    def prepare(self, tokens: int) -> Callable[[], float]:
        """The step over the first tokens of the row."""
        from draftsmith.speculators.drafter import host_batch

        s, features = self.s, self.features(tokens)
        scales = torch.tensor([s.decay**k for k in range(s.depths)], device=s.device)
        counts = self.module.count_terms(host_batch(features), s.depths).to(s.device)
        if s.family == "dflash":
            scales = scales / (counts.sum() + 1e-5)
            blocks = self.module.blocks_of(features, s.depths)
            anchors = 1 + blocks.slots[blocks.terms[0]]
            save_file({"anchors": anchors.cpu()}, self.folder / f"anchors-{tokens}.safetensors")
        else:
            scales = scales / counts.clamp(min=1)
        ids, offset = self.module.draft_to_target, torch.zeros((), device=s.device)
        if ids is None:
            return lambda: float(self.trainer._micro_step(features, scales)[-1])
        unroll, rows = type(self.module).unroll, features.last_hidden[0].split(128)
        mass = torch.cat(
            [self.trainer.target.logits(r).float().softmax(-1)[:, ids].sum(-1) for r in rows]
        )

        def weighed(*arguments: Any) -> Any:
            for term in unroll(self.module, *arguments):
                share = mass[term.target_index]
                offset.add_(scales[term.depth] * share.log().sum())
                yield replace(term, weight=term.weight / share)

        def step() -> float:
            self.module.unroll = weighed
            offset.zero_()
            loss = self.trainer._micro_step(features, scales)[-1]
            return float(loss - offset)

        return step


class Library:
    """The library: what its Trainer does in a step, over a row that its own collate function made.

    EAGLE-3 asks the mask about the token that a depth reads, we about the one that it predicts:
    each document's mask is shifted by one. DFlash draws its anchors from all supervised tokens, we
    from those whose next token is supervised too: it gets ours. Both let the last slots of a
    document predict tokens of the next, so the documents of a `Setting` begin with tokens that
    nobody learns."""

    def __init__(self, s: Any, batch: Tensors, folder: Path) -> None:
        import transformers

        self.s, self.row, self.folder = s, batch, folder
        self.version = f"speculators {metadata.version('speculators')}"
        self.core = import_module(f"speculators.models.{s.family}.core")
        losses = import_module("speculators.losses")
        fused = "fused" if s.device == "cuda" else "eager"
        self.options: dict[str, Any] = {"loss_config": losses.resolve_loss_config("kl_div", fused)}
        if s.family == "dflash":
            name, layers = "DFlash", transformers.Qwen3Config
            fields = {"block_size": s.depths + 1, "mask_token_id": 0}
            fields["aux_hidden_state_layer_ids"] = [1, 2, 3]
            self.options |= {"gamma": -1 / math.log(s.decay)}
        else:
            name, layers = "Eagle3", transformers.LlamaConfig
            fields = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
            self.options |= {"ttt_steps": s.depths, "ttt_step_loss_decay": s.decay}
        config = layers(num_hidden_layers=s.layers, **layer_sizes(s))
        config._attn_implementation = s.attention
        make_config = getattr(self.core, f"{name}SpeculatorConfig")
        fields |= {"transformer_layer_config": config, "draft_vocab_size": s.draft_vocab}
        self.module = getattr(self.core, f"{name}DraftModel")(make_config(**fields))
        head = batch["lm_head"][batch["draft_ids"]]
        weights = {"lm_head.weight": head} | load_file(folder / "weights.safetensors")
        weights |= {"embed_tokens.weight": batch["embed"], "verifier_norm.weight": batch["norm"]}
        weights["verifier_lm_head.weight"] = head
        missing, unknown = self.module.load_state_dict(weights, strict=False)
        if unknown or set(missing) - {"t2d", "d2t"}:
            raise ValueError(f"the heads' weights differ: {missing} missing, {unknown} unknown")
        self.module.to(s.device).train()
        self.module.lm_head.weight.requires_grad_(s.head)
        self.whole = self.prepare(s.tokens)

    def prepare(self, tokens: int) -> Callable[[], float]:
        """The step over the first tokens of the row."""
        s, row, options = self.s, self.row, self.options
        data, eagle3 = import_module("speculators.train.data"), s.family == "eagle3"
        preprocess = import_module("speculators.models.eagle3.data").shift_batch if eagle3 else None
        samples = []
        for document in row["segment_ids"][:tokens].unique():
            at = (row["segment_ids"][:tokens] == document).nonzero().flatten()
            mask = row["loss_mask"][at]
            sample = {
                "input_ids": row["input_ids"][at],
                "hidden_states": row["taps"][at],
                "verifier_last_hidden_states": row["state"][at],
                "loss_mask": torch.cat([mask[1:], mask[:1] & False]) if eagle3 else mask,
                "lengths": torch.tensor([len(at)]),
                "position_ids": torch.arange(len(at)),
            }
            samples.append({name: tensor.cpu() for name, tensor in sample.items()})
        collation = {"dtype": getattr(torch, s.dtype), "preprocess": preprocess}
        collated = data.CollateFn(tokens, s.hidden, **collation)(samples)
        batch = {name: x.to(s.device) for name, x in collated.items() if isinstance(x, Tensor)}
        if not eagle3:
            drawn = load_file(self.folder / f"anchors-{tokens}.safetensors")["anchors"]
            # in front of a row's last tokens it takes none
            anchors = drawn[drawn < tokens - s.depths - 1].to(s.device)
            options = options | {"max_anchors": len(anchors)}

        def step() -> float:
            if not eagle3:
                kept = torch.ones_like(anchors, dtype=torch.bool)
                self.core.select_anchors = lambda *_: (anchors, kept)
            with torch.autocast(s.device, torch.bfloat16, enabled=s.dtype == "bfloat16"):
                _, loss, _ = self.module(**batch, **options)
            loss.backward()
            return float(loss.detach())

        return step


def normed(batch: Tensors, tokens: int) -> Tensor:
    """The target's last hidden states [T, H]: the library gets them before the target's final
    norm."""
    return nn.functional.rms_norm(
        batch["state"][:tokens].float(), batch["norm"].shape, batch["norm"].float(), 1e-6
    )


SIDES: dict[str, Callable[[Any, Tensors, Path], Ours | Library]] = {
    "ours": Ours,
    "speculators": Library,
}


def answer(side: Ours | Library, command: str, file: str = "") -> dict[str, Any]:
    """Does what a line of stdin says."""
    device = side.s.device
    if command == "gradients":
        gradients = {name: p.grad for name, p in side.module.named_parameters()}
        learnt = {
            name: g.float().cpu().contiguous() for name, g in gradients.items() if g is not None
        }
        save_file(learnt, file.strip())
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
    batch = load_file(folder / "batch.safetensors")
    batch = {name: tensor.to(s.device) for name, tensor in batch.items()}
    side = SIDES[sys.argv[1]](s, batch, folder)
    begun = {"version": side.version, "torch": torch.__version__}
    print(json.dumps(begun), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, *line.split(maxsplit=1))), file=answers, flush=True)


if __name__ == "__main__":
    main()
