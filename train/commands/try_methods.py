"""`draftsmith try`: ways of drafting side by side. Torch is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.inference.flags import json_option
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands.options import (
    DraftTokens,
    MaxTokens,
    Model,
    Precision,
    SpeculativeConfig,
    command_of,
)

if TYPE_CHECKING:
    from draftsmith.inference.entrypoints.prompts import Prompt


AUTO = "auto"


@dataclass(frozen=True)
class TryOptions:
    """What `draftsmith try` takes."""

    model: Model
    drafter: Annotated[
        list[str] | None, typer.Option(help="An exported drafter; may be repeated.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of prompts; default: built-in conversations."),
    ] = None
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 8
    num_speculative_tokens: DraftTokens = None
    speculative_config: SpeculativeConfig = ""
    draft_vocab: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Tokens that drafters score; auto: as many as are fastest, by measurement.",
        ),
    ] = ""
    max_tokens: MaxTokens = 128
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; above it, texts are not compared.")
    ] = 0.0
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each method.")] = 3
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Responses at the same time.")] = 1
    dtype: Precision = "auto"
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; default: the accelerator, else cpu.")
    ] = ""
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="JSON file to write all figures to."),
    ] = None


def run(options: TryOptions) -> None:
    """Compare methods of drafting on your model. Drafting off, n-grams, suffixes, lookahead and any
    drafters run side by side on the same prompts: which pays?"""
    from draftsmith.inference.evaluation.side_by_side import compare_methods
    from draftsmith.inference.sampling_params import SamplingParams
    from draftsmith.inference.whole_file import check_writable

    if options.json_file is not None:
        check_writable("--json", options.json_file)
    drafters = options.drafter or []
    further = json_option("--speculative-config", options.speculative_config) or {}
    further |= _vocabulary(options.draft_vocab, drafters, further)
    same = compare_methods(
        options.model,
        _methods(drafters, options.num_speculative_tokens, further),
        _prompts(options),
        SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens),
        repeats=options.repeats,
        title=options.model,
        saved=options.json_file,
        arguments=vars(options),
        choose_vocabulary=drafters if options.draft_vocab == AUTO else (),
        dtype=options.dtype,
        device=options.device or None,
        max_num_seqs=options.max_num_seqs,
    )
    if not same:
        raise typer.Exit(1)


def _prompts(options: TryOptions) -> Callable[[Any], list[Prompt]]:
    """A function from the target's tokenizer to the prompts, of the file or of the built-in
    conversations."""
    from draftsmith.inference.entrypoints.prompts import read_prompts
    from draftsmith.inference.evaluation.demo_prompts import demo_prompts
    from draftsmith.inference.offline import as_prompts

    ids: list[list[int]] = []
    if options.prompts is not None:
        from draftsmith.train.pipeline.evaluate_again import prompts_of_file  # of the extra `train`

        ids = prompts_of_file(
            options.model, options.prompts, options.num_prompts, options.max_tokens
        )

    def prompts_of(tokenizer: Any) -> list[Prompt]:
        if ids:
            return read_prompts([{"prompt_token_ids": prompt} for prompt in ids], tokenizer)
        demo = "chat" if getattr(tokenizer, "chat_template", None) else "en"
        return as_prompts(*demo_prompts(demo), tokenizer, None)[: options.num_prompts]

    return prompts_of


def _vocabulary(asked: str, drafters: list[str], further: Mapping[str, Any]) -> dict[str, int]:
    """The option of speculative_config that `--draft-vocab` stands for; none for AUTO, which is
    known once it is measured. ConfigError: it is neither a number nor that, or there is nothing
    that it could be of."""
    option = f"--draft-vocab {asked}"
    if not asked:
        return {}
    if not drafters:
        raise ConfigError("the vocabulary of a --drafter, and there is none", where=option)
    if further.get("draft_vocab_size") is not None:
        raise ConfigError(
            "--speculative-config has draft_vocab_size, too; expected one of the two", where=option
        )
    if asked == AUTO:
        return {}
    if not asked.isdecimal() or int(asked) < 1:
        raise ConfigError(f"expected a number of tokens, such as 8192, or {AUTO}", where=option)
    return {"draft_vocab_size": int(asked)}


def _methods(
    drafters: list[str], k: int | None, further: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config: every method without a checkpoint, and the drafters by their
    folders, with `further` options. No text of an earlier repeat is drafted from. ConfigError: one
    is given twice, or there are options of drafters and no drafter."""
    from draftsmith.inference.entrypoints.speculative_config import sizes_of
    from draftsmith.inference.spec_decode.proposers.methods import (
        TRAINING_FREE,
        measured_beside,
        method_options,
    )

    if further and not drafters:
        raise ConfigError("options of a --drafter, and there is none", where="--speculative-config")
    tokens = {"num_speculative_tokens": k} if k else {}
    methods: dict[str, dict[str, Any]] = {
        name: {"method": name} | method_options(name).measured | tokens for name in TRAINING_FREE
    }
    for drafter in drafters:
        if drafter in methods:
            raise ConfigError("given twice, or the name of a method", where=f"--drafter {drafter}")
        methods[drafter] = {"model": drafter, **measured_beside(further), **further}
        if k:
            methods[drafter] |= sizes_of(further, k)
    return methods


try_methods = command_of("try", TryOptions, run)
