"""Speeds of drafting methods over plain decoding on one thread, prompt by prompt in turn.

    python scripts/turns.py --model TARGET --drafter EXPORT --prompts FILE --json FILE

A pass of `draftsmith try` is all prompts of a method, minutes from the pass that it is compared
with. Here all methods answer a prompt before any answers the next, and every prompt begins with
another one, so that a machine whose speed changes changes that of all. A speed is tokens over
seconds of this process's CPU time, prefill included, so that other work on the machine does not
count, but for the caches and the bandwidth that it takes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported: CPU time adds up over threads

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference import SamplingParams
from draftsmith.inference.evaluation.side_by_side import DEFAULT, WARM_UP_TOKENS, SideBySide
from draftsmith.inference.spec_decode.proposers.methods import method_options
from draftsmith.train.pipeline.evaluate_again import prompts_of_file
from scripts.measuring import save_json


@dataclass
class Answers:
    """What a method wrote, and the CPU seconds that each response took."""

    texts: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second over all responses."""
        return sum(map(len, self.texts)) / sum(self.seconds)


def answer(
    engines: SideBySide, prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Answers]:
    """All prompts, by every method in turn, after a few tokens that warm it up."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for llm in engines.llms.values():
        llm.warm_up(longest=max(map(len, prompts)) + max_tokens)
        few = replace(params, max_tokens=min(WARM_UP_TOKENS, max_tokens))
        llm.generate([{"prompt_token_ids": prompts[0]}], few, use_tqdm=False)
    names = list(engines.llms)
    answers = {name: Answers() for name in names}
    for number, prompt in enumerate(prompts):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.process_time()
            output = engines.llms[name].generate(
                [{"prompt_token_ids": prompt}], params, use_tqdm=False
            )[0]
            answers[name].seconds.append(time.process_time() - started)
            answers[name].texts.append(list(output.outputs[0].token_ids))
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return answers


def results(answers: dict[str, Answers]) -> dict[str, Any]:
    """By method: the speedup, whether all texts are those of plain decoding, and what it is of."""
    plain = answers[DEFAULT]
    return {
        name: {
            "metrics": {"speedup_vs_autoregressive": {"value": one.rate / plain.rate}},
            "same": one.texts == plain.texts,
            "tokens": [len(text) for text in one.texts],
            "seconds": one.seconds,
        }
        for name, one in answers.items()
    }


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
) -> None:
    """Times plain decoding, drafters and methods, greedy and one request at a time, prints the
    speedup of each, and says where a text is not that of plain decoding: by a tie of the two best
    tokens or by a mismatch, which `draftsmith evaluate` tells apart."""
    tokens = {"num_speculative_tokens": k}
    methods = {
        name: {"method": name} | method_options(name).measured | tokens for name in method or []
    }
    methods |= {export: {"model": export} | tokens for export in drafter}
    ids = prompts_of_file(model, prompts, num_prompts, max_tokens)
    engines = SideBySide(model, methods, max_num_seqs=1)
    timed = results(answer(engines, ids, max_tokens))
    for name, one in timed.items():
        speedup = one["metrics"]["speedup_vs_autoregressive"]["value"]
        print(f"{name}: {speedup:.2f}{'' if one['same'] else ', with other texts'}")
    save_json(json, timed)


if __name__ == "__main__":
    app()
