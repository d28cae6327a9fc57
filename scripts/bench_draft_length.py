"""Adaptive draft length against every fixed one: tokens per second per workload, and on all of them
together.

Every length is an engine of its own over one shared target. All run in turn at every prompt, in
alternating order, so that a slow moment of the machine affects all alike. Three tables are printed:
with the time of all repeats; with the fastest repeat of each response, which other load disturbs
least; and with the best fixed length chosen on half of the responses and timed on the other half,
because the best of many lengths on the responses that chose it owes some of its lead to chance.
--out keeps the times. With --simulate nothing is timed: the drafts of K tokens at every position of
the target's own greedy text are recorded once, and each length is replayed on that record with
given costs. That takes a minute and is exact.

    python scripts/bench_draft_length.py recipes/quickstart/target runs/quickstart/eagle3/export
    python scripts/bench_draft_length.py TARGET DRAFTER --simulate --verify 16,0.45 --draft 0.5,0.95
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference import LLM, SamplingParams
from inference.entrypoints.prompts import Prompt
from inference.evaluation.side_by_side import DEFAULT, SideBySide
from inference.report.measurement import TimedRun
from inference.spec_decode.draft_length.costs import RoundCosts
from inference.spec_decode.draft_length.policy import AdaptiveDraftLength
from inference.spec_decode.proposal import Proposal
from scripts.measuring import save_json, table
from speculators.export import read_drafter_config
from train.pipeline.acceptance_stage import settings_of, workloads
from train.pipeline.evaluate_again import BUILT_IN
from train.recipe.recipe import make_recipe

Prompts = Mapping[str, Sequence[Sequence[int]]]
Times = dict[str, dict[str, list[list[TimedRun]]]]  # workload -> length -> response -> repeats
Rates = dict[str, dict[str, float]]  # workload -> length -> tokens per second
Chain = tuple[
    int, list[float], int
]  # number of correct drafts, their confidences, tokens left in the text

ADAPTIVE = "adaptive"


def prompts_of(target: str, count: int, max_tokens: int) -> Prompts:
    """The built-in workloads' test prompts, `count` of each."""
    keys = {
        "prompts": BUILT_IN,
        "temperatures": [0.0],
        "prompts_per_workload": count,
        "max_tokens": max_tokens,
    }
    recipe = make_recipe(
        {
            "name": "lengths",
            "target": {"model": target},
            "data": {"train": BUILT_IN},
            "evaluation": keys,
        }
    )
    return workloads(recipe, settings_of(recipe))


def timed(
    side: SideBySide,
    prompts: Prompts,
    params: SamplingParams,
    repeats: int,
    rows: int,
    console: Console,
) -> Times:
    """Times of the repeats of every length, for every `rows` prompts of a workload."""
    times: Times = {
        workload: {name: [] for name in side.llms if name != DEFAULT} for workload in prompts
    }
    for workload, ids in prompts.items():
        batches = [
            [Prompt(None, list(row)) for row in ids[i : i + rows]] for i in range(0, len(ids), rows)
        ]
        for batch in batches:
            if batch is batches[0]:
                side.run(batch, params, 1)  # untimed: caches grow, costs are measured
            measured = side.run(batch, params, repeats)
            for name, responses in times[workload].items():
                responses.append(measured[name].runs)
        console.print(f"{workload}: {len(ids)} responses, {repeats} repeats")
    return times


def rates(times: Times, of_repeats: Callable[[Iterable[float]], float]) -> Rates:
    """Tokens per second, each response at the mean (or minimum, by `of_repeats`) of its repeats'
    times."""
    names = next(iter(times.values()))
    together = {
        name: [repeats for by_name in times.values() for repeats in by_name[name]] for name in names
    }
    return {
        workload: {
            name: (
                sum(repeats[0].tokens for repeats in responses)
                / sum(of_repeats(run.seconds for run in repeats) for repeats in responses)
            )
            for name, responses in by_name.items()
        }
        for workload, by_name in {**times, "all": together}.items()
    }


