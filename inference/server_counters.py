"""The counters of speculative decoding in the /metrics of any server that has vLLM's names. Imports
no torch."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.inference.metrics import SpecDecodeCounters


def read_counters(text: str) -> SpecDecodeCounters | None:
    """The counters of speculative decoding among vLLM's metrics, summed over its engines. None if
    there are none. ValueError for another format."""
    counters = SpecDecodeCounters()
    drafts = False
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
            drafts = drafts or name == "num_drafts"
            if name == "num_accepted_tokens_per_pos":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + int(sample.value)
            elif name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                setattr(counters, name, getattr(counters, name) + int(sample.value))
    counters.num_accepted_tokens_per_pos = [positions[key] for key in sorted(positions)]
    return counters if drafts else None
