"""Measurements and reports made for testing: seeded, whole, with every kind of figure."""

from __future__ import annotations

import random
from dataclasses import replace

from draftsmith.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftsmith.inference.report.build import Bound, build_report, check_gates
from draftsmith.inference.report.measurement import Measurement
from draftsmith.inference.report.schema import (
    AcceptanceReport,
    EngineFacts,
    LosslessCheck,
    Provenance,
    SuiteFacts,
    TimedPass,
    TokenDifference,
)
from draftsmith.inference.spec_decode.replay import ReplayResult

WORKLOADS = {"arithmetic": 0.86, "json": 0.93, "table-qa": 0.78, "chat": 0.66}
K = 4


def provenance(**changes) -> Provenance:
    fields = dict(
        draftsmith_version="0.1.0",
        git_commit="0123456789abcdef0123",
        torch_version="2.13.0+cpu",
        transformers_version="5.19.0",
        cpu_model="Example CPU 3.0 GHz",
        threads=1,
        device="cpu",
        dtype="bfloat16",
        recipe_name="quickstart/eagle3",
        recipe_sha256="ab" * 32,
        chat_template_sha256="cd" * 32,
        target_name="recipes/quickstart/target",
        target_weights_sha256="ef" * 32,
        drafter_method="eagle3",
        drafter_path="runs/quickstart/eagle3/export",
        drafter_config={"tap_layers": [2, 8, 13]},
        num_speculative_tokens=K,
        max_num_seqs=1,
        created_at="2025-01-02T03:04:05Z",
        duration_s=93.2,
    )
    return Provenance(**(fields | changes))


def request(
    accepted: list[int], drafted: list[int] | None = None, *, prompt: int = 100, tokens: int = 0
) -> RequestOutput:
    """A response by the accepted drafts of its rounds; by default every round drafted K."""
    drafted = [K] * len(accepted) if drafted is None else drafted
    metrics = RequestMetrics(
        num_drafts=sum(count > 0 for count in drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=[sum(a > k for a in accepted) for k in range(K)],
        accepted_per_round=accepted,
        drafted_per_round=drafted,
    )
    written = tokens or 1 + sum(accepted) + len(accepted)
    completion = CompletionOutput(index=0, text="", token_ids=[7] * written)
    return RequestOutput("", None, [5] * prompt, [completion], True, metrics)


def make_request(rng: random.Random, rate: float, length: int = 96) -> RequestOutput:
    """A request whose drafts are each accepted with probability `rate`."""
    accepted: list[int] = []
    written = 1
    while written < length:
        count = 0
        while count < K and written + count < length and rng.random() < rate:
            count += 1
        accepted.append(count)
        written += count + 1
    return request(accepted, tokens=min(written, length))


def passes(workload: str, tokens: int, seconds: list[float]) -> list[TimedPass]:
    return [
        TimedPass(workload=workload, repeat=i, tokens=tokens, seconds=s)
        for i, s in enumerate(seconds)
    ]


def replay_of(outputs: list[RequestOutput]) -> list[ReplayResult]:
    """A replay that expects exactly what was measured."""
    counted = [(o.metrics.num_drafts, o.metrics.num_accepted_tokens_per_pos) for o in outputs]
    return [ReplayResult(rounds, [float(n) for n in accepted]) for rounds, accepted in counted]


def make_measurement(workload: str, temperature: float, rate: float) -> Measurement:
    rng = random.Random(f"{workload}{temperature}")
    requests = [make_request(rng, rate) for _ in range(12)]
    tokens = sum(len(output.outputs[0].token_ids) for output in requests)
    rounds = sum(output.metrics.num_drafts for output in requests)
    seconds = {"speculative": rounds * 0.0059, "autoregressive": tokens * 0.004}
    tie = TokenDifference(
        prompt="3", position=17, reference_token=5, token=9, top_two_gap=0.01, noise=0.03, tie=True
    )
    exact = LosslessCheck(dtype="float32", checked_prompts=12, mismatches=0, ties=0)
    half = exact.model_copy(update={"dtype": "bfloat16", "ties": 1, "details": [tie]})
    return Measurement(
        workload=workload,
        temperature=temperature,
        method="eagle3",
        num_speculative_tokens=K,
        requests=requests,
        passes={
            kind: passes(workload, tokens, [s * rng.uniform(0.95, 1.05) for _ in range(5)])
            for kind, s in seconds.items()
        },
        replay=replay_of(requests),
        lossless=[exact, half] if temperature == 0 else [],
    )


def make_report(**gates: Bound) -> AcceptanceReport:
    measurements = [
        make_measurement(workload, temperature, rate - 0.08 * temperature)
        for temperature in (0.0, 1.0)
        for workload, rate in WORKLOADS.items()
    ]
    bounds = {name.replace("__", "."): bound for name, bound in gates.items()}
    report = build_report(measurements, provenance())
    return report.model_copy(update={"gates": check_gates(report.summary, bounds)})


def bare_report() -> AcceptanceReport:
    """Only counters, and one workload that never drafted: everything optional is absent."""
    silent = Measurement("silent", 0.0, "eagle3", K, [request([0] * 4, [0] * 4)])
    busy = Measurement("busy <b> $x$", 0.0, "eagle3", K, [request([3, 0, 2])])
    return build_report([silent, busy], provenance(recipe_name=None, git_commit=None))


def with_suite(report: AcceptanceReport, name: str) -> AcceptanceReport:
    """The same with a suite of two categories."""
    parts = [
        replace(make_measurement(category, t, rate), suite=name)
        for t in (0.0, 1.0)
        for category, rate in {"summarization": 0.5, "math_reasoning": 0.9}.items()
    ]
    facts = SuiteFacts(
        name=name,
        path=f"suites/{name}.jsonl",
        sha256="1" * 64,
        conversations=24,
        conversations_in_file=480,
        max_tokens=128,
        num_speculative_tokens=K,
        chat_template_kwargs={"enable_thinking": False},
    )
    suite = build_report(parts, report.provenance, [facts])
    return report.model_copy(
        update={"results": [*report.results, *suite.results], "suites": suite.suites}
    )


def in_engine(
    report: AcceptanceReport,
    engine: str = "draftsmith",
    factor: float = 1.0,
    sampled: str = "probabilistic",
) -> AcceptanceReport:
    """The report as that of `engine`, whose acceptance lengths are `factor` times as long."""
    facts = [EngineFacts(name=engine, version="1", draft_sample_method=sampled)]
    cells = []
    for cell in report.results:
        changed = {"engine": engine, "acceptance_length": factor * cell.acceptance_length}
        cells.append(cell.model_copy(update=changed))
    provenance = report.provenance.model_copy(update={"engine": engine, "engines": facts})
    return report.model_copy(update={"results": cells, "provenance": provenance})
