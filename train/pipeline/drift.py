"""`draftsmith drift`: how well a run's head drafts for a server's traffic, by day and by what the
prompts are about, and whether a refresh is worth it.

The acceptance of a day is that of the counters in the log: of the answers, else of the server's
/metrics. Where there are none, and where they are of an earlier head, it is exact replay of a
sample of the day's texts with the running head. Nothing is written."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape

from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.progress import Stages
from draftsmith.inference.report.schema import load_report
from draftsmith.inference.report.table import NONE, new_table
from draftsmith.inference.traffic_log.reader import read_counters, read_log
from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.speculators.digests import weights_sha256
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.export import load_drafter, read_drafter_config
from draftsmith.train.data.prompt_clusters import PromptClusters, cluster_prompts
from draftsmith.train.data.traffic import (
    DAY,
    LoggedText,
    Sampling,
    TrafficReader,
    TrafficSlice,
    newest_time,
    opening_of,
)
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.pipeline.drift_verdict import (
    Acceptance,
    Comparison,
    Day,
    Reference,
    advice,
    first_day,
    newest_day,
)
from draftsmith.train.pipeline.evaluate_again import require_export
from draftsmith.train.pipeline.refresh import describe, refreshed_until
from draftsmith.train.pipeline.refresh_gate import LEAST_CONVERSATIONS
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.pipeline.run_target import load_target
from draftsmith.train.recipe.recipe import EXPORT, REPORT, Recipe

# sources of a day's acceptance
ANSWERS = "answers"  # counters in the log of single answers
METRICS = "/metrics"  # counters of the server as a whole
REPLAY = "replay"

MOST_CLUSTERS = 6
NAME_WORDS = 4
LEAST_LETTERS = 3  # of a word of a cluster's name

Units = dict[str, tuple[float, float]]  # rounds and accepted drafts, by conversation


@dataclass(frozen=True)
class DriftSettings:
    """What is asked.

    log     folder of the log
    days    back from its newest exchange
    sample  exchanges of a day that are replayed, at most
    names   of the target as the server calls it, beside those that the recipe gives it
    """

    log: str
    days: int = 7
    sample: int = 100
    names: tuple[str, ...] = ()


def drift(recipe: Recipe, settings: DriftSettings, stages: Stages | None = None) -> int:
    """1 if a refresh of the recipe's run is worth it, else 0. DataError: the log holds too little
    to say so."""
    require_export(recipe)
    return _Drift(recipe, settings, stages or Stages()).run()


class _Traffic:
    """What a log has of one day.

    requests     of the target
    answers      counters of its answers, by conversation, since the running head is there
    metrics      growth of the server's counters, since then
    most_drafts  of a round, by the source of the counters
    replayed     the sampled texts, once they are replayed
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.requests = 0
        self.answers: Units = {}
        self.metrics: list[tuple[float, float]] = []
        self.most_drafts: Counter[str] = Counter()
        self.replayed: Units = {}
        self._smallest: list[tuple[float, int, LoggedExchange]] = []

    @property
    def sample(self) -> list[LoggedExchange]:
        """The exchanges with the smallest keys, which are a random sample."""
        return [exchange for _, _, exchange in self._smallest]

    def add(self, exchange: LoggedExchange, most: int, *, counts: bool) -> None:
        """Of the target. `most`: exchanges of the sample; `counts`: of the running head."""
        self.requests += 1
        if most:
            heapq.heappush(self._smallest, (-exchange.key, self.requests, exchange))
            if len(self._smallest) > most:
                heapq.heappop(self._smallest)
        if counts and exchange.spec_decode is not None and exchange.spec_decode.num_drafts:
            totals = self._totals(ANSWERS, exchange.spec_decode)
            _add(self.answers, opening_of(exchange), totals)

    def add_metrics(self, counters: SpecDecodeCounters) -> None:
        """Of an interval."""
        self.metrics.append(self._totals(METRICS, counters))

    def _totals(self, source: str, counters: SpecDecodeCounters) -> tuple[float, float]:
        depth = len(counters.num_accepted_tokens_per_pos)
        self.most_drafts[source] = max(self.most_drafts[source], depth)
        return counters.num_drafts, counters.num_accepted_tokens

    @property
    def source(self) -> str:
        """The best that there is enough of."""
        if len(self.answers) >= LEAST_CONVERSATIONS:
            return ANSWERS
        return METRICS if len(self.metrics) >= LEAST_CONVERSATIONS else REPLAY

    @property
    def conversations(self) -> Units:
        """Whose acceptance is known: by their counters if the day's is, else by replay."""
        return self.answers if self.source == ANSWERS else self.replayed

    def day(self, replayed_drafts: int) -> Day:
        """`replayed_drafts`: of a round in replay."""
        source = self.source
        totals = self.metrics if source == METRICS else [*self.conversations.values()]
        depth = replayed_drafts if source == REPLAY else self.most_drafts[source]
        acceptance = Acceptance.of(totals) if totals else None
        return Day(self.start, self.requests, source, depth, acceptance)


