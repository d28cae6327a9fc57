"""A run's folder -> an exported drafter, without loading the target: only its config.json is read.

For runs that were stopped, or to export in another precision. Must not know how a run got where it is.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from inference.entrypoints.loading import load_tokenizer
from speculators.errors import CheckpointError, ConfigError
from speculators.export import describe_target, export_drafter
from speculators.precision import as_dtype
from speculators.registry import family_class
from train.data.packing import conversation_tokenizer
from train.pipeline.run import checkpoints
from train.recipe.drafter_config import drafter_config
from train.recipe.load import load_recipe
from train.recipe.run_folder import RECIPE
from train.regeneration.record import summary
from train.trainer import checkpoint

DTYPES = ("auto", "float32", "bfloat16", "float16")


def reexport(run_dir: Path, out: Path, *, dtype: str = "auto", format: str = "vllm") -> tuple[Path, int]:
    """Writes the run's best weights (the newest without held-out evaluation) to `out`; returns it and their step."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if not (run_dir / RECIPE).is_file():
        raise CheckpointError(f"{run_dir}: holds no {RECIPE}, so it is not a run's folder; give runs/<name>")
    recipe = load_recipe(run_dir / RECIPE, [f"output_dir={run_dir}"])  # the folder may have been moved
    root = checkpoints(recipe)
    newest = checkpoint.latest(root)
    if newest is None:
        raise CheckpointError(f"{root}: no complete checkpoint; run the recipe first")
    target = recipe.target.sketch()
    config = drafter_config(recipe, target)
    drafter = family_class(config.family)(config)
    state = json.loads((newest / "state.json").read_text())
    if (root / "best").is_dir():
        step = int(state["best_step"])
        checkpoint.load_best(root, drafter)
    else:
        step = int(state["step"])
        drafter.load_state_dict(load_file(newest / "drafter.safetensors"), strict=True)
    wanted = dtype if dtype != "auto" else recipe.export.dtype
    exported = target.checkpoint_dtype if wanted == "auto" else as_dtype(wanted)
    t = recipe.target
    tokenizer = load_tokenizer(t.model, None, revision=t.revision, trust_remote_code=t.trust_remote_code)
    facts = conversation_tokenizer(recipe.data, tokenizer).template_facts() | summary(run_dir)
    provenance = recipe.provenance(step) | facts | {"target": describe_target(target)}
    return export_drafter(drafter, out, dtype=exported, provenance=provenance, format=format), step
