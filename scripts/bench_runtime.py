"""Speedup of every drafting method, and the time of a round by phase: all in one run, interleaved.

    make bench-runtime ARGS="--model TARGET --method eagle3=EXPORT --method ngram" python
    scripts/bench_runtime.py --model TARGET --method draft_model=FOLDER --batch-sizes 1,8 --json
    out.json

A method is `NAME=FOLDER`, `NAME` (training-free), or a speculative_config as JSON, which may have a
`name`. Drafting off and `transformers.generate` on the same model object run beside them: alone,
with each draft model as its `assistant_model`, and with `prompt_lookup_num_tokens` if n-grams are
measured. With `--compile` every method and drafting off run a second time, compiled.
docs/runtime.md explains the figures."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.console import run
from inference.entrypoints.loading import end_of_sequence_ids
from inference.entrypoints.prompts import Prompt
from inference.entrypoints.speculative_defaults import complete
from inference.entrypoints.vllm_options import read_options
from inference.evaluation.demo_prompts import DEMOS, demo_prompts
from inference.evaluation.side_by_side import DEFAULT, Measured, Other, SideBySide
from inference.evaluation.timing import (
    IsolatedCosts,
    costs_of,
    transformers_generate,
    typical_context,
)
from inference.offline import as_prompts
from inference.provenance import environment
from inference.report.build import paired_ratio, tokens_per_second
from inference.report.cell import Spread
from inference.report.cost_model import efficiency, speedup_limit
from inference.report.measurement import Costs
from inference.sampling_params import SamplingParams
from inference.spec_decode.proposers.methods import TRAINING_FREE
from inference.whole_file import check_writable
from scripts.measuring import save_json, table
from speculators.errors import ConfigError
from speculators.export import load_drafter
from speculators.hub import split_revision

NUM_SPECULATIVE_TOKENS = 4
ROUND = ("schedule", "draft", "verify", "sample", "commit")  # phases of a round; prefill is not one
HELD_OUT = Path(__file__).resolve().parents[1] / "recipes/quickstart/data/test.jsonl.gz"
WORKLOADS = ("math", "python", "json", "rewrite", "table", "chat")  # of HELD_OUT
KNOWN = (*DEMOS, *WORKLOADS)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Target: folder or repository id.")],
    method: Annotated[list[str], typer.Option(help="NAME=FOLDER, NAME, or JSON; several times.")],
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Default of the methods: 4; suffix and lookahead: what their options allow."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help=f"Workloads: {', '.join(KNOWN)}; several times.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 4,
    batch_sizes: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of everything.")] = 5,
    cost_trials: Annotated[
        int, typer.Option(min=1, help="Forwards of each kind after each repeat.")
    ] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the target; auto: its own.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; cuda if there is one.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also measure our methods compiled.")
    ] = False,
    transformers: Annotated[bool, typer.Option(help="Also measure transformers.generate.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="File of all figures.")] = None,
) -> None:
    """Measure every method and print a table of speeds and one of rounds for each batch size."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value for name, value in locals().items()
    }
    methods = parse_methods(method, num_speculative_tokens)
    sizes, workloads = read_sizes(batch_sizes), prompts or ["chat"]
    if unknown := [name for name in workloads if name not in KNOWN]:
        raise ConfigError(f"--prompts {unknown[0]}: expected one of {', '.join(KNOWN)}")
    if json_file is not None:
        check_writable("--json", json_file)
    methods = {name: complete(read_options({}, config), model) for name, config in methods.items()}
    if threads:
        torch.set_num_threads(threads)
    disable_progress_bar()
    console, target, tokenizer = Console(), model, None
    results: list[dict[str, Any]] = []
    for size in sizes:
        runtimes = SideBySide(
            target,
            methods,
            tokenizer=tokenizer,
            compiled=compiled,
            max_num_seqs=size,
            dtype=dtype,
            device=device,
        )
        target, tokenizer = runtimes.target, runtimes.llms[DEFAULT].get_tokenizer()
        others = other_engines(runtimes, methods, size) if transformers else {}
        for workload in workloads:
            chosen = workload_prompts(workload, num_prompts, tokenizer)
            costs = CostTrials(runtimes, methods, size, cost_trials)
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            with console.status(
                f"{workload}, batch size {size}: {len(chosen)} prompts, {repeats} repeats"
            ):
                measured = runtimes.run(chosen, params, repeats, others, costs.measure)
            for name, one in measured.items():
                figures = figures_of(name, one, measured[DEFAULT], costs.costs(name, one))
                if name in runtimes.llms and name != DEFAULT:
                    check = runtimes.compare(chosen, measured, name)
                    figures |= {"mismatches": check.mismatches, "ties": check.ties}
                results.append(
                    {"batch_size": size, "workload": workload, "method": name, **figures}
                )
        of_size = [row for row in results if row["batch_size"] == size]
        console.print(speeds(of_size, size), rounds(of_size, size))
    if json_file is not None:
        versions = environment(runtimes.target.device, runtimes.target.dtype)
        save_json(json_file, {"versions": versions, "arguments": arguments, "results": results})


