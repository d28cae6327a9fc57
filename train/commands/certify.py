"""`draftsmith certify`: whether a server that drafts is lossless, by inference/bench/certify.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

URL_START = ("http://", "https://")
EXIT_CODES = {"lossless": 0, "lossy": 1, "undecided": 3}


def certify(
    url: Annotated[str, typer.Argument(help="The server that drafts: any with OpenAI's API.")],
    baseline: Annotated[
        str,
        typer.Option(
            help="A server of the same model that does not draft, or the model: folder or id."
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with `prompt`, a text; default: a few built-in texts."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each greedy text.")] = 64,
    samples: Annotated[
        int, typer.Option(min=0, help="At temperature 1, of each server and prompt; 0: none.")
    ] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 4,
    dtype: Annotated[str, typer.Option(help="Of a baseline that is a model.")] = "auto",
    assume_drafting: Annotated[
        bool,
        typer.Option("--assume-drafting", help="The server drafts, and has no counters of vLLM's."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the certificate.")] = None,
) -> None:
    """Test whether a server that drafts writes what its model writes without drafts. Exit code 1:
    it does not; 3: nothing shows that it drafted."""
    from draftsmith.inference.bench.certify import serving
    from draftsmith.inference.whole_file import write_whole

    texts = _prompts(prompts)
    given = (texts, max_tokens, samples, concurrency, assume_drafting)
    if baseline.startswith(URL_START):
        result = asyncio.run(_certify(url, baseline, *given))
    else:
        with serving(baseline, dtype) as address:
            result = asyncio.run(_certify(url, address, *given)) | {"baseline": baseline}
    if output is not None:
        write_whole(output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    _print(result, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(EXIT_CODES[result["verdict"]])


def _prompts(path: Path | None) -> list[str]:
    from draftsmith.inference.evaluation.demo_prompts import demo_prompts
    from draftsmith.inference.evaluation.suites import json_lines
    from draftsmith.speculators.errors import DataError

    if path is None:
        return demo_prompts("en")[0]
    texts = list[str]()
    for origin, row in json_lines(path):
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text:
            raise DataError("expected an object with `prompt`, a text", where=origin)
        texts.append(text)
    if not texts:
        raise DataError("there are no rows", where=f"{path}")
    return texts


async def _certify(
    url: str,
    baseline: str,
    prompts: list[str],
    max_tokens: int,
    samples: int,
    concurrency: int,
    assume_drafting: bool,
) -> dict[str, Any]:
    from draftsmith.inference.bench.certify import Completions, certify
    from draftsmith.inference.bench.load import client_at

    async with client_at(url) as server, client_at(baseline) as reference:
        return await certify(
            Completions(server, concurrency),
            Completions(reference, concurrency),
            prompts,
            max_tokens=max_tokens,
            samples=samples,
            assume_drafting=assume_drafting,
        )


def _print(result: dict[str, Any], console: Console) -> None:
    greedy, sampled = result["greedy"], result["sampled"]
    console.print(f"{result['server']} against {result['baseline']}: {result['model']}")
    console.print(
        f"greedy: {greedy['prompts']} prompts, {greedy['tokens']} tokens, {greedy['mismatches']}"
        f" mismatches, {greedy['ties']} ties"
    )
    for one in greedy["differences"]:
        if not one["tie"]:
            gap = "not among the leading tokens" if one["gap"] is None else f"gap {one['gap']:.2g}"
            console.print(
                f"  prompt {one['prompt']}, token {one['position']}: {one['produced']!r} in place"
                f" of {one['expected']!r}; {gap}, rounding error {one['rounding_error']:.2g}",
                markup=False,
            )
    if sampled["tests"]:
        smallest = min(test["p_value"] for test in sampled["tests"])
        console.print(
            f"sampled: {len(sampled['tests'])} χ² tests of {sampled['samples']} samples; smallest"
            f" p-value {smallest:.2g}"
        )
    length = result["acceptance_length"]
    reported = "no drafts reported" if length is None else f"acceptance length {length:.2f}"
    console.print(f"drafting: {reported}")
    style = {"lossless": "green", "lossy": "red", "undecided": "yellow"}[result["verdict"]]
    alone = result["verdict"] == "lossless" and not sampled["tested"]
    scope = " at temperature 0; no test of samples had a degree of freedom" if alone else ""
    console.print(result["verdict"] + scope, style=style)