def crossed(times: Times) -> Rates:
    """Speed over that of the fixed length that is best in the other half of the responses:
    geometric means over both halves. Needs two responses per workload."""
    logs: dict[str, dict[str, list[float]]] = {}
    halves = [
        rates(
            {
                w: {name: runs[half::2] for name, runs in by_name.items()}
                for w, by_name in times.items()
            },
            fmean,
        )
        for half in (0, 1)
    ]
    for chosen_on, judged_on in (halves, halves[::-1]):
        for workload, by_name in chosen_on.items():
            best = max(
                (name for name in by_name if name != ADAPTIVE), key=lambda name: by_name[name]
            )
            for name, rate in judged_on[workload].items():
                ratio = math.log(rate / judged_on[workload][best])
                logs.setdefault(workload, {}).setdefault(name, []).append(ratio)
    return {
        w: {name: math.exp(fmean(ratios)) for name, ratios in by_name.items()}
        for w, by_name in logs.items()
    }


def keep(times: Times, path: Path) -> None:
    """Writes the rates, and tokens and seconds of every repeat, as JSON."""
    raw = {
        workload: {
            name: [[(run.tokens, run.seconds) for run in repeats] for repeats in responses]
            for name, responses in by_name.items()
        }
        for workload, by_name in times.items()
    }
    several = all(
        len(responses) > 1 for by_name in times.values() for responses in by_name.values()
    )
    halves = crossed(times) if several else None
    save_json(path, {"rates": rates(times, fmean), "other_half": halves, "times": raw})


# ------------------------------------------------------------------ simulation


def record(llm: LLM, prompts: Prompts, max_tokens: int) -> dict[str, list[list[Chain]]]:
    """Workload -> response -> the chain that would be drafted at each position of the target's
    greedy text."""
    proposer = llm.engine.proposer
    assert proposer is not None
    draft, most = proposer.propose, proposer.num_speculative_tokens
    seen: dict[
        str, dict[int, tuple[list[int], list[float]]]
    ] = {}  # request -> position -> tokens, confidences
    proposer.stops_early = False  # the whole chain is drafted, with its confidences
    proposer.go_on = lambda confidence: most

    def watched(requests, limits):
        proposal = draft(requests, [min(most, request.draft_limit) for request in requests])
        assert proposal.confidence is not None
        for request, tokens, sure in zip(
            requests, proposal.token_ids.tolist(), proposal.confidence.tolist()
        ):
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
                right = next(
                    (i for i, (a, b) in enumerate(zip(tokens, text[at:])) if a != b), len(text) - at
                )
                chains.append((min(right, len(tokens)), sure, len(text) - at))
            recorded[workload].append(chains)
    return recorded


def simulated(
    recorded: Mapping[str, list[list[Chain]]], costs: RoundCosts, most: int, asks: bool
) -> Rates:
    """Tokens per unit of cost."""
    responses = [chains for by_workload in recorded.values() for chains in by_workload]
    mixed = [chains for i in range(7) for chains in responses[i::7]]  # workloads in turn
    by_workload: Rates = {}
    for workload, texts in {**recorded, "all": mixed}.items():
        by_workload[workload] = {
            f"K={k}": _replay(texts, costs, lambda response, right, sure, k=k: (k, k))
            for k in range(most + 1)
        }
        length = AdaptiveDraftLength(most, costs)
        length.attach(
            SimpleNamespace(stops_early=asks, whole_blocks=False), lambda rows, tokens: None
        )  # type: ignore[arg-type]
        by_workload[workload][ADAPTIVE] = _replay(
            texts, costs, lambda *chain, length=length: _choose(length, asks, *chain)
        )
    return by_workload


def _choose(
    length: AdaptiveDraftLength,
    asks: bool,
    response: SimpleNamespace,
    right: int,
    sure: Sequence[float],
) -> tuple[int, int]:
    """(tokens drafted, tokens verified) that the adaptive length chooses for one chain."""
    (limit,) = length.limits([response])  # type: ignore[list-item]
    limit = min(limit, len(sure))
    width = depth = 0
    if asks:
        while width < limit:
            depth += 1
            wanted = length._go_on([sure[width]])
            width += wanted > 0
            if wanted <= 1:
                break
    elif limit:
        tokens, confidence = (
            torch.zeros(1, limit, dtype=torch.long),
            torch.tensor([list(sure[:limit])]),
        )
        width, depth = length.settle(Proposal(tokens, [limit], confidence=confidence)).width, limit
    length.learn([width], [min(right, width)], 0.0, 0.0)
    return depth, width


