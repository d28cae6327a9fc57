"""Compares drafting methods for one target in one process, on the same prompts and the same
weights.

Every method has an engine of its own; `default` drafts nothing. A repeat runs all of them one right
after the other, every other repeat in reverse order (inference/evaluation/timing.py). `results` is
what is saved, `results_table` what is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt
from inference.evaluation.lossless import compare_greedy
from inference.evaluation.timing import Run, interleaved
from inference.metrics import SpecDecodeCounters, acceptance_length
from inference.outputs import RequestOutput
from inference.report.build import num_output_tokens
from inference.report.measurement import LosslessCheck, TokenDifference
from inference.report.speed import Speeds, TimedPass, stalled
from inference.sampling_params import SamplingParams
from speculators.errors import ConfigError
from speculators.target.frozen_target import FrozenTarget

DEFAULT = "default"
WARM_UP_TOKENS = 8
Progress = Callable[[str, int], None]  # what runs, requests done since the last call


@dataclass
class Measured:
    """The results of one method. `outputs` are those of the first repeat; counters are summed over
    all. `rounds`: target forwards after the prefills, counted per request."""

    outputs: list[RequestOutput] = field(default_factory=list)
    passes: list[TimedPass] = field(default_factory=list)
    counters: SpecDecodeCounters = field(default_factory=SpecDecodeCounters)
    rounds: int = 0


class SideBySide:
    """One engine per drafting method.

    `methods`: name -> speculative_config. `options`: of LLM, the same for all. The engines are
    `llms[name]`, with `llms["default"]` first. ConfigError for a method that is called
    `default`."""

    def __init__(
        self, model: str | FrozenTarget, methods: Mapping[str, Mapping[str, Any]], **options: Any
    ) -> None:
        if DEFAULT in methods:
            raise ConfigError(
                f"side by side: {DEFAULT!r} is the run without drafting; give the method another"
                " name"
            )
        first = LLM(model, **options)
        self.target = first.engine.target
        self.llms = {DEFAULT: first}
        for name, config in methods.items():
            tokenizer = first.get_tokenizer()
            self.llms[name] = LLM(self.target, tokenizer, speculative_config=config, **options)

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        repeats: int,
        progress: Progress = lambda text, requests: None,
    ) -> dict[str, Measured]:
        """Runs every method: warmed up, then timed `repeats` times.

        Request i has the seed `params.seed` + i (0 if None), so that a method writes the same text
        in every repeat."""
        seeded = [replace(params, seed=(params.seed or 0) + i) for i in range(len(prompts))]
        most = min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS)
        rows = self.llms[DEFAULT].engine.scheduler.max_num_seqs
        for name in self.llms:
            progress(f"{name}: warming up", 0)
            short = [replace(p, max_tokens=most) for p in seeded[:rows]]
            self._pass(name, prompts[:rows], short, Measured(), lambda requests: None)
        measured = {name: Measured() for name in self.llms}
        for repeat in range(repeats):
            passes: dict[str, Run] = {
                name: partial(
                    self._pass,
                    name,
                    prompts,
                    seeded,
                    measured[name],
                    partial(progress, f"{name}, repeat {repeat + 1} of {repeats}"),
                )
                for name in self.llms
            }
            timed = interleaved(passes, "prompts", repeat, self.target.device)
            for name, run in timed.items():
                measured[name].passes.append(run)
        return measured

    def compare(
        self, prompts: Sequence[Prompt], measured: Mapping[str, Measured], name: str
    ) -> LosslessCheck:
        """Compares the greedy responses of a method with those of the default."""
        proposer = self.llms[name].engine.proposer
        return compare_greedy(
            self.target,
            [prompt.token_ids for prompt in prompts],
            *(
                [output.outputs[0].token_ids for output in measured[m].outputs]
                for m in (DEFAULT, name)
            ),
            num_speculative_tokens=0 if proposer is None else proposer.num_speculative_tokens,
            rows=min(self.llms[name].engine.scheduler.max_num_seqs, len(prompts)),
        )

    def _pass(
        self,
        name: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        into: Measured,
        advance: Callable[[int], None],
    ) -> tuple[int, int, int]:
        """One pass, added to `into`. One row at a time goes request by request, for the progress;
        several rows are left to the scheduler."""
        llm = self.llms[name]
        llm.reset_metrics()
        inputs = [{"prompt": p.text, "prompt_token_ids": p.token_ids} for p in prompts]
        size = 1 if llm.engine.scheduler.max_num_seqs == 1 else len(inputs)
        outputs: list[RequestOutput] = []
        advance(0)
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            outputs += llm.generate(inputs[part], list(params[part]), use_tqdm=False)
            advance(len(inputs[part]))
        counters = llm.get_metrics()
        into.outputs = into.outputs or outputs
        into.counters.merge(counters)
        into.rounds += sum(len(output.metrics.accepted_per_round) for output in outputs)
        tokens = sum(num_output_tokens(output) for output in outputs)
        return tokens, counters.num_drafts, counters.num_accepted_tokens


def results(
    measured: Mapping[str, Measured], checks: Mapping[str, LosslessCheck]
) -> dict[str, dict[str, Any]]:
    """The saved results by method: outputs, timings, metrics (totals of all passes); with drafting
    also `agree` and `speedup`.

    `agree` is null where nothing can be compared: at temperatures above 0 only the distributions
    are the same."""
    speeds = Speeds({name: one.passes for name, one in measured.items()}, DEFAULT)
    found: dict[str, dict[str, Any]] = {}
    for name, one in measured.items():
        rate = speeds.rate(name)
        assert rate is not None
        found[name] = {
            "outputs": [
                {
                    "prompt": output.prompt,
                    "text": output.outputs[0].text,
                    "token_ids": output.outputs[0].token_ids,
                    "finish_reason": output.outputs[0].finish_reason,
                }
                for output in one.outputs
            ],
            "timings": {
                "seconds": median(run.seconds for run in one.passes),
                "tokens_per_second": rate.model_dump(),
                "passes": [run.model_dump(exclude={"workload"}) for run in one.passes],
                "stalled_repeats": [run.repeat for run, _ in stalled(one.passes)],
            },
            "metrics": {
                "output_tokens": sum(run.tokens for run in one.passes),
                "acceptance_length": one.counters.acceptance_length,
                "tokens_per_forward": acceptance_length(
                    one.counters.num_accepted_tokens, one.rounds
                ),
                "drafted_share": one.counters.num_drafts / one.rounds if one.rounds else 0.0,
                **one.counters.to_dict(),
            },
        }
        if name != DEFAULT:
            speedup = speeds.ratio(name, DEFAULT)
            found[name]["speedup"] = speedup and speedup.model_dump()
            found[name]["agree"] = _agreement(checks[name]) if name in checks else None
    return found


def _agreement(check: LosslessCheck) -> dict[str, Any]:
    same = check.checked_prompts - len(check.details)
    return {
        "same": same,
        "of": check.checked_prompts,
        **check.model_dump(exclude={"checked_prompts"}),
    }


def results_table(title: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    """`results`, a row per method."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", overflow="fold")
    for heading in ("tokens/s", "τ", "drafted", "/fwd", "speedup (90 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same text", no_wrap=True)
    for name, one in found.items():
        metrics = one["metrics"]
        speedup = one.get("speedup")
        drafts = name != DEFAULT
        table.add_row(
            name,
            f"{one['timings']['tokens_per_second']['value']:.1f}",
            f"{metrics['acceptance_length']:.2f}" if drafts else "",
            f"{100 * metrics['drafted_share']:.0f} %" if drafts else "",
            f"{metrics['tokens_per_forward']:.2f}" if drafts else "",
            f"{speedup['value']:.2f} ({speedup['low']:.2f}-{speedup['high']:.2f})"
            if speedup
            else "",
            _verdict(one["agree"]) if drafts else "",
        )
    table.caption = (
        "τ: tokens per verified draft; drafted: share of the forwards with a draft; /fwd: tokens"
        " per forward of the target, over all"
    )
    table.caption_justify = "left"
    return table


