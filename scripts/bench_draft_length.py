"""Adaptive draft length against every fixed one: tokens per second per workload, and on all of them together.

Every length is an engine of its own over one shared target; all take turns at every prompt, in alternating order, so
that a machine that slows down slows all. Three tables are printed: with the time of all repeats; with the fastest of
each response, which neighbours disturb less, as what disturbs a run only ever makes it longer; and with the best
fixed length chosen on half of the responses and timed on the other, because the best of many lengths on the responses
that chose it is the lucky one: whose rounds happen to end where the text does. --out keeps the times. With --simulate
nothing is timed: the chain of K drafts is recorded once at every position of the target's own greedy text, and each
length is played on that record with given costs, which takes a minute and is exact.

    python scripts/bench_draft_length.py recipes/quickstart/target runs/quickstart/eagle3/export
    python scripts/bench_draft_length.py TARGET DRAFTER --simulate --verify 16,0.45 --draft 0.5,0.95
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference import LLM, SamplingParams
from inference.entrypoints.loading import load_target
from inference.evaluation.timing import interleaved
from inference.report.measurement import TimedRun
from inference.spec_decode.draft_length.costs import MeasuredCosts, RoundCosts
from inference.spec_decode.draft_length.policy import AdaptiveDraftLength, DraftLength
from inference.spec_decode.proposal import Proposal
from speculators.export import load_drafter, read_drafter_config
from train.pipeline.acceptance_stage import settings_of, workloads
from train.pipeline.evaluate_again import BUILT_IN
from train.recipe.recipe import make_recipe

Prompts = Mapping[str, Sequence[Sequence[int]]]
Passes = dict[str, dict[str, list[list[TimedRun]]]]  # workload -> length -> response -> repeats
Chain = tuple[int, list[float], int]  # drafts that are right, their confidences, tokens the text still has

ADAPTIVE = "adaptive"


def prompts_of(target: str, count: int, max_tokens: int) -> Prompts:
    """The demo workloads' test prompts, `count` of each."""
    keys = {"prompts": BUILT_IN, "temperatures": [0.0], "prompts_per_workload": count, "max_tokens": max_tokens}
    recipe = make_recipe(
        {"name": "lengths", "target": {"model": target}, "data": {"train": BUILT_IN}, "evaluation": keys}
    )
    return workloads(recipe, settings_of(recipe))


def engines(target: str, drafter: str, least: int, most: int, rows: int) -> dict[str, LLM]:
    """K = least … most and the adaptive length, over one target and one drafter."""
    head = read_drafter_config(drafter)
    shared = load_target(target, head.tap_layers)
    loaded = load_drafter(drafter, shared)
    lengths: dict[str, DraftLength] = {f"K={k}": DraftLength(k) for k in range(least, most + 1)}
    lengths[ADAPTIVE] = AdaptiveDraftLength(most, MeasuredCosts(most))
    return {
        name: LLM._assemble(
            shared,
            drafter=loaded,
            draft_length=length,
            num_speculative_tokens=length.num_speculative_tokens,
            max_num_seqs=rows,
        )
        for name, length in lengths.items()
    }