def read_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError(
            f"--batch-sizes {text}: expected whole numbers, 1 or more, comma-separated, such as 1,8"
        )
    return sizes


def parse_methods(given: Sequence[str], k: int | None) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config. `k`: number of drafts of methods that name none; None:
    NUM_SPECULATIVE_TOKENS, except where a method's other options imply the number."""
    methods: dict[str, dict[str, Any]] = {}
    for text in given:
        if text.lstrip().startswith("{"):
            try:
                config = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--method {text}: not JSON: {error}") from error
            name = str(
                config.pop("name", config.get("method") or Path(str(config.get("model"))).name)
            )
        else:
            name, _, folder = text.partition("=")
            config = {"method": name} | ({"model": folder} if folder else {})
        if name in methods:
            raise ConfigError(
                f'--method {text}: {name!r} is given twice; give one another name: {{"name": ...,'
                " ...}"
            )
        drafts = k or (
            None if config.get("method") in ("suffix", "lookahead") else NUM_SPECULATIVE_TOKENS
        )
        methods[name] = ({"num_speculative_tokens": drafts} if drafts else {}) | config
    return methods


def workload_prompts(workload: str, count: int, tokenizer: Any) -> list[Prompt]:
    """Prompts of a built-in demo, or held-out ones of the quickstart."""
    if workload in WORKLOADS:
        with gzip.open(HELD_OUT, "rt", encoding="utf-8") as file:
            rows = [row for row in map(json.loads, file) if row["workload"] == workload]
        chats = [row["messages"][:-1] for row in rows[:count]]
        return as_prompts([], chats, tokenizer, None)
    return as_prompts(*demo_prompts(workload), tokenizer, None)[:count]


# ------------------------------------------------------------------ other engines


def other_engines(
    runtimes: SideBySide, methods: Mapping[str, Mapping[str, Any]], size: int
) -> dict[str, Other]:
    """`transformers.generate` on the target's model object. Its drafting takes one prompt at a
    time, so it is measured at batch size 1 only."""
    llm = runtimes.llms[DEFAULT]
    eos, device = (
        sorted(end_of_sequence_ids(llm.engine.target, llm.get_tokenizer())),
        runtimes.target.device,
    )

    def generate(
        prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **drafting: Any
    ) -> int:
        return sum(
            transformers_generate(
                runtimes.target.model, prompts[i : i + size], params[i], eos, 0, **drafting
            )
            for i in range(0, len(prompts), size)
        )

    others: dict[str, Other] = {"transformers": generate}
    for name, config in methods.items() if size == 1 else ():
        k = runtimes.num_speculative_tokens(name)
        if config.get("method") == "ngram":
            others["transformers, prompt lookup"] = partial(generate, prompt_lookup_num_tokens=k)
        if config.get("method") == "draft_model":
            folder, revision = split_revision(config["model"], None)
            options = {"revision": revision or "main", "dtype": runtimes.target.dtype}
            assistant = AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
            assistant.generation_config.update(
                num_assistant_tokens=k, num_assistant_tokens_schedule="constant"
            )
            others[f"transformers, assistant {name}"] = partial(generate, assistant_model=assistant)
    return others


# ------------------------------------------------------------------ figures


