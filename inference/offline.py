"""Prompts of this project with and without drafting, side by side: times, and whether the responses
are the same. `draftsmith try` does the same for more methods and prompts of your own.

    python -m inference.offline --model=TARGET --speculative-model=DRAFTER --demo=chat
    --save-output=results.json

The target is loaded once and writes every response without drafting (`default`), with the drafter
(`speculative`) and with n-grams (`ngram`). Without --speculative-model the first and the last are
run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from inference.console import run
from inference.entrypoints.prompts import Prompt, chat_prompts, read_prompts
from inference.entrypoints.speculative_defaults import NUM_SPECULATIVE_TOKENS
from inference.entrypoints.vllm_options import NGRAM
from inference.evaluation.demo_prompts import demo_prompts
from inference.evaluation.side_by_side import (
    DEFAULT,
    SideBySide,
    remarks,
    results,
    results_table,
)
from inference.provenance import environment
from inference.sampling_params import SamplingParams
from inference.whole_file import check_writable, write_whole
from speculators.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Target: folder or repository id.")],
    speculative_model: Annotated[
        str, typer.Option(help="Drafter: folder or repository id; none: only ngram.")
    ] = "",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Drafts per round; by default what the drafter was made for, or 5."
        ),
    ] = None,
    ngram_prompt_lookup_max: Annotated[
        int, typer.Option(min=1, help="ngram: longest match looked for.")
    ] = 3,
    demo: Annotated[str, typer.Option(help="The prompts: en (or te), zh (or tc), chat.")] = "en",
    template: Annotated[
        Path | None,
        typer.Option(
            help="Chat template to use instead of the tokenizer's; makes texts a user's turn."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above it, responses are not compared.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the first prompt's response, at temperatures above 0.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each; medians count.")] = 3,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Responses written at the same time.")
    ] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and response.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; cuda if there is one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the target; auto: its own.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="As in vLLM; one device is used.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="As in vLLM.")] = 0.9,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the repository's code.")
    ] = False,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="As in vLLM.")] = False,
    save_output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path(
        "inference_results_with_speculative.json"
    ),
) -> None:
    """Run the prompts of a demo with and without drafting. Exit code 1: greedy responses differ by
    more than a tie."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value for name, value in locals().items()
    }
    if save_output.suffix != ".json":
        raise ConfigError(
            f"--save-output {save_output}: a JSON file is written; give a name that ends in .json"
        )
    check_writable("--save-output", save_output)
    texts, chats = demo_prompts(demo)
    disable_progress_bar()
    runtimes = SideBySide(
        model,
        _methods(speculative_model, num_speculative_tokens, ngram_prompt_lookup_max),
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        enforce_eager=enforce_eager or None,
    )
    prompts = as_prompts(texts, chats, runtimes.llms[DEFAULT].get_tokenizer(), template)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    console = Console()
    with console.status("loading") as status:
        measured = runtimes.run(prompts, params, repeats, lambda text, _: status.update(text))
        drafting = [name for name in measured if name != DEFAULT and params.greedy]
        checks = {name: runtimes.compare(prompts, measured, name) for name in drafting}
    found = results(measured, checks)
    versions = environment(runtimes.target.device, runtimes.target.dtype)
    title = (
        f"{demo}: {len(prompts)} prompts, T={temperature:g}, {versions['dtype']},"
        f" {versions['device']}"
    )
    console.print(results_table(title, found))
    for line in remarks(found, checks, runtimes.llms[DEFAULT].get_tokenizer()):
        console.print(line, highlight=False, soft_wrap=True)
    text = json.dumps(
        {**found, "versions": versions, "arguments": arguments}, indent=2, ensure_ascii=False
    )
    write_whole(save_output, text + "\n")
    console.print(f"written to {save_output}", highlight=False, soft_wrap=True)
    if any(check.mismatches for check in checks.values()):
        raise typer.Exit(1)


def _methods(drafter: str, tokens: int | None, longest_match: int) -> dict[str, dict[str, Any]]:
    """Name of a way that drafts -> its speculative_config."""
    methods: dict[str, dict[str, Any]] = {}
    k = tokens or NUM_SPECULATIVE_TOKENS
    if drafter:
        given = k if drafter in NGRAM else tokens  # of a trained one its config.json says it
        methods["speculative"] = {"model": drafter} | (
            {"num_speculative_tokens": given} if given else {}
        )
    return methods | {
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_max": longest_match,
        }
    }


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
    try:
        written = None if template is None else template.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--template {template}: could not be read: {error.strerror}") from error
    if written is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "--demo chat: the tokenizer has no chat template; give one with --template FILE"
        )
    return chat_prompts(chats, tokenizer, {"add_generation_prompt": True, "chat_template": written})


if __name__ == "__main__":
    run(app)
