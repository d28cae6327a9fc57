"""The interface of an engine that is measured, and this project's runtime as the first of them.

An engine writes responses to prompts, with drafting and without, and counts the drafts. It computes
no rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override

from draftsmith.inference.entrypoints.llm import LLM
from draftsmith.inference.entrypoints.loading import (
    default_device,
    load_target,
    load_tokenizer,
    target_config,
)
from draftsmith.inference.entrypoints.speculative_config import (
    parse_speculative_config,
    sizes_of,
)
from draftsmith.inference.evaluation.round_times import time_rounds
from draftsmith.inference.evaluation.timing import turns_of
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.round_cost import RoundTimes
from draftsmith.inference.report.schema import OUR_ENGINE, EngineFacts
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.methods import measured_beside, method_options
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.inference.spec_decode.verification.rejection_sampler import AUTO
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import load_drafter, read_drafter_config
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.version import package_version

Prompts = Sequence[Sequence[int]]  # token ids, as serving would send them


def source_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an LLM that say which revision of the target is loaded, and how."""
    names = ("revision", "trust_remote_code")
    return {name: options[name] for name in names if name in options}


@dataclass(frozen=True)
class Drafting:
    """The target and the drafter that are measured.

    model       the target: folder or repository id
    method      the drafter's family, or a training-free method
    drafter     folder or id of the export; None if training-free
    num_speculative_tokens   tokens drafted in a row
    seed        of the engine
    options     further options of an LLM: dtype, device, revision, trust_remote_code, tokenizer
    further     options of speculative_config beside method, model and number: adaptive lengths,
                trees
    """

    model: str
    method: str
    drafter: str | None
    num_speculative_tokens: int
    rows: int
    seed: int
    options: Mapping[str, Any]
    further: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in {"method", "model"} & set(self.further):
            raise ConfigError(
                f"{name} is among them, but the drafter is named elsewhere; expected options of its"
                " drafting, such as enable_adaptive_verification (docs/runtime.md)",
                where="speculative_config",
            )

    @classmethod
    def of(cls, model: str, drafter: str | None, method: str | None, **rest: Any) -> Drafting:
        """Reads the method of an export from its config.json. ConfigError if neither or both are
        given, and for further options that the method does not have."""
        if (drafter is None) == (method is None):
            raise ConfigError(
                "give the folder of an exported drafter, or a training-free method without one",
                where="evaluate",
            )
        if method is None:
            source = source_of(rest["options"])
            layers = target_config(model, **source).num_hidden_layers
            method = read_drafter_config(str(drafter), layers).family
        drafting = cls(model, method, drafter, **rest)
        parse_speculative_config(drafting.speculative_config)
        return drafting

    @property
    def speculative_config(self) -> dict[str, Any]:
        """Options of `speculative_config` that every engine reads alike, as far as there are no
        further ones."""
        config: dict[str, Any] = {"method": self.method}
        if self.drafter is not None:
            config["model"] = self.drafter
        config |= method_options(self.method).measured | measured_beside(self.further)
        config |= self.further
        return config | sizes_of(self.further, self.num_speculative_tokens)

    @property
    def drafts(self) -> MethodOptions:
        """The checked options of `speculative_config`."""
        return parse_speculative_config(self.speculative_config)

    @property
    def depth(self) -> int:
        """Most drafts that a round can accept: of a tree its levels."""
        tree = self.drafts.tree
        return self.drafts.most_drafts if tree is None else tree.depth

    @property
    def source(self) -> dict[str, Any]:
        """The options of an LLM that say which revision of the target is loaded, and how."""
        return source_of(self.options)

    def in_float32(self, rows: int) -> Drafting:
        """The same in float32, for at most `rows` requests at a time."""
        return replace(self, rows=rows, options={**self.options, "dtype": "float32"})

    def load(self) -> tuple[FrozenTarget, Drafter | None]:
        """Target and drafter in this runtime, to replay texts and to judge ties."""
        device = default_device(self.options.get("device"))
        target = load_target(
            self.model, dtype=self.options.get("dtype", "auto"), device=device, **self.source
        )
        if self.drafter is None:
            return target, None
        target = load_target(
            target, read_drafter_config(self.drafter, target.num_layers).tap_layers
        )
        return target, load_drafter(self.drafter, target)