class _Drift:
    """One look at a log."""

    def __init__(self, recipe: Recipe, settings: DriftSettings, stages: Stages) -> None:
        self.settings = settings
        self.stages = stages
        self.folder = Path(recipe.output_dir)
        self.accelerator = make_accelerator(recipe.model_copy(update={"trackers": []}))
        whole = with_adapted_target(recipe, self.accelerator)
        _, self.recipe = whole.training_stages()[-1]
        self.tokenizer = self.recipe.target.load_tokenizer()
        self.reader = TrafficReader.of_recipe(self.recipe, self.tokenizer, settings.names)
        self.k = self.recipe.evaluation.num_speculative_tokens

    def run(self) -> int:
        """The exit code."""
        traffic = self._read()
        part = self._sample(traffic)
        days = [one.day(self.k) for one in traffic]
        self._print_days(days)
        newest = newest_day(days)
        if newest is None or newest.acceptance is None:
            raise DataError(
                f"too little: no day has counters or texts of {LEAST_CONVERSATIONS} conversations;"
                f" wait for traffic, or raise --sample. {describe(part)}",
                where="--log",
            )
        comparable = [one for one, day in zip(traffic, days, strict=True) if day.like(newest)]
        self._print_clusters(comparable, part.texts)
        references = [first_day(days, newest), self._held_out(newest, part.texts)]
        comparisons = [Comparison(one, newest.acceptance) for one in references if one]
        if not comparisons:
            raise DataError(
                "nothing to compare the newest day with: no earlier one like it has enough, and"
                f" {REPORT} is not of this head before its first refresh; wait, or run draftsmith"
                " evaluate",
                where="drift",
            )
        self.stages.say(advice(comparisons))
        return int(any(comparison.is_drift for comparison in comparisons))

    # ------------------------------------------------------------------ the log

    def _read(self) -> list[_Traffic]:
        """The days that have something, in the order of time. They are counted back from the newest
        exchange, so that each is a whole one."""
        log = Path(self.settings.log)
        newest = newest_time(log, self.reader.names)
        oldest = math.nextafter(newest - self.settings.days * DAY, math.inf)  # of the day before it
        since = max(oldest, refreshed_until(self.folder) or 0.0)
        served = max(path.stat().st_mtime for path in (self.folder / EXPORT).glob("*.safetensors"))
        days: dict[int, _Traffic] = {}

        def day_of(time: float) -> _Traffic:
            number = int((newest - time) // DAY)
            return days.setdefault(number, _Traffic(newest - (number + 1) * DAY))

        others: Counter[str] = Counter()
        for exchange in read_log(log, since=since, until=math.nextafter(newest, math.inf)):
            if exchange.model not in self.reader.names:
                others[exchange.model] += 1
                continue
            counts = exchange.time >= served
            day_of(exchange.time).add(exchange, self.settings.sample, counts=counts)
        if not days:
            raise DataError(
                f"no exchange of {sorted(self.reader.names)} in the {self.settings.days} days, or"
                f" since the last refresh; models in the log: {dict(others)}. Give the target's"
                " name at the server by --served-model-name",
                where=f"--log {log}",
            )
        for grown in read_counters(log, since=max(since, served), until=newest):
            day_of(grown.time - grown.seconds).add_metrics(grown.spec_decode)
        return [days[number] for number in sorted(days, reverse=True)]

    def _sample(self, traffic: Sequence[_Traffic]) -> TrafficSlice:
        """The sampled exchanges as texts; those of days without counters of answers are replayed
        into these."""
        slices = [self.reader.slice_of(one.sample) for one in traffic]
        left_out: Counter[str] = Counter()
        for part in slices:
            left_out.update(part.left_out)
        texts = [text for part in slices for text in part.texts]
        read = sum(part.read for part in slices)
        whole = TrafficSlice(texts, read, dict(left_out), {})
        self.stages.say(f"      sample: {escape(describe(whole))}")
        asked = [
            (one, part.texts)
            for one, part in zip(traffic, slices, strict=True)
            if one.source != ANSWERS and part.texts
        ]
        if asked:
            self._replay(asked)
        return whole

    def _replay(self, asked: Sequence[tuple[_Traffic, Sequence[LoggedText]]]) -> None:
        export = self.folder / EXPORT
        config = read_drafter_config(export, self.recipe.target.sketch().num_layers)
        target = load_target(self.recipe, self.accelerator, config.tap_layers, self.stages)
        drafter = load_drafter(export, target)
        done = 0
        with self.stages.stage("replay", sum(len(texts) for _, texts in asked)) as advance:
            for traffic, texts in asked:
                for sampling, alike in _by_sampling(texts).items():
                    tokens = [text.tokens for text in alike]
                    results = expected_acceptance(
                        target, drafter, tokens, k=self.k, **sampling._asdict()
                    )
                    for text, result in zip(alike, results, strict=True):
                        totals = result.rounds, result.accepted
                        _add(traffic.replayed, text.conversation, totals)
                    done += len(alike)
                    advance(done)

    def _held_out(self, newest: Day, texts: Sequence[LoggedText]) -> Reference | None:
        """The acceptance that was measured of this head on its own prompts, at the temperature next
        to that of most texts. None after a refresh, from which on its own days count; and where it
        was measured on another head, or at another number of drafts."""
        path = self.folder / REPORT
        if not path.exists() or refreshed_until(self.folder) is not None:
            return None
        report = load_report(path)
        measured = report.provenance
        if measured.num_speculative_tokens != newest.most_drafts:
            return None
        if measured.drafter_weights_sha256 != weights_sha256(self.folder / EXPORT):
            return None
        temperatures = Counter(text.sampling.temperature for text in texts)
        wanted = temperatures.most_common(1)[0][0] if temperatures else 1.0
        cell = min(report.pooled(), key=lambda cell: abs(cell.temperature - wanted))
        name = f"its own prompts' at T = {cell.temperature:g} in {REPORT}"
        return Reference(name, cell.acceptance_length, 0.0)

    # ------------------------------------------------------------------ tables

    def _print_days(self, days: Sequence[Day]) -> None:
        table = new_table("by day", "from (UTC)", "requests", "units", "tokens", "τ", "K", "source")
        for day in days:
            acceptance = day.acceptance
            table.add_row(
                datetime.fromtimestamp(day.start, UTC).strftime("%Y-%m-%d %H:%M"),
                f"{day.requests:,}",
                f"{acceptance.units:,}" if acceptance else NONE,
                f"{acceptance.tokens:,.0f}" if acceptance else NONE,
                _length(acceptance),
                f"{day.most_drafts}" if acceptance else NONE,
                day.source if acceptance else NONE,
            )
        self.stages.console.print(table)

    def _print_clusters(self, traffic: Sequence[_Traffic], texts: Sequence[LoggedText]) -> None:
        """Of the days that can be compared. Words of prompts are shown on a terminal alone: what
        goes to a file or a mail has none."""
        totals: Units = {}
        for one in traffic:
            for conversation, counts in one.conversations.items():
                _add(totals, conversation, counts)
        prompts = {t.conversation: t.prompt_ids for t in texts if t.conversation in totals}
        count = min(MOST_CLUSTERS, len(prompts) // LEAST_CONVERSATIONS)
        if count < 2:
            self.stages.say(f"fewer than {2 * LEAST_CONVERSATIONS} conversations to cluster")
            return
        clusters = cluster_prompts(list(prompts.values()), count)
        members: list[list[str]] = [[] for _ in clusters.distinctive]
        for conversation, label in zip(prompts, clusters.labels, strict=True):
            members[label].append(conversation)
        newest = traffic[-1].conversations
        of_newest = sum(conversation in newest for conversation in prompts)
        headings = ("conversations", "share", "newest day", "τ")
        table = new_table("by cluster of prompts", "cluster", *headings)
        for label, conversations in enumerate(members):
            today = sum(conversation in newest for conversation in conversations)
            table.add_row(
                self._name(clusters, label),
                f"{len(conversations):,}",
                f"{len(conversations) / len(prompts):.0%}",
                f"{today / of_newest:.0%}" if of_newest else NONE,
                _length(Acceptance.of([totals[one] for one in conversations])),
            )
        self.stages.console.print(table)

    def _name(self, clusters: PromptClusters, label: int) -> str:
        if not self.stages.console.is_terminal:
            return f"{label + 1}"
        words = [self.tokenizer.decode([t]).strip().lower() for t in clusters.distinctive[label]]
        whole = [word for word in words if word.isalpha() and len(word) >= LEAST_LETTERS]
        return escape(f"{label + 1} {' '.join(list(dict.fromkeys(whole))[:NAME_WORDS])}")


# ------------------------------------------------------------- pure functions


def _add(units: Units, unit: str, totals: tuple[float, float]) -> None:
    rounds, accepted = units.get(unit, (0.0, 0.0))
    units[unit] = rounds + totals[0], accepted + totals[1]


def _by_sampling(texts: Sequence[LoggedText]) -> dict[Sampling, list[LoggedText]]:
    groups: dict[Sampling, list[LoggedText]] = {}
    for text in texts:
        groups.setdefault(text.sampling, []).append(text)
    return groups


def _length(acceptance: Acceptance | None) -> str:
    if acceptance is None:
        return NONE
    length = f"{acceptance.length:.3f}"
    return f"{length} ± {acceptance.error:.3f}" if acceptance.units > 1 else length
