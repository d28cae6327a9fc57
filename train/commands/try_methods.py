"""`draftsmith try`: every way of drafting side by side on some prompts. Torch is imported when it
runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speculators.errors import ConfigError


def try_methods(
    model: Annotated[str, typer.Option(help="The target: a folder or repository id.")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="An exported drafter; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of prompts; default: built-in conversations."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 8,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            min=1,
            help="Drafts per round; default: each method's own.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest response.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; above it, texts are not compared.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved passes of each.")] = 3,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Responses at the same time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Precision of the target; auto: its own.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: cuda, if any.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")
    ] = None,
) -> None:
    """Drafting off, n-grams, suffixes, lookahead and any drafters side by side: does it pay?"""
    from inference.entrypoints.prompts import read_prompts
    from inference.evaluation.demo_prompts import demo_prompts
    from inference.evaluation.side_by_side import (
        DEFAULT,
        SideBySide,
        remarks,
        results,
        results_table,
    )
    from inference.offline import as_prompts
    from inference.provenance import environment
    from inference.sampling_params import SamplingParams
    from inference.whole_file import check_writable, write_whole
    from train.pipeline.evaluate_again import prompts_of_file

    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in locals().items()
        if name in try_methods.__annotations__
    }
    if json_file is not None:
        check_writable("--json", json_file)
    ids = prompts and prompts_of_file(model, prompts, num_prompts, max_tokens)
    console = Console()
    with console.status(f"loading {model}") as status:
        engines = SideBySide(
            model,
            _methods(drafter or [], num_speculative_tokens),
            dtype=dtype,
            device=device or None,
            max_num_seqs=max_num_seqs,
        )
        tokenizer = engines.llms[DEFAULT].get_tokenizer()
        if ids:
            chosen = read_prompts([{"prompt_token_ids": some} for some in ids], tokenizer)
        else:
            demo = "chat" if getattr(tokenizer, "chat_template", None) else "en"
            chosen = as_prompts(*demo_prompts(demo), tokenizer, None)[:num_prompts]
        total = len(chosen) * len(engines.llms) * repeats
        done = 0

        def progress(text: str, requests: int) -> None:
            nonlocal done
            done += requests
            status.update(f"{text} ({done} of {total} requests)")

        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        measured = engines.run(chosen, params, repeats, progress)
        names = [name for name in measured if name != DEFAULT and params.greedy]
        checks = {name: engines.compare(chosen, measured, name) for name in names}
    found = results(measured, checks)
    versions = environment(engines.target.device, engines.target.dtype)
    title = f"{model}: {len(chosen)} prompts, T={temperature:g}, {versions['dtype']}"
    console.print(results_table(title, found))
    for line in remarks(found, checks, tokenizer):
        console.print(line, highlight=False, soft_wrap=True)
    if json_file is not None:
        figures = {**found, "versions": versions, "arguments": arguments}
        write_whole(json_file, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
        console.print(f"written to {json_file}", highlight=False, soft_wrap=True)
    if any(check.mismatches for check in checks.values()):
        raise typer.Exit(1)


def _methods(drafters: list[str], k: int | None) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config: every method without a checkpoint, and the drafters by their
    folders. No text of an earlier repeat is drafted from. ConfigError for a drafter that is given
    twice."""
    from inference.spec_decode.proposers.methods import TRAINING_FREE, method_options

    tokens = {"num_speculative_tokens": k} if k else {}
    methods: dict[str, dict[str, Any]] = {
        name: {"method": name} | method_options(name).measured | tokens for name in TRAINING_FREE
    }
    for drafter in drafters:
        if drafter in methods:
            raise ConfigError(f"--drafter {drafter}: given twice, or the name of a method")
        methods[drafter] = {"model": drafter} | tokens
    return methods
