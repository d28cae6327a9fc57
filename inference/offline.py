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
from typing import Annotated, Any

import typer
from transformers.utils.logging import disable_progress_bar

from draftsmith.inference.console import supervised, user_errors
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from draftsmith.inference.entrypoints.vllm_options import NGRAM
from draftsmith.inference.evaluation.demo_prompts import demo_prompts
from draftsmith.inference.evaluation.side_by_side import compare_methods
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.whole_file import check_writable
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS

Option = typer.Option
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, Option(help="Target: folder or repository id.")],
    speculative_model: Annotated[
        str, Option(help="Drafter: folder or repository id; none: only ngram.")
    ] = "",
    num_speculative_tokens: Annotated[
        int | None,
        Option(min=1, help="Drafts per round; by default what the drafter was made for, or 5."),
    ] = None,
    ngram_prompt_lookup_max: Annotated[
        int, Option(min=1, help="ngram: longest match looked for.")
    ] = 3,
    demo: Annotated[str, Option(help="The prompts: en (or te), zh (or tc), chat.")] = "en",
    template: Annotated[
        Path | None,
        Option(
            exists=True, help="Chat template instead of the tokenizer's; makes texts a user's turn."
        ),
    ] = None,
    max_tokens: Annotated[int, Option(min=1, help="Longest response.")] = 128,
    temperature: Annotated[float, Option(help="0 is greedy; above, texts are not compared.")] = 0.0,
    seed: Annotated[int, Option(help="Of the first response, at temperatures above 0.")] = 0,
    repeats: Annotated[int, Option(min=1, help="Timed passes of each; medians count.")] = 3,
    max_num_seqs: Annotated[int, Option(min=1, help="Responses at the same time.")] = 1,
    max_model_len: Annotated[int | None, Option(help="Longest prompt and response.")] = None,
    device: Annotated[
        str | None, Option(help="cpu, cuda, ...; default: the accelerator, else cpu.")
    ] = None,
    dtype: Annotated[str, Option(help="Precision of the target; auto: its own.")] = "auto",
    tensor_parallel_size: Annotated[int, Option(help="As in vLLM; one device is used.")] = 1,
    gpu_memory_utilization: Annotated[float, Option(help="As in vLLM.")] = 0.9,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the repository's code.")
    ] = False,
    enforce_eager: Annotated[bool, Option("--enforce-eager", help="As in vLLM.")] = False,
    save_output: Annotated[Path, Option(help="JSON file to write.")] = Path(
        "inference_results_with_speculative.json"
    ),
) -> None:
    """Run the prompts of a demo with and without drafting. Exit code 1: greedy responses differ by
    more than a tie."""
    arguments = dict(locals())
    if save_output.suffix != ".json":
        raise ConfigError("must end in .json", where=f"--save-output {save_output}")
    check_writable("--save-output", save_output)
    texts, chats = demo_prompts(demo)
    disable_progress_bar()
    same = compare_methods(
        model,
        _methods(speculative_model, num_speculative_tokens, ngram_prompt_lookup_max),
        lambda tokenizer: as_prompts(texts, chats, tokenizer, template),
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed),
        repeats=repeats,
        title=demo,
        saved=save_output,
        arguments=arguments,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        enforce_eager=enforce_eager or None,
    )
    if not same:
        raise typer.Exit(1)


def _methods(drafter: str, tokens: int | None, longest_match: int) -> dict[str, dict[str, Any]]:
    """Name of a method -> its speculative_config."""
    methods: dict[str, dict[str, Any]] = {}
    k = tokens or NUM_SPECULATIVE_TOKENS
    if drafter:
        drafts = k if drafter in NGRAM else tokens  # of a trained one its config.json says it
        methods["speculative"] = {"model": drafter}
        if drafts:
            methods["speculative"]["num_speculative_tokens"] = drafts
    methods["ngram"] = {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_max": longest_match,
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
    with user_errors(), supervised("offline"):
        app()