def remarks(
    found: Mapping[str, Mapping[str, Any]], checks: Mapping[str, LosslessCheck], tokenizer: Any
) -> list[str]:
    """What the table does not say: stalled repeats, responses that repeat themselves, and every
    first difference from the default in words."""
    said = [
        f"{name}: the machine stalled in repeat {repeat + 1}; medians leave it out"
        for name, one in found.items()
        for repeat in one["timings"]["stalled_repeats"]
    ]
    outputs = [output["token_ids"] for output in found[DEFAULT]["outputs"]]
    if repeated := sum(map(repeats_itself, outputs)):
        said.append(
            f"{repeated} of {len(outputs)} responses repeat themselves to the end: n-grams and"
            " suffixes gain more on them than on real answers"
        )
    for name, check in checks.items():
        said += [_explained(name, difference, tokenizer) for difference in check.details]
    return said


def repeats_itself(token_ids: Sequence[int]) -> bool:
    """True if the second half of a response of 16 tokens or more is one piece of at most 8 tokens,
    over and over."""
    half = list(token_ids[len(token_ids) // 2 :])
    return len(token_ids) >= 16 and any(
        half[period:] == half[:-period] for period in range(1, min(8, len(half) // 2) + 1)
    )


def _verdict(agree: Mapping[str, Any] | None) -> str:
    if agree is None:
        return "sampled"
    if agree["same"] == agree["of"]:
        return "yes"
    rest = f"{agree['mismatches']} WRONG" if agree["mismatches"] else f"{agree['ties']} tied"
    return f"{agree['same']} of {agree['of']} ({rest})"


def _explained(name: str, difference: TokenDifference, tokenizer: Any) -> str:
    """The first difference of one prompt, in words."""

    def shown(token: int | None) -> str:
        return "the end" if token is None else repr(tokenizer.decode([token]))

    numbers = (
        f"the two best logits are {difference.top_two_gap:.3g} apart and {difference.noise:.3g} of"
        " noise was measured"
    )
    why = f"a floating-point tie, {numbers}" if difference.tie else f"a mismatch: {numbers}"
    return (
        f"{name}, prompt {difference.prompt}, token {difference.position}:"
        f" {shown(difference.token)} instead of {shown(difference.reference_token)}; {why}"
    )
