"""`draftsmith init`: a commented recipe that fits a model, its data and the device.

Lengths come from the data and the target's tokenizer, taps and the draft vocabulary from its
config, the thinking mode from its chat template, and the way to write responses from an estimate
of their time. On a CPU the sizes and the budget are what a core can do. Torch is imported when it
runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.progress import Stages, counted
from draftsmith.inference.whole_file import check_writable, write_whole
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.speculators.traits import SHORT_TRAINING
from draftsmith.train.commands.options import Gpu, Model

if TYPE_CHECKING:
    from draftsmith.train.commands.new_recipe import NewRecipe
    from draftsmith.train.data.bad_rows import BadRows
    from draftsmith.train.data.examples import Example
    from draftsmith.train.data.loss_mask import ConversationTokenizer
    from draftsmith.train.planner.devices import Device
    from draftsmith.train.planner.plan import StagePlan
    from draftsmith.train.recipe.recipe import Recipe

SAMPLE = 500  # conversations that are tokenised
QUANTILE = 0.95  # of their lengths
THINKING_TOKENS = 4096  # least length of a response that begins with thoughts
ANSWER_TOKENS = 256  # of one that does not
# Conversations that are held out where no validation file is given.
HELD_OUT_SHARE = 0.05
MOST_HELD_OUT = 200
LAYERS = 4  # of the target, that a draft model starts as
# Seconds of writing in this process. Beyond it servers write the responses, and where there is no
# GPU fewer conversations are trained on.
HOUR = 3600.0
SERVER = "http://localhost:8000/v1"
SHARE_STEP = 0.05  # to which a large share of bad rows is rounded up

# What a core can do: about the sizes of recipes/smollm2-135m-instruct.
CPU_LENGTH = 1024  # tokens of a row
# Tokens of a response, where the model does not think: fewer the more conversations there are, so
# that all of them are written in minutes.
CPU_RESPONSE = 256
CPU_LEAST_RESPONSE = 128
CPU_WRITTEN = 100_000
CPU_LEAST_CONVERSATIONS = 100  # that are trained on, however long they take
CPU_STEP = 1024  # tokens of a step: on few conversations many small steps learn more
CPU_KEPT_SHARE = 0.25  # of the memory, that features are kept in at most
CPU_VOCABULARY = 8192  # tokens that are drafted
# Families that draft all tokens by default, which costs a core more than such drafts gain; vLLM or
# this runtime serves a part as well.
CPU_REDUCED = ("draft_model", "dspark", "medusa", "mlp")
# Option of a family -> depths; the first of these that the family has. A block has a slot more.
CPU_DEPTHS = {"block_size": 5, "num_depths": 4, "n_predict": 4, "num_heads": 4, "unroll_steps": 4}
FITTED = ("least_squares", "a fitted start, for trainings of minutes")
FITTED_RATES: dict[str, tuple[Any, str]] = {
    "training.muon_learning_rate": (0.005, "the usual 0.02 undoes some of a fitted start"),
    "training.learning_rate": (4e-4, "of what Muon does not step; the usual is 1.5e-3"),
    "training.warmup_ratio": (0.1, "behind the fit"),
}
# Of a family: key of the recipe -> value and comment (docs/training.md says what they gain).
CPU_START: dict[str, dict[str, tuple[Any, str]]] = {
    "eagle3": {
        "drafter.init": FITTED,
        "drafter.unroll_steps": (
            2,
            "in minutes, more steps teach more than as many depths as are drafted",
        ),
        "drafter.norm_before_residual": (
            True,
            "it needs this; SGLang serves no such head, vLLM does",
        ),
        **FITTED_RATES,
    },
    "dspark": {
        "drafter.init": FITTED,
        "drafter.num_layers": (1, "in minutes, more steps teach more than more layers"),
        "loss.forward_kl": (1.0, "in minutes it teaches more than the published mix"),
        **FITTED_RATES,
    },
}
CPU_PROMPTS = 8  # of each workload, that are measured
CPU_STEPS = 100  # that the budget holds, by an estimate that may be wrong by two
CPU_MINUTES = 20  # of the budget at least
CPU_EPOCHS = 40  # of the budget at most: of few conversations, after which they are known by heart


@dataclass
class Lengths:
    """How long the conversations are, in tokens, and what bounds a row. Lengths of prompts and
    responses are those that QUANTILE of them do not exceed."""

    prompt: int
    response: int  # 0: the data has none
    longest: int  # positions that the target was made for
    thinking: bool | None  # None: the chat template has no such mode
    on_cpu: bool  # the limits of a core hold
    conversations: int

    @property
    def limit(self) -> int:
        """The longest row."""
        return min(self.longest, CPU_LENGTH) if self.on_cpu else self.longest

    @property
    def max_new_tokens(self) -> int:
        """Tokens of a response at most: as many as the data's have, or as its kind needs."""
        least = THINKING_TOKENS if self.thinking else ANSWER_TOKENS
        room = max(self.limit - self.prompt, self.limit // 8)
        length = min(_round_up(max(self.response, least), 64), room)
        if self.thinking or not self.on_cpu:
            return length
        tokens = _round_up(CPU_WRITTEN / self.conversations, 64)
        return min(length, max(min(tokens, CPU_RESPONSE), CPU_LEAST_RESPONSE))

    @property
    def max_length(self) -> int:
        """Tokens of a row: a prompt and its response, in units of 128, within `limit`."""
        return min(_round_up(self.prompt + self.max_new_tokens, 128), self.limit)


@dataclass
class ExamplesRead:
    """The conversations of --data that can be used."""

    examples: list[Example]
    # Of each example the number of rows up to it, bad ones included: how the slice of a split,
    # `train[20:]`, counts them.
    rows: list[int]
    bad: BadRows


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
    gpu: Gpu = None,
    out: Annotated[Path, typer.Option(help="Recipe to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe for a model and your conversations. Its comments say what was chosen and why;
    conversations that cannot be used are left out."""
    from draftsmith.train.commands.new_recipe import NewRecipe
    from draftsmith.train.planner.devices import find_device, this_machine
    from draftsmith.train.recipe.load import load_recipe

    if out.exists():
        raise ConfigError("the file exists; name another, or delete it", where=f"--out {out}")
    check_writable("--out", out)
    device = this_machine() if gpu is None else find_device(gpu)
    console = Console(highlight=False, soft_wrap=True)
    new = NewRecipe(model, family)
    read = _begin(new, data, validation)
    _fill_thinking(new, thinking, console)
    stages = Stages(console=Console(stderr=True))
    with stages.stage("tokenise the conversations"):
        lengths = _fill_data(new, read, validation, device)
    with stages.stage("plan the training"):
        stage = _fill_training(new, lengths, device)
    _fill_writing(new, lengths, stage, device)
    write_whole(out, new.yaml())
    load_recipe(out)
    _say(console, out, read, stage, device)


def _begin(new: NewRecipe, data: Path, validation: Path | None) -> ExamplesRead:
    """Puts what no conversation changes, and reads them once the target is known to be there."""
    from draftsmith.speculators.registry import family_class

    new.put("data.train", [{"path": str(data)}])
    new.put("data.on_bad_row", "drop")
    if "from_target" in family_class(new.tree["family"]).options.model_fields:
        new.put("drafter.from_target", {"spread": LAYERS}, "its start")
        _fill_start_of_layers(new)
    recipe = new.checked()
    recipe.target.sketch()  # a model that is not there is refused before the data is read
    return _read(recipe, data, validation)


def _fill_start_of_layers(new: NewRecipe) -> None:
    """Puts the rates of a head, in place of those that go on gently with a trained model: layers
    cut out of the target have much to learn."""
    for name, value in SHORT_TRAINING.items():
        new.put(f"training.{name}", value)
    comment = "layers cut out of the target have much to learn, and learn it faster by Muon"
    new.comments["training.optimizer"] = comment


def _fill_thinking(new: NewRecipe, thinking: bool | None, console: Console) -> None:
    """Puts the thinking mode of a model that has one."""
    from draftsmith.train.data.packing import knows_thinking

    recipe = new.checked()
    if knows_thinking(recipe.target.load_tokenizer()):
        mode = {"enable_thinking": _choose(thinking, console)}
        new.put("data.chat_template_kwargs", mode, "serve the model in the same mode")


def _choose(thinking: bool | None, console: Console) -> bool:
    """The thinking mode to train for and serve, asked on a terminal."""
    if thinking is None:
        thinking = console.is_terminal and typer.confirm(
            "This model can think before it answers. Will you serve it so?", default=False
        )
    console.print(f"thinking mode: {'on' if thinking else 'off'}; serve the model in the same mode")
    return thinking


def _read(recipe: Recipe, data: Path, validation: Path | None) -> ExamplesRead:
    """DataError if too little can be used. Bad rows are listed in the folder of the run."""
    from draftsmith.train.data.bad_rows import BadRows
    from draftsmith.train.data.prepare import bad_rows
    from draftsmith.train.data.sources import errors_of_option, load_source
    from draftsmith.train.recipe.data_sections import Source

    bad = bad_rows(recipe.data, Path(recipe.output_dir))
    read = ExamplesRead([], [], bad)
    with errors_of_option("--data", data):
        for example in load_source(recipe.data.train[0], bad=bad):
            read.examples.append(example)
            read.rows.append(bad.read)
    least = 1 if validation else 2
    if len(read.examples) < least:
        usable = counted(len(read.examples), "usable conversation")
        what = f"{usable}, and {least} are needed"
        advice = "" if validation else ", as one is held out (--validation names others)"
        raise DataError(f"{what}{advice}. {bad}".strip(), where=f"--data {data}")
    if validation is not None:
        unusable = BadRows()
        with errors_of_option("--validation", validation):
            first = next(load_source(Source(path=str(validation)), bad=unusable), None)
        if first is None:
            raise DataError(f"no conversation. {unusable}", where=f"--validation {validation}")
    return read


def _fill_data(
    new: NewRecipe, read: ExamplesRead, validation: Path | None, device: Device | None
) -> Lengths:
    """Puts what the conversations say."""
    from draftsmith.train.data.packing import conversation_tokenizer

    recipe = new.checked()
    tokenizer = conversation_tokenizer(recipe.data, recipe.target.load_tokenizer())
    on_cpu = device is not None and device.kind == "cpu"
    lengths = _measure(recipe, read, tokenizer, on_cpu)
    path = recipe.data.train[0].path
    if validation is None:
        rows = _held_out_rows(read, tokenizer, lengths)
        new.put("data.train", [{"path": path, "split": f"train[{rows}:]"}])
        new.put("data.validation", [{"path": path, "split": f"train[:{rows}]"}])
    else:
        new.put("data.validation", [{"path": str(validation)}])
    new.put("evaluation.temperatures", [0.0, 1.0])
    new.put("gates.lossless_mismatches", {"max": 0})
    comment = f"{QUANTILE:.0%} of the prompts have up to {lengths.prompt:,} tokens"
    new.put("data.max_length", lengths.max_length, comment)
    new.above["name"] = f"Written by `draftsmith init` from {len(read.examples):,} conversations."
    bad = read.bad
    counts = f"{len(bad.reasons):,} of {bad.read:,} rows cannot be used"
    new.put("data.on_bad_row", "drop", counts)
    if bad.share > recipe.data.max_bad_row_share / 2:  # a part of the data may have more of them
        share = min(math.ceil(2 * bad.share / SHARE_STEP) * SHARE_STEP, 1.0)
        new.put("data.max_bad_row_share", round(share, 2), f"look at {bad.path} first")
    return lengths


def _measure(
    recipe: Recipe, read: ExamplesRead, tokenizer: ConversationTokenizer, on_cpu: bool
) -> Lengths:
    """DataError if no conversation of the data makes a prompt."""
    from draftsmith.train.data.bad_rows import BadRow
    from draftsmith.train.data.examples import without_weights

    prompts = list[int]()
    responses = list[int]()
    for example in read.examples[:: max(len(read.examples) // SAMPLE, 1)]:
        try:
            prompts.append(len(tokenizer.prompt_ids(example)))
        except BadRow as error:
            read.bad.refuse(error)
            continue
        with suppress(BadRow):  # the target writes its response
            responses.append(len(tokenizer.rows(without_weights(example))[-1]) - prompts[-1])
    if not prompts:
        raise DataError(f"no conversation makes a prompt. {read.bad}", where="--data")
    config = recipe.target.sketch().config
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    thinking = recipe.data.chat_template_kwargs.get("enable_thinking")
    count = len(read.examples)
    return Lengths(_quantile(prompts), _quantile(responses), longest, thinking, on_cpu, count)


def _held_out_rows(read: ExamplesRead, tokenizer: ConversationTokenizer, lengths: Lengths) -> int:
    """The rows to hold out, from the first on: HELD_OUT_SHARE of the conversations, counted by
    those that leave room for a response. DataError if the first half has none."""
    from draftsmith.train.data.bad_rows import BadRow

    examples = read.examples
    room = lengths.max_length - lengths.max_new_tokens
    count = max(min(round(HELD_OUT_SHARE * len(examples)), MOST_HELD_OUT), 1)
    rows = list[int]()
    for example, row in zip(examples[: len(examples) // 2], read.rows, strict=False):
        with suppress(BadRow):
            if len(tokenizer.prompt_ids(example)) <= room:
                rows.append(row)
        if len(rows) == count:
            break
    if not rows:
        what = f"no prompt of the first half has {room} tokens or fewer, to be held out"
        raise DataError(f"{what}; give --validation", where="--data")
    return rows[-1]


def _quantile(lengths: Sequence[int]) -> int:
    ordered = sorted(lengths)
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else 0


def _round_up(value: float, unit: int) -> int:
    return math.ceil(value / unit) * unit


def _fill_training(new: NewRecipe, lengths: Lengths, device: Device | None) -> StagePlan:
    """Puts the drafter and the budget, on a CPU those of a core."""
    from draftsmith.train.planner.plan import make_plan

    new.put("regenerate.max_new_tokens", lengths.max_new_tokens, _response_comment(lengths))
    new.tree["training"] = {"epochs": 3, **new.tree["training"]}
    if lengths.on_cpu:
        _fit_cpu(new)
    stage = make_plan(new.checked(), device).stages[0]
    if lengths.on_cpu and device is not None:
        if limit := _most_conversations(stage, device):
            _limit_conversations(new, limit, stage, device)
            stage = make_plan(new.checked(), device).stages[0]
        stage = _fill_budget(new, stage, device)
    config = stage.drafter
    if config.tap_layers:
        taps = list(config.tap_layers)
        new.put("drafter.tap_layers", taps, "hidden states that are read")
    if config.draft_vocab_size < config.vocab_size:
        comment = f"most frequent tokens, of {config.vocab_size:,}"
        new.put("drafter.draft_vocab_size", config.draft_vocab_size, comment)
    if new.tree["drafter"]:
        new.comments["drafter"] = "its other keys: draftsmith schema drafter"
    return stage


def _fill_budget(new: NewRecipe, stage: StagePlan, device: Device) -> StagePlan:
    """Puts what a core keeps of the target's states, and its minutes. What is put changes what the
    plan says next: kept states the seconds of a step, these the minutes, and the minutes the
    steps."""
    _keep_features(new, stage, device)
    stage = _planned_again(new, stage)
    seconds = stage.fitting_seconds(device) + CPU_STEPS * stage.step_seconds(device)
    minutes = max(_round_up(seconds / 60, 5), CPU_MINUTES)
    new.put("training.epochs", CPU_EPOCHS, "or max_minutes, whichever comes first")
    new.put("training.max_minutes", minutes)
    stage = _planned_again(new, stage)
    comment = f"about {_steps(stage, device):,.0f} steps here, by draftsmith plan"
    new.put("training.max_minutes", minutes, comment)
    return stage


def _most_conversations(stage: StagePlan, device: Device) -> int | None:
    """How many an hour of writing answers; None if that is all of them."""
    seconds = stage.writing_seconds(device)
    conversations = sum(source.examples or 0 for source in stage.sources)
    within = max(int(conversations * HOUR / max(seconds, HOUR)), CPU_LEAST_CONVERSATIONS)
    return within if within < conversations else None


def _limit_conversations(new: NewRecipe, limit: int, stage: StagePlan, device: Device) -> None:
    """Puts the number of conversations that are trained on."""
    from draftsmith.train.planner.describe import duration

    (source,) = new.tree["data"]["train"]
    new.put("data.train", [{**source, "limit": limit}])
    took = duration(stage.writing_seconds(device))
    new.above["data.train"] = f"limit: without it, writing the responses takes {took} here."


def _planned_again(new: NewRecipe, stage: StagePlan) -> StagePlan:
    """The first stage of the recipe as it is now. Its data is what `stage` has counted."""
    from draftsmith.train.planner.plan import make_stage

    name, part = new.checked().training_stages()[0]
    return make_stage(part, stage.sources, stage.device, stage.count, name)


def _steps(stage: StagePlan, device: Device) -> float:
    """Optimizer steps until the first end of the budget; infinite if nothing bounds them."""
    return min(stage.steps or math.inf, stage.steps_within_minutes(device))


def _fit_cpu(new: NewRecipe) -> None:
    """Puts the sizes that a core can train."""
    from draftsmith.speculators.config import default_tap_layers
    from draftsmith.train.recipe.drafter_config import drafter_config

    recipe = new.checked()
    options = type(recipe.drafter).model_fields
    key = next(key for key in CPU_DEPTHS if key in options)
    if options[key].default > CPU_DEPTHS[key]:
        new.put(f"drafter.{key}", CPU_DEPTHS[key], "as many as a core trains in reasonable time")
    for key, (value, comment) in CPU_START.get(recipe.family, {}).items():
        new.put(key, value, comment)
    sketch = recipe.target.sketch()
    if recipe.family == "dspark":  # which reads as many states as it has layers
        new.put("drafter.tap_layers", default_tap_layers(sketch.num_layers))
    config = drafter_config(recipe, sketch, planning=True)
    reduced = config.reduced_vocabulary or recipe.family in CPU_REDUCED
    if reduced and config.draft_vocab_size > CPU_VOCABULARY:
        new.put("drafter.draft_vocab_size", CPU_VOCABULARY)
    rows = max(CPU_STEP // recipe.data.max_length, 1)
    new.put("training.batch_size", rows, "rows of a step")
    comment = "each answer of a conversation: more to learn from a row than the last alone"
    new.put("regenerate.turns", "all", comment)
    new.put("evaluation.prompts_per_workload", CPU_PROMPTS)
    new.above["name"] += (
        "\nWithout a GPU: rows, depths, draft vocabulary, lengths and minutes are those of a core."
    )


def _keep_features(new: NewRecipe, stage: StagePlan, device: Device) -> None:
    """Puts the memory for the target's hidden states of all rows, as far as there is enough."""
    if not stage.tokens:
        return
    needed = stage.feature_bytes * stage.tokens / 2**30
    kept = min(math.ceil(10 * needed) / 10, CPU_KEPT_SHARE * device.memory / 2**30)
    comment = "hidden states in memory: the target runs in the first epoch only"
    new.put("training.keep_features_gb", round(kept, 1), comment)


def _response_comment(lengths: Lengths) -> str:
    if not lengths.response:
        return "the data has no responses to go by"
    return f"{QUANTILE:.0%} of the data's own have up to {lengths.response:,} tokens"


def _fill_writing(
    new: NewRecipe, lengths: Lengths, stage: StagePlan, device: Device | None
) -> None:
    """Puts how responses are written: by servers, where this process would take long."""
    from draftsmith.train.planner.describe import duration

    model = new.tree["target"]["model"]
    lines: list[str] = []
    key = "regenerate.temperatures"
    seconds = 0.0 if device is None else stage.writing_seconds(device)
    if device is not None:
        took = duration(max(seconds, 1.0))
        lines.append(f"In this process {took} on {device.name}, by draftsmith plan.")
    serve = f"vllm serve {shlex.quote(model)} --port 8000 --max-model-len {lengths.max_length}"
    lines.append(f"Servers write faster: {serve}")
    if seconds > HOUR and not lengths.on_cpu:
        key = "regenerate.endpoints"
        new.put(key, [{"url": SERVER}])
    else:
        lines.append(f"endpoints: [{{url: {SERVER}}}]")
    new.put("regenerate.temperatures", {0.0: 0.5, 1.0: 0.5}, "those of serving, and their shares")
    new.above[key] = "\n".join(lines)
    new.comments["regenerate"] = "the target answers every prompt anew"


def _say(
    console: Console, out: Path, read: ExamplesRead, stage: StagePlan, device: Device | None
) -> None:
    """What was written, what was left out, how long it takes, and what to do next."""
    from draftsmith.train.planner.describe import duration

    recipe = stage.recipe
    console.print(f"{out}: {len(read.examples):,} conversations for {recipe.target.model}")
    if left_out := str(read.bad):
        console.print(Text(f"  {left_out}", style="yellow"))
    if texts := sum(example.prompt is not None for example in read.examples):
        note = f"{texts:,} are texts (prompt, completion), which pass through no chat template"
        advice = "give a chat's as columns: {user: prompt, assistant: completion} of the source"
        console.print(Text(f"  {note}; {advice}", style="yellow"))
    if device is not None:
        writing = stage.writing_seconds(device)
        times = f"responses {duration(writing)}"
        if math.isfinite(steps := _steps(stage, device)):
            training = duration(stage.seconds(device) - writing)
            times += f", training {training}, {steps:,.0f} steps"
        if limit := recipe.data.train[0].limit:
            what = f"the first {limit:,} to train on: all would take more than an hour to write"
            console.print(f"  {what}; servers write faster (see regenerate)")
        console.print(f"  on {device.name}, about: {times}")
        if device.kind == "cpu":
            console.print("  without a GPU: the sizes are what a core can do; --gpu plans for one")
    file = shlex.quote(str(out))
    for command in (
        f"prepare {file}            # the data as the drafter sees it",
        f"train {file} --dry-run    # shapes, tokens, memory, time",
        f"train {file}",
    ):
        console.print(Text(f"  draftsmith {command}"))
