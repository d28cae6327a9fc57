"""Fills the provenance of an acceptance report, with the facts of inference.provenance on machine
and files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from inference.evaluation.engines import MeasuredEngine
from inference.provenance import environment, text_sha256, weights_sha256
from inference.report.schema import Provenance
from speculators.hub import cached_folder


def report_provenance(
    engine: MeasuredEngine,
    *,
    target_name: str | None = None,
    chat_template: str | None = None,
    **fields: Any,
) -> Provenance:
    """The provenance of an engine that has not been closed. `duration_s` is 0 for the caller to
    replace.

    chat_template: used instead of the tokenizer's. fields: further fields of Provenance.
    """
    drafting, target = engine.drafting, engine.target
    template = (
        chat_template
        if chat_template is not None
        else getattr(engine.tokenizer, "chat_template", None)
    )
    if not (template is None or isinstance(template, str)):  # several, by name
        template = json.dumps(template)
    facts = engine.facts()
    config, weights = drafting.speculative_config, None
    if drafting.drafter is not None:
        folder = cached_folder(drafting.drafter)
        config, weights = (
            json.loads((folder / "config.json").read_text(encoding="utf-8")),
            weights_sha256(folder),
        )
    return Provenance(
        **environment(target.device, target.dtype),
        chat_template_sha256=text_sha256(template),
        target_name=target_name or drafting.model,
        target_weights_sha256=weights_sha256(
            cached_folder(drafting.model, drafting.options.get("revision"))
        ),
        drafter_method=drafting.method,
        drafter_path=drafting.drafter,
        drafter_config=config,
        drafter_weights_sha256=weights,
        num_speculative_tokens=drafting.num_speculative_tokens,
        engine=facts.name,
        engines=[facts],
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=0.0,
        **{"recipe_name": None, "recipe_sha256": None, **fields},
    )