def timed(
    llms: Mapping[str, LLM], prompts: Prompts, params: SamplingParams, repeats: int, rows: int, console: Console
) -> Passes:
    """Workload -> length -> for every `rows` prompts the times of the repeats. All lengths take turns at each of them,
    so that a slow second falls on one response of one length, and not on a whole pass of it."""
    device = next(iter(llms.values())).engine.target.device
    runs: Passes = {w: {name: [] for name in llms} for w in prompts}

    def one_pass(llm: LLM, batch: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in batch], params, False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), 0, 0

    for turn in range(-1, repeats):  # the first one warms up: caches grow, costs are measured
        for workload, found in prompts.items():
            for first in range(0, len(found), rows):
                batch = found[first : first + rows]
                passes = {name: lambda llm=llm, batch=batch: one_pass(llm, batch) for name, llm in llms.items()}
                for name, run in interleaved(passes, turn, device).items():
                    if turn == 0:
                        runs[workload][name].append([run])
                    elif turn > 0:
                        runs[workload][name][first // rows].append(run)
        console.print(f"pass {turn + 2} of {repeats + 1}")
    return runs


def rates(runs: Passes, of_repeats: Callable[[Iterable[float]], float]) -> dict[str, dict[str, float]]:
    """Workload -> length -> tokens per second, every response at the mean (or minimum) of its repeats' times."""
    together = {name: [each for found in runs.values() for each in found[name]] for name in next(iter(runs.values()))}
    return {
        workload: {
            name: sum(each[0].tokens for each in found) / sum(of_repeats(run.seconds for run in each) for each in found)
            for name, found in by_name.items()
        }
        for workload, by_name in {**runs, "all": together}.items()
    }


def crossed(runs: Passes) -> dict[str, dict[str, float]]:
    """Workload -> length -> speed over that of the fixed length which the other half of the responses says is best:
    geometric means over both halves. At least two responses per workload."""
    logs: dict[str, dict[str, list[float]]] = {}
    for first in (0, 1):
        chosen_on, judged_on = (
            rates({w: {name: found[half::2] for name, found in by.items()} for w, by in runs.items()}, fmean)
            for half in (first, 1 - first)
        )
        for workload, found in chosen_on.items():
            best = max((name for name in found if name != ADAPTIVE), key=lambda name: found[name])
            for name, rate in judged_on[workload].items():
                ratio = math.log(rate / judged_on[workload][best])
                logs.setdefault(workload, {}).setdefault(name, []).append(ratio)
    return {w: {name: math.exp(fmean(each)) for name, each in found.items()} for w, found in logs.items()}


def keep(runs: Passes, path: Path) -> None:
    """Tokens and seconds of every repeat, as JSON."""
    tree = {
        workload: {
            name: [[(run.tokens, run.seconds) for run in repeats] for repeats in found]
            for name, found in by_name.items()
        }
        for workload, by_name in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree) + "\n")


def record(llm: LLM, prompts: Prompts, max_tokens: int) -> dict[str, list[list[Chain]]]:
    """Workload -> response -> the chain that would be drafted at each of its positions; the text is written plainly."""
    proposer, seen = llm.engine.proposer, {}
    assert proposer is not None
    draft, most = proposer.propose, proposer.num_speculative_tokens
    proposer.asks = False  # confidences are told with the chain
    proposer.go_on = lambda confidence: most

    def watched(requests, limits):
        proposal = draft(requests, [min(most, request.draft_limit) for request in requests])
        assert proposal.confidence is not None
        for request, tokens, sure in zip(requests, proposal.token_ids.tolist(), proposal.confidence.tolist()):
            seen.setdefault(request.request_id, {})[len(request.token_ids)] = (tokens, sure)
        return Proposal.empty(len(requests), llm.engine.target.device)

    proposer.propose = watched  # type: ignore[method-assign]
    recorded: dict[str, list[list[Chain]]] = {}
    for workload, batch in prompts.items():
        seen.clear()
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in batch], params, False)
        recorded[workload] = []
        for output in outputs:
            text = output.prompt_token_ids + output.outputs[0].token_ids
            chains = []
            for at, (tokens, sure) in sorted(seen.get(output.request_id, {}).items()):
                right = next((i for i, (a, b) in enumerate(zip(tokens, text[at:])) if a != b), len(text) - at)
                chains.append((min(right, len(tokens)), sure, len(text) - at))
            recorded[workload].append(chains)
    return recorded


def played(
    recorded: Mapping[str, list[list[Chain]]], costs: RoundCosts, most: int, asks: bool
) -> dict[str, dict[str, float]]:
    """Workload -> length -> tokens per unit of cost."""
    texts = {**recorded, "all": [text for found in recorded.values() for text in found]}
    texts["all"] = [text for i in range(7) for text in texts["all"][i::7]]  # workloads take turns
    verify, draft = costs.of([])
    rates: dict[str, dict[str, float]] = {}
    for workload, responses in texts.items():
        rates[workload] = {}
        for k in range(most + 1):
            rates[workload][f"K={k}"] = _play(responses, verify, draft, lambda right, sure, k=k: (k, k))
        length = AdaptiveDraftLength(most, costs)
        length.attach(SimpleNamespace(asks=asks), lambda rows, tokens: None)  # type: ignore[arg-type]
        rates[workload][ADAPTIVE] = _play(responses, verify, draft, _Choosing(length, asks))
    return rates


