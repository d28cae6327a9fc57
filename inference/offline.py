"""Prompts of this project with and without drafting, side by side: times, and whether the responses
are the same. `draftsmith try` does the same for more methods and prompts of your own.

    python -m draftsmith.inference.offline --model=TARGET --speculative-model=DRAFTER --demo=chat
    --save-output=results.json

The target is loaded once and writes every response without drafting (`default`), with the drafter
(`speculative`) and with n-grams (`ngram`). Without --speculative-model the first and the last are
run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, Field, FilePath, PositiveInt
from transformers.utils.logging import disable_progress_bar

from draftsmith.inference import flags
from draftsmith.inference.console import run_alone
from draftsmith.inference.engine_options import option
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from draftsmith.inference.entrypoints.vllm_options import NGRAM
from draftsmith.inference.evaluation.demo_prompts import demo_prompts
from draftsmith.inference.evaluation.side_by_side import compare_methods
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.whole_file import check_writable
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS

RESULTS = Path("inference_results_with_speculative.json")  # as the scripts of guides call it


class OfflineOptions(BaseModel):
    """Run built-in prompts with and without drafting, and compare times and texts. Exit code 1:
    texts at temperature 0 differ by more than a tie."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="the model that writes: folder or repository id")
    speculative_model: str = option(
        "", "the drafter: folder or repository id; default: none, and n-grams alone draft"
    )
    num_speculative_tokens: PositiveInt | None = option(
        None,
        "tokens drafted per round; default: what the drafter was made for, of n-grams"
        f" {NUM_SPECULATIVE_TOKENS}",
    )
    ngram_prompt_lookup_max: PositiveInt = option(
        3, "tokens at the end of the text that n-grams look for earlier in it, at most"
    )
    demo: str = option(
        "en", "the prompts: en or te: English; zh or tc: Chinese; chat: conversations"
    )
    template: FilePath | None = option(
        None,
        "file of a chat template, in place of the tokenizer's; the texts of en and zh are then what"
        " a user says",
    )
    max_tokens: PositiveInt = option(128, "most tokens of a response")
    temperature: float = option(0.0, "0 is greedy; above it texts are not compared")
    seed: int = option(0, "of the first response, at temperatures above 0; others count on")
    repeats: PositiveInt = option(3, "timed passes of each method, whose medians count")
    max_num_seqs: PositiveInt = option(1, "responses written at the same time")
    max_model_len: int | None = option(
        None, "most tokens of a prompt and its response together; default: the model's limit"
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, …; default: the accelerator, else cpu")
    dtype: str = option(
        "auto", "precision of the model: float32, bfloat16 or float16; auto: the checkpoint's"
    )
    tensor_parallel_size: int = option(1, "taken from vLLM's commands without effect")
    gpu_memory_utilization: float = option(0.9, "taken from vLLM's commands without effect")
    trust_remote_code: bool = option(False, "run Python code of the model's repository")
    enforce_eager: bool = option(False, "do not compile rounds, whatever the device")
    save_output: Path = option(RESULTS, "JSON file to write")


def register(app: typer.Typer) -> None:
    """Adds `offline` to a command line."""
    flags.register(app, "offline", OfflineOptions, run)


def run(values: flags.Values, _: Sequence[str] = ()) -> None:
    """Compares the methods. Exit code 1: greedy responses differ by more than a tie."""
    options = flags.validated(OfflineOptions, "offline", values)
    if options.save_output.suffix != ".json":
        raise ConfigError("must end in .json", where=f"--save-output {options.save_output}")
    check_writable("--save-output", options.save_output)
    texts, chats = demo_prompts(options.demo)
    disable_progress_bar()
    same = compare_methods(
        options.model,
        _methods(options),
        lambda tokenizer: as_prompts(texts, chats, tokenizer, options.template),
        SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
        ),
        repeats=options.repeats,
        title=options.demo,
        saved=options.save_output,
        arguments=options.model_dump(),
        dtype=options.dtype,
        device=options.device,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        trust_remote_code=options.trust_remote_code,
        enforce_eager=options.enforce_eager or None,
    )
    if not same:
        raise typer.Exit(1)


def _methods(options: OfflineOptions) -> dict[str, dict[str, Any]]:
    """Name of a method -> its speculative_config."""
    methods: dict[str, dict[str, Any]] = {}
    drafter = options.speculative_model
    usual = options.num_speculative_tokens or NUM_SPECULATIVE_TOKENS
    if drafter:
        # a trained drafter's config.json says how many it was made for
        tokens = usual if drafter in NGRAM else options.num_speculative_tokens
        methods["speculative"] = {"model": drafter}
        if tokens:
            methods["speculative"]["num_speculative_tokens"] = tokens
    methods["ngram"] = {
        "method": "ngram",
        "num_speculative_tokens": usual,
        "prompt_lookup_max": options.ngram_prompt_lookup_max,
    }
    return methods


def as_prompts(
    texts: Sequence[str],
    chats: Sequence[Sequence[dict[str, str]]],
    tokenizer: Any,
    template: Path | None,
) -> list[Prompt]:
    """Texts as they are, or as what a user says where a chat template is given; conversations by
    their template."""
    if template is None and not chats:
        return read_prompts(list(texts), tokenizer)
    chats = [*chats, *([{"role": "user", "content": text}] for text in texts)]
    written = None if template is None else template.read_text(encoding="utf-8")
    return chat_prompts(chats, tokenizer, {"add_generation_prompt": True, "chat_template": written})


if __name__ == "__main__":
    run_alone("python -m draftsmith.inference.offline", register)