class MeasuredEngine(ABC):
    """One engine with one target and one drafter. `name`: of the engine, in reports."""

    name: ClassVar[str]
    device = torch.device("cpu")  # of the timed work, if this process launches it

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting

    def prepare(self, prompts: Prompts, max_tokens: int) -> None:  # noqa: B027
        """Called first, with every prompt and the longest response. ConfigError for something that
        the engine cannot do."""

    def write(
        self, prompts: Prompts, params: Sequence[SamplingParams], *, speculate: bool, batch: int
    ) -> list[RequestOutput]:
        """The responses with their `metrics`, at most `batch` prompts in flight."""
        outputs = []
        for turn in self.turns(len(prompts), batch):
            part = slice(turn.start, turn.stop)
            outputs += self._write(prompts[part], params[part], speculate)
        return outputs

    def turns(self, count: int, batch: int) -> list[range]:
        """The places of `count` prompts that are given at once, so that at most `batch` are in
        flight: all of them where the engine itself keeps to that."""
        return turns_of(count, count if batch >= self.drafting.rows else batch)

    @abstractmethod
    def _write(
        self, prompts: Prompts, params: Sequence[SamplingParams], speculate: bool
    ) -> list[RequestOutput]:
        """The responses to prompts that are given at once."""

    def time_rounds(
        self, prompts: Prompts, params: Sequence[SamplingParams], batch: int
    ) -> RoundTimes:
        """Rounds timed part by part, `batch` prompts in flight; none, if the engine cannot tell."""
        return RoundTimes()

    @abstractmethod
    def facts(self) -> EngineFacts:
        """Name, version and platform of the engine, once it is prepared."""

    @abstractmethod
    def in_float32(self, rows: int) -> MeasuredEngine | None:
        """The same engine in float32, for at most `rows` prompts in flight; None if it has one
        precision only."""

    @cached_property
    def models(self) -> tuple[FrozenTarget, Drafter | None]:
        """Target and drafter in this runtime. Used after the engine has stopped."""
        return self.drafting.load()

    @property
    def target(self) -> FrozenTarget:
        """The target of `models`."""
        return self.models[0]

    @cached_property
    def runner(self) -> ModelRunner:
        """What ties are judged with: the target of `models`, over rows of no engine."""
        return ModelRunner(self.target, 1, 1)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or the one that the options name."""
        drafting = self.drafting
        return load_tokenizer(drafting.model, drafting.options.get("tokenizer"), **drafting.source)

    def replayed(self, temperature: float) -> bool:
        """True if replay models the drafts: chains of a head that are always as long, sampled above
        temperature 0."""
        if self.drafting.drafter is None or self.drafting.further:
            return False
        return temperature == 0 or self.facts().draft_sample_method == "probabilistic"

    def stop(self) -> None:  # noqa: B027 (most have nothing to do)
        """Frees everything but `models`. No further responses are asked for."""

    def close(self) -> None:
        """Frees everything, `models` included."""
        self.stop()
        self.__dict__.pop("models", None)
        self.__dict__.pop("runner", None)
        free_memory()


class RuntimeEngine(MeasuredEngine):
    """This project's runtime."""

    name = OUR_ENGINE

    def __init__(self, drafting: Drafting) -> None:
        super().__init__(drafting)
        options: dict[str, Any] = {"max_num_seqs": drafting.rows, "seed": drafting.seed}
        # of chains the rule is vLLM's, and the one that the replay expects exactly
        rule = "token" if drafting.drafts.tree is None else AUTO
        config = {"rejection_sample_method": rule, **drafting.speculative_config}
        self.llm = LLM(drafting.model, speculative_config=config, **{**options, **drafting.options})
        self.device = self.llm.engine.target.device

    @cached_property
    def models(self) -> tuple[FrozenTarget, Drafter | None]:
        """The target that is served, and a second drafter, which is replayed."""
        target = self.llm.engine.target
        if self.drafting.drafter is None:
            return target, None
        return target, load_drafter(self.drafting.drafter, target)

    @property
    def target(self) -> FrozenTarget:
        """The target that is served; it loads no second drafter."""
        return self.llm.engine.target

    @property
    def runner(self) -> ModelRunner:
        """The one that served."""
        return self.llm.engine.runner

    @override
    @property
    def tokenizer(self) -> Any:
        """That of the `LLM`, which has it already."""
        return self.llm.get_tokenizer()

    @override
    def facts(self) -> EngineFacts:
        """Of this package; whether rounds are compiled is known after `prepare`."""
        sampled = "probabilistic" if self.drafting.drafter is not None else None
        return EngineFacts(
            name=self.name,
            version=package_version(),
            draft_sample_method=sampled,
            rounds="compiled" if self.llm.engine.compiles else "eager",
        )

    @override
    def prepare(self, prompts: Prompts, max_tokens: int) -> None:
        """Compiles what these prompts need, so that nothing is compiled while it is timed."""
        self.llm.warm_up(longest=max(map(len, prompts)) + max_tokens)

    @override
    def time_rounds(
        self, prompts: Prompts, params: Sequence[SamplingParams], batch: int
    ) -> RoundTimes:
        """Of the first 2 · `batch` prompts; none on a device whose clock cannot be read."""
        return time_rounds(self.llm, prompts, params, batch)

    @override
    def in_float32(self, rows: int) -> RuntimeEngine:
        """A second runtime, which loads its own target; never None."""
        return RuntimeEngine(self.drafting.in_float32(rows))

    @override
    def close(self) -> None:
        """Also frees the `LLM`, whose target `models` shares."""
        del self.llm
        super().close()

    def _write(
        self, prompts: Prompts, params: Sequence[SamplingParams], speculate: bool
    ) -> list[RequestOutput]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, list(params), use_tqdm=False, speculate=speculate)
