"""`draftsmith refresh`: the running head goes on learning from a server's newest traffic, and takes
the place of the old one if a gate lets it.

A refresh is a run of a recipe that is derived from the run's own: the same target, family and
loop, started from the export, with a budget of minutes, on rows of the log mixed with rows that the
head was trained on. It works in a folder of the run that is gone when it ends; a killed one is
continued by the same command on the same slice."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.markup import escape
from rich.table import Table

from draftsmith.inference.progress import Stages, counted
from draftsmith.inference.traffic_log.reader import read_log
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.speculators.export import load_drafter, read_drafter_config, read_fields
from draftsmith.speculators.precision import free_memory
from draftsmith.train.data.bad_rows import BadRows
from draftsmith.train.data.packing import PackedRow, chat_template_of, fit_rows, pack
from draftsmith.train.data.prepare import run_tokenizer, suite_turns
from draftsmith.train.data.row_tables import PackedRows, save_rows
from draftsmith.train.data.sources import load_sources
from draftsmith.train.data.template_date import FILE as TEMPLATE_DATE
from draftsmith.train.data.tokenising import prompts_of
from draftsmith.train.data.traffic import (
    DAY,
    JUDGE_FROM,
    WORKLOAD,
    LoggedText,
    Sampling,
    TrafficReader,
    TrafficSlice,
    evenly,
    newest_time,
)
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.pipeline.data_stage import (
    DataStage,
    TrainingData,
    WholeTarget,
    response_rows,
    target_hashes,
)
from draftsmith.train.pipeline.evaluate_again import require_export
from draftsmith.train.pipeline.export_stage import export, refreshed_name
from draftsmith.train.pipeline.export_swap import (
    GATHERED,
    PREVIOUS,
    finish_swap,
    swap_back,
    swap_in,
)
from draftsmith.train.pipeline.refresh_gate import (
    LEAST_CONVERSATIONS,
    Judgement,
    judge,
    refusals,
)
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.pipeline.run_folder import claimed
from draftsmith.train.pipeline.run_target import load_target
from draftsmith.train.pipeline.train_stage import train
from draftsmith.train.recipe.recipe import EXPORT, Recipe
from draftsmith.train.regeneration.store import Response, write_json

WORK = "refresh"  # the folder of a refresh that is under way
SLICE = "slice.json"
ACCEPTED = "accepted.json"  # what SLICE is called once its head is to be exported
REPORT = "refresh.json"  # in the run's folder, of the newest refresh
# In the provenance of a refreshed head, which it takes along: the time of the first text that
# neither taught it nor chose its checkpoint.
JUDGED_SINCE = "judged_since"

JUDGE_TEXTS = 256  # of the newest part, at most
CHOICE_TEXTS = 48
MOST_REPEATS = 8  # of the new rows in the table, so that more of the old ones have a place in it
STARTS = ("from_target", "config", "init")  # options of drafters that init_from replaces


@dataclass(frozen=True)
class RefreshSettings:
    """What one refresh is told.

    log      folder of the log
    days     that the slice reaches back from the newest exchange
    minutes  of training
    share    of the supervised tokens that are of the data the head was trained on
    rate     of the recipe's learning rates: those are for a head that begins, and in the steps of a
             refresh they undo more than they teach
    names    of the target as the server calls it, beside those that the recipe gives it
    """

    log: str
    days: float = 1.0
    minutes: float = 20.0
    share: float = 0.3
    rate: float = 0.3
    names: tuple[str, ...] = ()


def undo(recipe: Recipe) -> bool:
    """Swaps the run's exports with those before the newest refresh. False: a swap was killed, which
    may have been an undoing; it is finished and nothing else is done. CheckpointError: none."""
    run = Path(recipe.output_dir)
    accelerator = make_accelerator(recipe.model_copy(update={"trackers": []}))
    with claimed(accelerator, run):
        finished = finish_swap(run)
        if _was_accepted(run) or finished:
            return False
        swap_back(run)
        for weights in run.glob(f"{EXPORT}*/*.safetensors"):
            os.utime(weights)  # it serves from now on
        return True


def _was_accepted(run: Path) -> bool:
    """Whether a refresh was killed after its head had been exported, or begun to be; its folder is
    removed then. One that was killed before goes on."""
    accepted = run / WORK / ACCEPTED
    if not accepted.exists():
        return False
    if (run / GATHERED).exists():
        accepted.rename(accepted.with_name(SLICE))
        return False
    shutil.rmtree(run / WORK)
    return True


def refreshed_until(run: Path) -> float | None:
    """The time of the newest text that the running head has learned from in a refresh, and was
    chosen by; None if it was not refreshed."""
    facts = read_fields(run / EXPORT).get("draftsmith") or {}
    return facts.get(JUDGED_SINCE)


def refresh(recipe: Recipe, settings: RefreshSettings, stages: Stages | None = None) -> int:
    """Refreshes the run of a recipe: 0 if the new head was exported, 1 if the gate refused it.
    ConfigError, DataError: it cannot be refreshed, or there is too little in the log."""
    stages = stages or Stages()
    recipe = recipe.model_copy(update={"trackers": []})
    accelerator = make_accelerator(recipe)
    _check(recipe, accelerator)
    run = Path(recipe.output_dir)
    with claimed(accelerator, run):
        finished = finish_swap(run)
        if _was_accepted(run):
            stages.say("a refresh that was killed had accepted its head, which is exported")
            return 0
        if finished:
            stages.say("the swap of a refresh that was killed is finished")
        return _Refresh(recipe, settings, accelerator, stages).run()


def _check(recipe: Recipe, accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1:
        raise ConfigError("runs in one process; start it without a launcher", where="refresh")
    if recipe.joint is not None:
        raise ConfigError(
            "the recipe trains the target along with its head, so that the head cannot go on alone",
            where="joint",
        )
    if not recipe.data.validation:
        raise ConfigError(
            "empty; a refresh is judged on these texts too, against forgetting: name some",
            where="data.validation",
        )


class _Refresh:
    """One refresh, in a run's folder that belongs to it."""

    def __init__(
        self,
        recipe: Recipe,
        settings: RefreshSettings,
        accelerator: Accelerator,
        stages: Stages,
    ) -> None:
        """`recipe`: of the run."""
        require_export(recipe)
        self.settings = settings
        self.accelerator = accelerator
        self.stages = stages
        self.folder = Path(recipe.output_dir)
        self.work = self.folder / WORK
        self.whole = with_adapted_target(recipe, accelerator)
        self.stage, self.recipe = self.whole.training_stages()[-1]
        self.tokenizer = self.recipe.target.load_tokenizer()
        self.began = time.time()
        self.old_suite: dict[float, list[Response]] = {}
        self.mix: dict[str, float] = {}  # supervised tokens, by where they are from

    def run(self) -> int:
        """The exit code."""
        part = self._slice()
        _require_enough(part)
        choice = _of_common_sampling(part.choice)
        derived = derived_recipe(self.recipe, self.work, self.settings, choice[0].sampling)
        set_seed(derived.training.seed)

        def prepare(recipe: Recipe, target: WholeTarget, *_: Any) -> TrainingData:
            return self._data(target, part.train, choice)

        trained = train(derived, self.accelerator, self.stages, prepare=prepare)
        steps = trained.state.best_step or trained.state.step
        with self.stages.stage("export the new head"):
            export(derived, trained, {JUDGED_SINCE: part.judge[0].time})
        del trained
        free_memory()
        newest, old = self._judge(list(evenly(part.judge, JUDGE_TEXTS)))
        reasons = refusals(newest, old)
        self._report(part, newest, old, reasons, steps)
        if not reasons:
            accept = partial(os.rename, self.work / SLICE, self.work / ACCEPTED)
            swap_in(self.folder, sorted(self.work.glob(f"{EXPORT}*")), accept)
        shutil.rmtree(self.work)
        return 1 if reasons else 0

    # -------------------------------------------------------------- the texts

    def _slice(self) -> TrafficSlice:
        """The slice of this refresh; that of a killed one, if it was told the same and the target
        is the same."""
        path = self.work / SLICE
        template = chat_template_of(self.recipe.data) or self.tokenizer.chat_template
        target = target_hashes(self.recipe, template).combined
        told = json.loads(json.dumps([asdict(self.settings), self.whole.recipe_hash(), target]))
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["told"] == told:
                self.stages.say("a refresh that was stopped goes on, with its slice of the log")
                return TrafficSlice.loaded(kept["slice"])
            self.stages.say(
                "a refresh that was stopped had other settings or another target; this one begins"
                " anew"
            )
        shutil.rmtree(self.work, ignore_errors=True)
        part = self._read()
        _require_enough(part)
        self.work.mkdir(mode=0o700)
        if (date := self.folder / TEMPLATE_DATE).exists():
            shutil.copy(date, self.work)
        write_whole(path, json.dumps({"told": told, "slice": part.dumped()}))
        return part

    def _read(self) -> TrafficSlice:
        log = Path(self.settings.log)
        reader = TrafficReader.of_recipe(self.recipe, self.tokenizer, self.settings.names)
        newest = newest_time(log, reader.names)
        exchanges = read_log(
            log, newest - self.settings.days * DAY, until=math.nextafter(newest, math.inf)
        )
        part = reader.slice_of(exchanges, self._held_out_prompts())
        self.stages.say(f"      {escape(describe(part))}")
        return part

    def _held_out_prompts(self) -> Sequence[Sequence[int]]:
        """Of the validation and the evaluation."""
        recipe = self.recipe
        sources = [*recipe.data.validation, *recipe.evaluation.prompts]
        examples = [*load_sources(sources, bad=BadRows()), *suite_turns(recipe)]
        prompts = prompts_of(examples, run_tokenizer(recipe, self.tokenizer), BadRows())
        return [ids.tolist() for ids in prompts.values()]

    def _data(
        self, target: WholeTarget, texts: Sequence[LoggedText], choice: Sequence[LoggedText]
    ) -> TrainingData:
        """The mixed rows; those that the head was trained on, and the old suite, are prepared as by
        the run, in its folder, where its responses are."""
        load = target.whole if target.held is None else None
        data = DataStage(
            self.recipe,
            target.held,
            self.tokenizer,
            self.accelerator,
            self.stages,
            stage=self.stage,
            load=load,
        )
        self.old_suite = data.held_out()
        longest = self.recipe.data.max_length
        fitting, _ = fit_rows(response_rows(responses(texts)), longest)
        new = pack(fitting, longest)
        share = self.settings.share
        old = data.training_rows() if share else []
        rows = mixed(new, old, share, self.recipe.training.seed)
        path = self.work / "rows" / "mixed.arrow"
        if not path.exists():
            save_rows(path, rows, {})
        self.mix = supervised_by_source(rows)
        had = self.mix["old"] / sum(self.mix.values())
        self.stages.say(
            f"      supervised tokens: {self.mix['new']:,.0f} of the log,"
            f" {self.mix['old']:,.0f} of the run's data, a share of {had:.0%}"
        )
        held_out = {choice[0].sampling.temperature: responses(evenly(choice, CHOICE_TEXTS))}
        return TrainingData(PackedRows(path), [], held_out, data.tokenizer, data.hashes)

    # --------------------------------------------------------------- the gate

    def _judge(self, texts: list[LoggedText]) -> tuple[Judgement, Judgement]:
        """On the newest texts, and on the old suite: both heads as they are exported."""
        e = self.recipe.evaluation
        old = self.folder / EXPORT
        config = read_drafter_config(old, self.recipe.target.sketch().num_layers)
        target = load_target(self.recipe, self.accelerator, config.tap_layers, self.stages)
        heads = load_drafter(old, target), load_drafter(self.work / EXPORT, target)
        suite = [
            as_logged(written, Sampling(temperature, e.top_p, e.top_k))
            for temperature, written in self.old_suite.items()
        ]
        judgements = []
        for name, samples in (("newest texts", [texts]), ("old suite", suite)):
            with self.stages.stage(f"replay the {name}", sum(map(len, samples))) as advance:
                judgements.append(judge(target, heads, samples, e.num_speculative_tokens, advance))
        return judgements[0], judgements[1]

    def _report(
        self,
        part: TrafficSlice,
        newest: Judgement,
        old: Judgement,
        reasons: list[str],
        steps: int,
    ) -> None:
        """refresh.json, and the same on the terminal."""
        tree = {
            "recipe": self.whole.name,
            "exported": not reasons,
            "reasons": reasons,
            "began": self.began,
            "minutes": (time.time() - self.began) / 60,
            "settings": asdict(self.settings),
            "slice": {
                "since": part.texts[0].time,
                JUDGED_SINCE: part.judge[0].time,
                "until": part.texts[-1].time,
                "read": part.read,
                "left_out": part.left_out,
                "texts": {
                    "train": len(part.train),
                    "choice": len(part.choice),
                    "judge": len(part.judge),
                },
            },
            "supervised_tokens": self.mix,
            "steps": steps,
            "newest": newest.tree(),
            "old_suite": old.tree(),
        }
        self.stages.console.print(_table({"newest texts": newest, "old suite": old}))
        for reason in reasons:
            self.stages.say(f"refused: {reason}")
        kept = "the old head stays" if reasons else f"exported; the old head is in {PREVIOUS}/"
        self.stages.say(f"{kept}; {self.folder / REPORT}")
        write_json(self.folder / REPORT, tree)