@dataclass
class CostTrials:
    """The costs V(1), V(K+1) and D(K) of every method, measured between the repeats. K is the
    average number of drafts: n-grams draft fewer than allowed, an adaptive length varies.
    Lookahead's window is verified with the drafts."""

    runtimes: SideBySide
    methods: Mapping[str, Mapping[str, Any]]
    rows: int
    trials: int
    parts: dict[str, IsolatedCosts] = field(default_factory=dict)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def measure(self, measured: Mapping[str, Measured]) -> None:
        for name, config in self.methods.items():
            one, target = measured[name], self.runtimes.llms[name].engine.target
            if name not in self.parts:
                drafter = (
                    None
                    if config.get("method") in TRAINING_FREE
                    else load_drafter(config["model"], target)
                )
                kept, drafted = round(one.counters.acceptance_length), one.counters.num_drafts
                k = max(1, round(one.counters.num_draft_tokens / max(drafted, 1)))
                k += self.runtimes.llms[name].engine.proposer.num_scaffold_tokens
                context = typical_context(one.outputs)
                self.parts[name] = IsolatedCosts(
                    target, drafter, context, k, rows=self.rows, kept=kept
                )
            for part, values in self.parts[name].measure(self.trials).items():
                self.times.setdefault(name, {}).setdefault(part, []).extend(values)

    def costs(self, name: str, one: Measured) -> Costs | None:
        """Medians of the trials; D of a training-free method is the engine's own timer."""
        if name not in self.times:
            return None
        matching = [1e3 * one.phase_seconds["draft"] / max(one.rounds, 1)]
        return costs_of(
            {"draft_ms": matching} | self.times[name], self.rows, self.parts[name].context
        )


def figures_of(name: str, one: Measured, default: Measured, costs: Costs | None) -> dict[str, Any]:
    """All figures of one method on one workload. Speed includes the prefill; a round's phases are
    in milliseconds and as shares of their sum."""
    speedup = paired_ratio(one.runs, default.runs)
    figures: dict[str, Any] = {
        "tokens_per_second": Spread.of([tokens_per_second(run) for run in one.runs]).model_dump(),
        "speedup": speedup.model_dump() if speedup and name != DEFAULT else None,
    }
    if not one.rounds:
        return figures
    seconds = {phase: one.phase_seconds[phase] for phase in ROUND}
    figures |= {
        "acceptance_length": one.counters.acceptance_length,
        "drafted_share": one.counters.num_drafts / max(one.row_rounds, 1),
        "round_ms": {phase: 1e3 * value / one.rounds for phase, value in seconds.items()},
        "round_share": {phase: value / sum(seconds.values()) for phase, value in seconds.items()},
        "prefill_share": one.phase_seconds["prefill"] / sum(run.seconds for run in one.runs),
    }
    if costs is not None and speedup is not None:
        limit = limit_of(one, costs)
        figures |= {
            "costs_ms": {"V1": costs.target_step_ms, "VK": costs.verify_ms, "D": costs.draft_ms},
            "limit": limit,
            "efficiency": efficiency(speedup.median, limit),
        }
    return figures


def limit_of(one: Measured, costs: Costs) -> float:
    """The cost model's largest speedup; a round without drafts verifies and commits one token."""
    rounds, drafted = one.row_rounds, one.counters.num_drafts
    return speedup_limit(
        1 + one.counters.num_accepted_tokens / rounds,
        step_cost=costs.target_step_ms,
        verify_cost=(drafted * costs.verify_ms + (rounds - drafted) * costs.target_step_ms)
        / rounds,
        draft_cost=costs.draft_ms,
    )


# ------------------------------------------------------------------ tables


def speeds(rows: Sequence[Mapping[str, Any]], size: int) -> Table:
    """Tokens per second with quartiles, speedup over drafting off, its limit, and the share of the
    limit reached."""
    headings = ("workload", "", "tokens/s", "speedup", "τ", "limit", "eff.", "same")
    shown = table(f"speed, batch size {size}", *headings, left=2)
    for row in rows:
        rate, speedup, same = row["tokens_per_second"], row["speedup"], ""
        if "mismatches" in row:
            same = (
                f"NO {row['mismatches']}"
                if row["mismatches"]
                else f"yes ~{row['ties']}"
                if row["ties"]
                else "yes"
            )
        shown.add_row(
            row["workload"],
            row["method"],
            f"{rate['median']:.1f} ({rate['low']:.1f}-{rate['high']:.1f})",
            f"{speedup['median']:.2f}" if speedup else "",
            f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "",
            f"{row['limit']:.2f}" if "limit" in row else "",
            f"{100 * row['efficiency']:.0f}%" if "efficiency" in row else "",
            same,
        )
    return shown


def rounds(rows: Sequence[Mapping[str, Any]], size: int) -> Table:
    """Milliseconds of a round by phase, and their shares."""
    shown = table(f"a round in ms (%), batch size {size}", "workload", "", *ROUND, "total", left=2)
    for row in rows:
        if "round_ms" in row:
            cells = [
                f"{row['round_ms'][phase]:.2f} ({100 * row['round_share'][phase]:.0f}%)"
                for phase in ROUND
            ]
            shown.add_row(
                row["workload"], row["method"], *cells, f"{sum(row['round_ms'].values()):.2f}"
            )
    return shown


if __name__ == "__main__":
    run(app)
