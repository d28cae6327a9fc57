"""`draftsmith init`: a commented recipe that fits a model and its data.

Lengths come from the data and the target's tokenizer, taps and the draft vocabulary from its
config, the thinking mode from its chat template, and the way to write responses from an estimate
of their time. Torch is imported when it runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands.options import Model

if TYPE_CHECKING:
    from draftsmith.speculators.config import DrafterConfig
    from draftsmith.train.data.sources import Example
    from draftsmith.train.recipe.recipe import Recipe

SAMPLE = 500  # conversations that are tokenised
QUANTILE = 0.95  # of their lengths
THINKING_TOKENS = 4096  # least length of a response that begins with thoughts
ANSWER_TOKENS = 256  # of one that does not
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 200  # conversations, where no validation file is given
LAYERS = 4  # of the target, that a draft model starts as
HOUR = 3600.0  # seconds of writing in this process; beyond it servers write the responses


@dataclass
class Lengths:
    """Tokens of the data's conversations, at QUANTILE. response: 0 if the data has none; longest:
    positions that the target was made for."""

    prompt: int
    response: int
    longest: int
    thinking: bool | None  # None: the chat template has no such mode

    @property
    def max_new_tokens(self) -> int:
        least = THINKING_TOKENS if self.thinking else ANSWER_TOKENS
        return min(_round_up(max(self.response, least), 64), max(self.longest - self.prompt, 64))

    @property
    def max_length(self) -> int:
        return min(_round_up(self.prompt + self.max_new_tokens, 128), self.longest)


def init(
    model: Model,
    data: Annotated[Path, typer.Option(help="Conversations to train on, such as chats.jsonl.")],
    validation: Annotated[
        Path | None, typer.Option(help="Held-out conversations; default: a twentieth of --data.")
    ] = None,
    family: Annotated[str, typer.Option(help="Family of the drafter.")] = "eagle3",
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Whether a model that can think before it answers will be served so. Default: it"
            " asks on a terminal; elsewhere no.",
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Device that will write the responses.")] = "h100",
    out: Annotated[Path, typer.Option(help="Recipe to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a commented recipe for a model and your conversations."""
    from draftsmith.speculators.registry import family_class
    from draftsmith.train.data.packing import knows_thinking
    from draftsmith.train.data.sources import load_sources
    from draftsmith.train.planner.devices import find_device
    from draftsmith.train.planner.plan import make_plan
    from draftsmith.train.recipe.load import load_recipe
    from draftsmith.train.recipe.recipe import recipe_class

    if out.exists():
        raise ConfigError("the file exists; name another, or delete it", where=f"--out {out}")
    device, console = find_device(gpu), Console(highlight=False, soft_wrap=True)
    name = f"{Path(model.rstrip('/')).name.partition('@')[0].lower()}-{family}"
    tree: dict[str, Any] = {
        "name": name,
        "family": family,
        "target": {"model": model},
        "data": {"train": [{"path": str(data)}]},
    }
    if "from_target" in family_class(family).options.model_fields:
        tree["drafter"] = {"from_target": {"spread": LAYERS}}
    recipe = recipe_class(family).model_validate(tree)
    examples = load_sources(recipe.data.train)
    if knows_thinking(recipe.target.load_tokenizer()):
        tree["data"]["chat_template_kwargs"] = {"enable_thinking": _choose(thinking, console)}
    recipe = recipe_class(family).model_validate(tree)
    lengths = _measure(recipe, examples)
    tree["data"] |= _sources(data, validation, len(examples)) | {"max_length": lengths.max_length}
    tree["regenerate"] = {"max_new_tokens": lengths.max_new_tokens}
    stage = make_plan(recipe_class(family).model_validate(tree), device).stages[0]
    writing = [p.seconds(device, 1) for p in stage.phases if p.name.startswith("responses")]
    text = _text(tree, lengths, stage.drafter, sum(writing), gpu, len(examples))
    out.write_text(text, encoding="utf-8")
    load_recipe(out)
    console.print(f"{out}: {len(examples):,} conversations for {model}")
    console.print(f"  draftsmith prepare {out}            # the data as the drafter sees it")
    console.print(f"  draftsmith train {out} --dry-run    # shapes, tokens, memory")
    console.print(f"  draftsmith train {out}")


def _choose(thinking: bool | None, console: Console) -> bool:
    """The thinking mode to train for and serve, asked on a terminal."""
    if thinking is None:
        thinking = console.is_terminal and typer.confirm(
            "This model can think before it answers. Will you serve it so?", default=False
        )
    console.print(f"thinking mode: {'on' if thinking else 'off'}; serve the model in the same mode")
    return thinking


