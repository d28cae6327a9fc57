"""`draftsmith try` by CPU time: speeds of drafting methods over plain decoding on one thread.

    python scripts/cpu_speed.py --model TARGET --drafter EXPORT --prompts FILE --json FILE

A response takes the seconds of this process's CPU time, prefill included, so that other work on the
machine does not count, but for the caches and the bandwidth that it takes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported: CPU time adds up over threads

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference import SamplingParams
from draftsmith.inference.entrypoints.prompts import Prompt, read_prompts
from draftsmith.inference.evaluation.side_by_side import compare_methods
from draftsmith.inference.spec_decode.proposers.methods import method_options
from draftsmith.train.pipeline.evaluate_again import prompts_of_file

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    model: Annotated[str, typer.Option(help="The target: a folder or repository id.")],
    drafter: Annotated[list[str], typer.Option(help="An exported drafter; again for more.")],
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")],
    json: Annotated[Path, typer.Option(help="JSON file to write all figures to.")],
    method: Annotated[
        list[str] | None, typer.Option(help="A method without a checkpoint; again for more.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 10,
    k: Annotated[int, typer.Option("-k", min=1, help="Tokens drafted per round.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest response.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each method.")] = 1,
) -> None:
    """Times plain decoding, drafters and methods, greedy and one request at a time, and prints the
    table of `draftsmith try`. Exit code 1: responses differ by more than a tie."""
    tokens = {"num_speculative_tokens": k}
    methods = {
        name: {"method": name} | method_options(name).measured | tokens for name in method or []
    }
    methods |= {export: {"model": export} | tokens for export in drafter}
    ids = prompts_of_file(model, prompts, num_prompts, max_tokens)

    def prompts_of(tokenizer: Any) -> list[Prompt]:
        return read_prompts([{"prompt_token_ids": prompt} for prompt in ids], tokenizer)

    same = compare_methods(
        model,
        methods,
        prompts_of,
        SamplingParams(temperature=0, max_tokens=max_tokens),
        repeats=repeats,
        title=f"{model}, CPU time",
        saved=json,
        arguments={"drafter": drafter, "method": method, "prompts": prompts, "k": k},
        clock=time.process_time,
        max_num_seqs=1,
    )
    if not same:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
