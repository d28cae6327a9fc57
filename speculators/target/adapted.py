"""Folders of peft adapters in a target's place: a joint training exports one on demand."""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.hub import split_revision, with_revision

CONFIG = "adapter_config.json"


def adapted_model(name: str) -> str | None:
    """The model that the folder of an adapter was trained on, with `@revision` if the adapter is of
    one; None for any other name. CheckpointError if the adapter names none."""
    adapter = Path(name) / CONFIG
    # peft writes it without the model's own
    if not adapter.is_file() or adapter.with_name("config.json").exists():
        return None
    fields = json.loads(adapter.read_text(encoding="utf-8"))
    base = fields.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"{adapter.name} names no base_model_name_or_path; merge it first",
            where=f"target {name}",
        )
    return with_revision(base, fields.get("revision"))


def config_source(path_or_id: str, revision: str | None = None) -> tuple[str, str | None]:
    """The folder or id, and the revision, that a target's configuration is read from: of an
    adapter's folder those of the model that it adapts."""
    name, revision = split_revision(path_or_id, revision)
    base = adapted_model(name)
    return (name, revision) if base is None else split_revision(base)
