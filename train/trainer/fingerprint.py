"""What a stage's training is known by: a checkpoint continues only a training of the same fingerprint."""

from __future__ import annotations

import hashlib
import json

from train.recipe.recipe import Recipe


def fingerprint(recipe: Recipe, target_hash: str, before: str) -> str:
    """Of everything that shapes a stage's training: its sections, the target, and the stage before."""
    names = {"family", "target", "drafter", "data", "regenerate", "loss", "joint", "training"}
    if recipe.on_policy is not None:  # runs without it are what they were before there was such a section
        names.add("on_policy")
    left_out = {"regenerate": recipe.regenerate.not_in_fingerprint()}
    sections = recipe.model_dump(mode="json", include=names, exclude=left_out)
    del sections["training"]["activation_checkpointing"], sections["target"]["sharding"]  # how, and not what
    if recipe.training.global_batch_size is None:  # likewise
        del sections["training"]["global_batch_size"]
    if recipe.training.eval_texts == type(recipe.training).model_fields["eval_texts"].default:
        del sections["training"]["eval_texts"]  # runs are those of before there was such a key
    parts = [sections, target_hash, before]
    if recipe.features.mode == "cache":
        parts += [recipe.features.engine, *recipe.features.encodings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