class _Choosing:
    """A draft length asked about chains of one row: (drafts right, confidences) -> (depth drafted, verified)."""

    def __init__(self, length: AdaptiveDraftLength, asks: bool) -> None:
        self._length, self._asks = length, asks
        self.next_response()

    def next_response(self) -> None:
        self._request = _Response()

    def __call__(self, right: int, sure: Sequence[float]) -> tuple[int, int]:
        length = self._length
        (limit,) = length.limits([self._request])  # type: ignore[list-item]
        limit = min(limit, len(sure))
        width = depth = 0
        if self._asks:
            while width < limit:
                depth += 1
                wanted = length._go_on([sure[width]])
                width += wanted > 0
                if wanted <= 1:
                    break
        elif limit:
            tokens, confidence = torch.zeros(1, limit, dtype=torch.long), torch.tensor([list(sure[:limit])])
            width, depth = length.settle(Proposal(tokens, [limit], confidence=confidence)).width, limit
        length.learn([width], [min(right, width)], 0.0, 0.0)
        return depth, width


class _Response:
    draft_limit = most_drafts = 1 << 30


def _play(responses: Sequence[Sequence[Chain]], verify, draft, choose) -> float:
    tokens = cost = 0.0
    for chains in responses:
        at = 0
        if isinstance(choose, _Choosing):
            choose.next_response()
        while at < len(chains):
            right, sure, left = chains[at]
            depth, width = choose(right, sure)
            new = 1 + min(right, width, left - 1)
            tokens, cost, at = tokens + new, cost + verify[width] + draft[depth], at + new
    return tokens / cost


def show(rates: Mapping[str, Mapping[str, float]], title: str, console: Console, *, relative: bool = False) -> None:
    """A row per workload: each length against the best fixed one. `relative`: they are that already."""
    names = list(next(iter(rates.values())))
    table = Table("workload", *names, "best", title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for workload, found in rates.items():
        fixed = {name: rate for name, rate in found.items() if name != ADAPTIVE}
        best = max(fixed, key=lambda name: fixed[name])
        unit = 1.0 if relative else fixed[best]
        cells = [f"{found[name] / unit:.3f}" for name in names]
        cells[-1] = f"[bold {'green' if found[ADAPTIVE] >= 0.97 * unit else 'red'}]{cells[-1]}[/]"
        table.add_row(workload, *cells, best)
    console.print(table)


def main(
    target: Annotated[str, typer.Argument(help="Folder or id of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder of an exported drafter.")],
    most: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Largest K.")] = 6,
    least: Annotated[int, typer.Option(help="Smallest fixed length that is timed.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts per workload.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens per response.")] = 96,
    temperature: Annotated[float, typer.Option(help="Of the timed passes.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed passes.")] = 3,
    simulate: Annotated[bool, typer.Option(help="Play recorded drafts with given costs; nothing is timed.")] = False,
    verify: Annotated[str, typer.Option(help="Simulated V(n): V(1), and what each further token adds.")] = "16,0.45",
    draft: Annotated[str, typer.Option(help="Simulated D(k): a constant, and what each draft adds.")] = "0.5,0.95",
    out: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
    asks: Annotated[bool, typer.Option(help="Simulated drafter that is stopped on its way, as on a CPU.")] = True,
) -> None:
    """Compare the adaptive draft length with every fixed one."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = prompts_of(target, prompts, max_tokens)
    if simulate:
        (v, dv), (d, dd) = ([float(x) for x in text.split(",")] for text in (verify, draft))
        costs = RoundCosts([v + dv * i for i in range(most + 1)], [d + dd * i for i in range(1, most + 1)])
        options = {"num_speculative_tokens": most, "method": read_drafter_config(drafter).family, "model": drafter}
        recorded = record(LLM(target, speculative_config=options, max_num_seqs=16), found, max_tokens)
        show(played(recorded, costs, most, asks), "tokens per unit of cost, best fixed length = 1", console)
        return
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    llms = engines(target, drafter, least, most, batch_size)
    runs = timed(llms, found, params, repeats, batch_size, console)
    if out is not None:
        keep(runs, out)
    show(rates(runs, fmean), "tokens per second over all repeats, best fixed length = 1", console)
    show(rates(runs, min), "tokens per second (fastest repeat of each response), best fixed length = 1", console)
    if prompts >= 2 * batch_size:
        title = "tokens per second over those of the fixed length that is best in the other half of the responses"
        show(crossed(runs), title, console, relative=True)
    console.print(f"mean adaptive length: {llms[ADAPTIVE].engine.mean_draft_length:.2f}")


if __name__ == "__main__":
    typer.run(main)