def _sources(data: Path, validation: Path | None, examples: int) -> dict[str, Any]:
    """The sources of a data section; the first part of the data is held out if it is not given."""
    if validation is not None:
        return {"train": [{"path": str(data)}], "validation": [{"path": str(validation)}]}
    held_out = max(min(round(HELD_OUT_SHARE * examples), MOST_HELD_OUT), 1)
    return {
        "train": [{"path": str(data), "split": f"train[{held_out}:]"}],
        "validation": [{"path": str(data), "split": f"train[:{held_out}]"}],
    }


def _measure(recipe: Recipe, examples: Sequence[Example]) -> Lengths:
    """ConfigError if no conversation of the data can be rendered."""
    from draftsmith.train.data.bad_rows import BadRow
    from draftsmith.train.data.packing import conversation_tokenizer

    tokenizer = conversation_tokenizer(recipe.data, recipe.target.load_tokenizer())
    prompts, responses = list[int](), list[int]()
    for example in examples[:: max(len(examples) // SAMPLE, 1)]:
        try:
            prompts.append(len(tokenizer.prompt_ids(example)))
            responses += [len(row) - prompts[-1] for row in tokenizer.rows(example)[-1:]]
        except BadRow:
            continue  # a run lists it, or has the target write its response
    if not prompts:
        raise ConfigError("no row can be rendered; `draftsmith prepare` says why", where="--data")
    config = recipe.target.sketch().config
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    thinking = recipe.data.chat_template_kwargs.get("enable_thinking")
    return Lengths(_quantile(prompts), _quantile(responses), longest, thinking)


def _quantile(lengths: Sequence[int]) -> int:
    ordered = sorted(lengths)
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else 0


def _round_up(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit


def _text(
    tree: dict[str, Any],
    lengths: Lengths,
    config: DrafterConfig,
    seconds: float,
    gpu: str,
    examples: int,
) -> str:
    """The recipe. seconds: what writing all responses in one process would take on `gpu`."""
    from draftsmith.train.planner.describe import duration
    from draftsmith.train.recipe.recipe import yaml_line

    data, model = tree["data"], tree["target"]["model"]
    prompts = f"{QUANTILE:.0%} of the prompts have up to {lengths.prompt:,} tokens"
    responses = f"{QUANTILE:.0%} of the data's own have up to {lengths.response:,} tokens"
    if not lengths.response:
        responses = "the data has no responses to go by"
    mode = learning_rate = ""
    if lengths.thinking is not None:
        kwargs = json.dumps(data["chat_template_kwargs"])
        mode = f"  chat_template_kwargs: {kwargs} # serve the model in the same mode\n"
    if "from_target" in tree.get("drafter", {}):
        learning_rate = (
            "  learning_rate: 1.0e-3 # layers cut out of the target have much to learn\n"
        )
    return f"""\
# Written by `draftsmith init` from {examples:,} conversations.
name: {tree["name"]} # its folder is runs/{tree["name"]}
family: {tree["family"]}
target: {yaml_line({"model": model})}
{_drafter(config, tree.get("drafter", {}))}data:
  train: {yaml_line(data["train"])}
  validation: {yaml_line(data["validation"])}
  max_length: {lengths.max_length} # {prompts}
{mode}regenerate: # the target answers every prompt anew
  max_new_tokens: {lengths.max_new_tokens} # {responses}
  temperatures: {{0.0: 0.5, 1.0: 0.5}} # those of serving, and their shares
  # In this process {duration(max(seconds, 1.0))} on one {gpu}, by `draftsmith plan`.
  # Servers write faster: vllm serve {model} --port 8000 --max-model-len {lengths.max_length}
  {"" if seconds > HOUR else "# "}endpoints: [{{url: http://localhost:8000/v1}}]
training:
  epochs: 3
{learning_rate}evaluation:
  temperatures: [0.0, 1.0]
gates:
  lossless_mismatches: {{max: 0}}
"""


def _drafter(config: DrafterConfig, start: Mapping[str, Any]) -> str:
    """The drafter's section: `start`, and what the model gives by default, written out."""
    lines = [f"  {key}: {json.dumps(value)} # its start\n" for key, value in start.items()]
    if config.tap_layers:
        lines.append(f"  tap_layers: {list(config.tap_layers)} # hidden states that are read\n")
    if (size := config.draft_vocab_size) < config.vocab_size:
        most_frequent = f"most frequent tokens, of {config.vocab_size:,}"
        lines.append(f"  draft_vocab_size: {size} # {most_frequent}\n")
    return "".join(
        ["drafter: # its other keys: draftsmith schema drafter\n", *lines] if lines else []
    )
