"""Fills the provenance of an acceptance report, with the facts of inference.provenance on machine and files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from inference.evaluation.engines import Drafting, MeasuredEngine
from inference.provenance import environment, text_sha256, weights_sha256
from inference.report.schema import Provenance
from speculators.hub import cached_folder


def report_provenance(
    engine: MeasuredEngine,
    *,
    target_name: str | None = None,
    drafter_path: str | None = None,
    chat_template: str | None = None,
    **fields: Any,
) -> Provenance:
    """The provenance of an engine that has not been closed. `duration_s` is 0 for the caller to replace.

    chat_template: used instead of the tokenizer's. fields: further fields of Provenance.
    """
    drafting, target = engine.drafting, engine.target
    template = chat_template if chat_template is not None else getattr(engine.tokenizer, "chat_template", None)
    if not (template is None or isinstance(template, str)):  # several, by name
        template = json.dumps(template)
    facts = engine.facts()
    folder = None if drafting.drafter is None else cached_folder(drafting.drafter)
    return Provenance(
        **environment(target.device, target.dtype),
        chat_template_sha256=text_sha256(template),
        target_name=target_name or drafting.model,
        target_weights_sha256=weights_sha256(cached_folder(drafting.model, drafting.options.get("revision"))),
        drafter_method=drafting.method,
        drafter_path=drafter_path or drafting.drafter,
        drafter_config=drafter_config(drafting),
        drafter_weights_sha256=None if folder is None else weights_sha256(folder),
        num_speculative_tokens=drafting.num_speculative_tokens,
        engine=facts.name,
        engines=[facts],
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=0.0,
        **{"recipe_name": None, "recipe_sha256": None, **fields},
    )


def drafter_config(drafting: Drafting) -> dict[str, Any]:
    """The config.json of an export, or the options of a method without one."""
    if drafting.drafter is None:
        return drafting.speculative_config
    return json.loads((cached_folder(drafting.drafter) / "config.json").read_text(encoding="utf-8"))