# ------------------------------------------------------------- pure functions


def _table(judgements: Mapping[str, Judgement]) -> Table:
    """The old head and the new one, a row for each set of texts that they were judged on."""
    table = Table("judge", "texts", "τ before", "τ after", "difference", "of τ - 1")
    for name, judgement in judgements.items():
        table.add_row(
            name,
            f"{judgement.texts}",
            f"{judgement.before:.3f}",
            f"{judgement.after:.3f}",
            f"{judgement.gain:+.3f} ± {judgement.error:.3f}",
            f"{100 * judgement.relative_gain:+.1f} %",
        )
    return table


def derived_recipe(
    recipe: Recipe, work: Path, settings: RefreshSettings, sampling: Sampling
) -> Recipe:
    """The recipe of a refresh: that of the run, or of its last stage, which starts from the export
    with a budget of minutes, at `settings.rate` of its learning rates. `sampling`: of the texts
    that choose the best checkpoint."""
    start = Path(recipe.output_dir) / EXPORT
    head = read_drafter_config(start, recipe.target.sketch().num_layers).model_dump(mode="json")
    tree = recipe.model_dump(mode="json")
    drafter = {key: v for key, v in tree["drafter"].items() if key not in STARTS}
    tree["drafter"] = {key: head.get(key, v) for key, v in drafter.items()}
    tree["drafter"]["init_from"] = str(start)
    tree["training"] |= {"steps": None, "epochs": None, "max_minutes": settings.minutes}
    tree["training"] |= {"eval_every": None, "save_every": None}
    tree["evaluation"] |= {
        "temperatures": [sampling.temperature],
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    tree["export"]["push_to_hub"] = None
    tree |= {"name": refreshed_name(recipe), "output_dir": str(work)}
    tree |= {"on_policy": None, "stages": [], "gates": {}, "trackers": []}
    return at_rate(type(recipe).model_validate(tree).resolved(), settings.rate)


def at_rate(recipe: Recipe, rate: float) -> Recipe:
    """The recipe, resolved, with `rate` times its learning rates."""
    training = recipe.training
    rates = {
        "learning_rate": training.learning_rate,
        "muon_learning_rate": training.muon_learning_rate,
    }
    scaled = {key: rate * value for key, value in rates.items() if value is not None}
    return recipe.model_copy(update={"training": training.model_copy(update=scaled)})


def mixed(
    new: Sequence[PackedRow], old: Sequence[PackedRow], share: float, seed: int
) -> list[PackedRow]:
    """Rows of which `share` of the supervised tokens are old: a seeded choice of the old rows, all
    of them again where they are too few. Where there are more, the new ones stand in it several
    times, up to MOST_REPEATS, so that more of the old ones have a place."""
    if not share:
        return list(new)
    sizes = [int(row.loss_mask.sum()) for row in old]
    for_each = share / (1 - share) * sum(int(row.loss_mask.sum()) for row in new)
    repeats = min(MOST_REPEATS, max(1, int(sum(sizes) / for_each)))
    rows = list(new) * repeats
    order = np.random.default_rng(seed).permutation(len(old)).tolist()
    left = repeats * for_each
    place = 0
    while left > 0:
        index = order[place % len(order)]
        rows.append(old[index])
        left -= sizes[index]
        place += 1
    return rows


def supervised_by_source(rows: Sequence[PackedRow]) -> dict[str, float]:
    """Supervised tokens of the log (`new`) and of the run's data (`old`)."""
    counts = {"new": 0.0, "old": 0.0}
    for row in rows:
        source = "new" if set(row.workloads) == {WORKLOAD} else "old"
        counts[source] += int(row.loss_mask.sum())
    return counts


def responses(texts: Sequence[LoggedText] | Any) -> list[Response]:
    """The texts as responses of the target, those of one conversation together."""
    ordered = sorted(texts, key=lambda text: (text.conversation, text.time))
    numbers: dict[str, int] = {}
    return [
        Response.of(
            WORKLOAD,
            text.prompt_ids,
            text.output_ids,
            text.sampling.temperature,
            numbers.setdefault(text.conversation, len(numbers)),
        )
        for text in ordered
    ]


def as_logged(written: Sequence[Response], sampling: Sampling) -> list[LoggedText]:
    """Responses of the old suite as texts of a log, whose unit is the prompt."""
    return [
        LoggedText(0.0, f"{r.prompt_ids}", r.prompt_ids, r.output_ids, sampling) for r in written
    ]


def _of_common_sampling(texts: Sequence[LoggedText]) -> list[LoggedText]:
    """Those under the commonest sampling parameters."""
    ((sampling, _),) = Counter(text.sampling for text in texts).most_common(1)
    return [text for text in texts if text.sampling == sampling]


def _require_enough(part: TrafficSlice) -> None:
    """DataError if the judge could not tell a gain from chance."""
    conversations = len({text.conversation for text in part.judge}) if part.texts else 0
    if conversations >= LEAST_CONVERSATIONS and part.train and part.choice:
        return
    needed = round(LEAST_CONVERSATIONS / (1 - JUDGE_FROM))
    raise DataError(
        f"too little: {counted(len(part.texts), 'text')}, of which the newest"
        f" {1 - JUDGE_FROM:.0%} are of {counted(conversations, 'conversation')};"
        f" {LEAST_CONVERSATIONS} are needed there, some {needed}"
        f" texts of different conversations in all. Wait for traffic, or raise --days."
        f" {describe(part)}",
        where="--log",
    )


def describe(part: TrafficSlice) -> str:
    """What became of all exchanges that were read."""
    left_out = "".join(f"; {count} {reason}" for reason, count in part.left_out.items())
    text = f"{part.read} exchanges, {len(part.texts)} used{left_out}"
    if len(part.models) > 1 or not part.texts:
        text += f" (models: {', '.join(f'{name} {n}' for name, n in part.models.items())})"
    return text
