"""Compares drafting methods for one target in one process, on the same prompts and the same
weights.

Every method has an engine of its own; `default` drafts nothing. A repeat runs all of them one right
after the other, every other repeat in reverse order (inference/evaluation/timing.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt
from inference.evaluation.lossless import compare_greedy
from inference.evaluation.timing import Run, interleaved
from inference.metrics import SpecDecodeCounters
from inference.outputs import RequestOutput
from inference.report.measurement import LosslessCheck, TimedRun
from inference.sampling_params import SamplingParams
from speculators.errors import ConfigError
from speculators.target.frozen_target import FrozenTarget

DEFAULT = "default"
WARM_UP_TOKENS = 8

# Another engine that writes responses to prompts, given as token ids, and says how many tokens it
# wrote.
Other = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], int]


def compiled_name(name: str) -> str:
    """The name of a method where it runs compiled."""
    return f"{name}, compiled"


@dataclass
class Measured:
    """The results of one method. `outputs` are those of the first repeat (none of another engine),
    all else is summed.

    rounds           verifications, each of all rows in flight
    row_rounds       the same, counted once per row
    phase_seconds    the engine's timers
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    runs: list[TimedRun] = field(default_factory=list)
    counters: SpecDecodeCounters = field(default_factory=SpecDecodeCounters)
    phase_seconds: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    row_rounds: int = 0


class SideBySide:
    """One engine per drafting method.

    `methods`: name -> speculative_config. `options`: of LLM, the same for all. `compiled`: every
    method runs a second time, compiled (docs/runtime.md), under the name of `compiled_name`.

    The engines are `llms[name]`, with `llms["default"]` first. ConfigError for a method that is
    called `default`."""

    def __init__(
        self,
        model: str | FrozenTarget,
        methods: Mapping[str, Mapping[str, Any]],
        *,
        tokenizer: Any = None,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        if DEFAULT in methods:
            raise ConfigError(
                f"side by side: {DEFAULT!r} is the run without drafting; give the method another"
                " name"
            )
        self._rounds = 0
        options = {
            "enable_prefix_caching": False,
            **options,
        }  # or every repeat but the first would skip the prompts
        first = LLM(model, tokenizer, on_round=self._count, **options)
        self.target, self.llms = first.engine.target, {DEFAULT: first}
        make = partial(LLM, self.target, first.get_tokenizer(), on_round=self._count)
        for name, config in methods.items():
            self.llms[name] = make(speculative_config=dict(config), **options)
        for name, method in {DEFAULT: None, **methods}.items() if compiled else ():
            config = None if method is None else dict(method)
            self.llms[compiled_name(name)] = make(
                speculative_config=config, **{**options, "enforce_eager": False}
            )

    def num_speculative_tokens(self, name: str) -> int:
        proposer = self.llms[name].engine.proposer
        return 0 if proposer is None else proposer.num_speculative_tokens

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        repeats: int,
        others: Mapping[str, Other] | None = None,
        after_repeat: Callable[[Mapping[str, Measured]], None] | None = None,
    ) -> dict[str, Measured]:
        """Runs every method and every other engine: warmed up, then timed `repeats` times.

        Request i has the seed `params.seed` + i (0 if None), so that a method writes the same text
        in every repeat. `after_repeat`: called after each repeat with the results so far, for
        measurements in turn with the runs."""
        seeded = [replace(params, seed=(params.seed or 0) + i) for i in range(len(prompts))]
        short = [
            replace(p, max_tokens=min(WARM_UP_TOKENS, p.max_tokens or WARM_UP_TOKENS))
            for p in seeded
        ]
        rows = self.llms[DEFAULT].engine.scheduler.max_num_seqs
        for run in self._passes(prompts[:rows], short[:rows], others or {}, {}).values():
            run()
        for name, llm in self.llms.items():
            if llm.engine.compiled is not None:  # every shape that the passes will meet
                self._pass(name, prompts, seeded, Measured())
        measured = {name: Measured() for name in (*self.llms, *(others or {}))}
        for repeat in range(repeats):
            timed = interleaved(
                self._passes(prompts, seeded, others or {}, measured), repeat, self.target.device
            )
            for name, run in timed.items():
                measured[name].runs.append(run)
            if after_repeat is not None:
                after_repeat(measured)
        return measured

    def compare(
        self, prompts: Sequence[Prompt], measured: Mapping[str, Measured], name: str
    ) -> LosslessCheck:
        """Compares the greedy responses of a method with those of the default."""
        return compare_greedy(
            self.target,
            [prompt.token_ids for prompt in prompts],
            *(
                [output.outputs[0].token_ids for output in measured[m].outputs]
                for m in (DEFAULT, name)
            ),
            num_speculative_tokens=self.num_speculative_tokens(name),
            rows=min(self.llms[name].engine.scheduler.max_num_seqs, len(prompts)),
        )

    def _passes(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        others: Mapping[str, Other],
        into: Mapping[str, Measured],
    ) -> dict[str, Run]:
        """One pass of each; its results are added to the entry of its name in `into`, if there is
        one."""
        passes: dict[str, Run] = {
            name: partial(self._pass, name, prompts, params, into.get(name) or Measured())
            for name in self.llms
        }
        ids = [prompt.token_ids for prompt in prompts]
        return passes | {
            name: partial(lambda run: (run(ids, params), 0, 0), other)
            for name, other in others.items()
        }

    def _pass(
        self, name: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams], into: Measured
    ) -> tuple[int, int, int]:
        llm, self._rounds = self.llms[name], 0
        llm.reset_metrics()
        inputs = [
            {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids} for prompt in prompts
        ]
        outputs = llm.generate(inputs, list(params), use_tqdm=False)
        counters = llm.get_metrics()
        into.outputs = into.outputs or outputs
        into.counters.merge(counters)
        into.rounds += self._rounds
        into.row_rounds += sum(len(output.metrics.accepted_per_round) for output in outputs)
        into.phase_seconds.update(llm.engine.timers)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens, counters.num_drafts, counters.num_accepted_tokens

    def _count(self, *round_: Any) -> None:
        self._rounds += 1