class _Response:
    """A request of the simulation, with the fields that a draft length reads."""

    draft_limit = most_drafts = 1 << 30


def _replay(
    responses: Sequence[Sequence[Chain]], costs: RoundCosts, choose: Callable[..., tuple[int, int]]
) -> float:
    """Tokens per unit of cost where `choose` sets the draft length of every round."""
    verify, draft = costs.of([])
    tokens = cost = 0.0
    for chains in responses:
        at, response = 0, _Response()
        while at < len(chains):
            right, sure, left = chains[at]
            depth, width = choose(response, right, sure)
            new = 1 + min(right, width, left - 1)
            tokens, cost, at = tokens + new, cost + verify[width] + draft[depth], at + new
    return tokens / cost


# ------------------------------------------------------------------ command


def show(by_workload: Rates, title: str, console: Console, *, relative: bool = False) -> None:
    """Prints a row per workload, each length relative to the best fixed one. `relative`: the rates
    already are."""
    names = list(next(iter(by_workload.values())))
    shown = table(title, "workload", *names, "best")
    for workload, by_name in by_workload.items():
        best = max((name for name in by_name if name != ADAPTIVE), key=lambda name: by_name[name])
        unit = 1.0 if relative else by_name[best]
        shown.add_row(workload, *(f"{by_name[name] / unit:.3f}" for name in names), best)
    console.print(shown)


def main(
    target: Annotated[str, typer.Argument(help="Folder or id of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder of an exported drafter.")],
    most: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Largest K.")] = 6,
    least: Annotated[int, typer.Option(help="Smallest fixed length that is timed.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts per workload.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens per response.")] = 96,
    temperature: Annotated[float, typer.Option(help="Temperature of the timed passes.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed passes.")] = 3,
    simulate: Annotated[
        bool, typer.Option(help="Replay recorded drafts with given costs; nothing is timed.")
    ] = False,
    verify: Annotated[
        str, typer.Option(help="Simulated V(n): V(1), and the cost of each further token.")
    ] = "16,0.45",
    draft: Annotated[
        str, typer.Option(help="Simulated D(k): a constant, and the cost of each draft.")
    ] = "0.5,0.95",
    out: Annotated[Path | None, typer.Option(help="File for the times, as JSON.")] = None,
    asks: Annotated[
        bool, typer.Option(help="Simulated drafter can be stopped at any depth, as on a CPU.")
    ] = True,
) -> None:
    """Compare the adaptive draft length with every fixed one."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    chosen = prompts_of(target, prompts, max_tokens)
    method = {"method": read_drafter_config(drafter).family, "model": drafter}
    if simulate:
        (v, dv), (d, dd) = ([float(x) for x in text.split(",")] for text in (verify, draft))
        costs = RoundCosts(
            [v + dv * i for i in range(most + 1)], [d + dd * i for i in range(1, most + 1)]
        )
        llm = LLM(
            target, speculative_config=method | {"num_speculative_tokens": most}, max_num_seqs=16
        )
        by_workload = simulated(record(llm, chosen, max_tokens), costs, most, asks)
        show(by_workload, "tokens per unit of cost, best fixed length = 1", console)
        return
    methods = {f"K={k}": method | {"num_speculative_tokens": k} for k in range(least, most + 1)}
    methods[ADAPTIVE] = method | {
        "num_speculative_tokens": most,
        "enable_adaptive_verification": True,
    }
    side = SideBySide(target, methods, max_num_seqs=batch_size)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    times = timed(side, chosen, params, repeats, batch_size, console)
    if out is not None:
        keep(times, out)
    show(rates(times, fmean), "tokens per second over all repeats, best fixed length = 1", console)
    show(
        rates(times, min),
        "tokens per second (fastest repeat of each response), best fixed length = 1",
        console,
    )
    if prompts >= 2 * batch_size:
        title = (
            "tokens per second over those of the fixed length that is best in the other half of the"
            " responses"
        )
        show(crossed(times), title, console, relative=True)
    console.print(f"mean adaptive length: {side.llms[ADAPTIVE].engine.mean_draft_length:.2f}")


if __name__ == "__main__":
    typer.run(main)
