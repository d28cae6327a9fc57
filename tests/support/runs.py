"""A run that is done, as far as evaluation and upload need it: target, export, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.tokenizers import chat_bytes


def tiny_run(make_model: Any, target: Path, run: Path) -> dict[str, Any]:
    """Saves a target and exports a random head to `run`/export; a recipe over them and over four
    prompts of each of two workloads, which lie beside `run`."""
    sizes = dict(vocab_size=258, eos_token_id=256, pad_token_id=257, initializer_range=0.1)
    model = make_model("llama", **sizes)
    model.save_pretrained(target)
    chat_bytes().save_pretrained(target)
    frozen = FrozenTarget(model, [1, 2, 3])
    torch.manual_seed(1)
    drafter = Eagle3(config_for_target(frozen, "eagle3", tap_layers=[1, 2, 3])).attach(frozen)
    drafter.initialise_from(frozen)
    provenance = {"recipe": "tiny", "step": 3, "target": {"name_or_path": str(target)}}
    export_drafter(drafter, run / "export", dtype=torch.float32, provenance=provenance)
    rows = []
    for i in range(4):
        for name in ("sums", "talk"):
            turns = (("user", f"{name} {i}"), ("assistant", "x"))
            messages = [{"role": role, "content": text} for role, text in turns]
            rows.append({"workload": name, "messages": messages})
    prompts = run.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "tiny",
        "output_dir": str(run),
        "target": {"model": str(target)},
        "data": {"train": [{"path": str(prompts)}]},
        "evaluation": {
            "prompts": [{"path": str(prompts)}],
            "num_speculative_tokens": 2,
            "max_tokens": 6,
            "repeats": 1,
            "prompts_per_workload": 2,
        },
    }
