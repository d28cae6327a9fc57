"""The provenance of an acceptance report: what `inference.provenance` says of machine and files, in its fields.

It must not know how anything was measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from inference.provenance import environment, text_sha256, weights_sha256
from inference.report import Provenance
from speculators.hub import cached_folder
from speculators.target import FrozenTarget


def report_provenance(
    target: FrozenTarget,
    model: str,
    tokenizer: Any,
    drafter: str,
    *,
    began: float,
    method: str,
    num_speculative_tokens: int,
    max_num_seqs: int,
    seeds: Sequence[int],
    revision: str | None = None,
    recipe_name: str | None = None,
    recipe_sha256: str | None = None,
    target_name: str | None = None,
    drafter_path: str | None = None,
    chat_template: str | None = None,
    target_change: dict[str, float] | None = None,
) -> Provenance:
    """`began`: time.monotonic() when the evaluation began. `revision`: the target's. `chat_template`: used instead of
    the tokenizer's."""
    template = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
    if not (template is None or isinstance(template, str)):  # several, by name
        template = json.dumps(template)
    folder = cached_folder(drafter)
    return Provenance(
        **environment(target.device, target.dtype),
        recipe_name=recipe_name,
        recipe_sha256=recipe_sha256,
        chat_template_sha256=text_sha256(template),
        target_name=target_name or model,
        target_change=target_change,
        target_weights_sha256=weights_sha256(cached_folder(model, revision)),
        drafter_method=method,
        drafter_path=drafter_path or drafter,
        drafter_config=json.loads((folder / "config.json").read_text(encoding="utf-8")),
        drafter_weights_sha256=weights_sha256(folder),
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=round(time.monotonic() - began, 1),
        seeds=list(seeds),
    )
