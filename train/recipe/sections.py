"""The sections of a recipe: every key a user can write, its meaning and its default.

Those about text are in `data_sections.py`, the keys of a drafter in its family's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from draftsmith.inference.evaluation.suites import SUITES, default_path
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import split_revision
from draftsmith.speculators.options import Count, NonEmptyText, PositiveInt, Section, Share
from draftsmith.train.recipe.data_sections import Dtype, EndpointSection, Source

if TYPE_CHECKING:
    import torch

    from draftsmith.speculators.target.info import TargetSketch

MAX_SEED = 2**32 - 1  # of NumPy's generators


class TargetSection(Section):
    """The frozen model whose distribution is preserved."""

    model: NonEmptyText
    """folder or Hugging Face id of the target; org/name@revision gives the revision too"""
    adapter: NonEmptyText | None = None
    """folder or Hugging Face id of a peft adapter of the target (a LoRA); merged into the target,
    which is written to <output_dir>/target and is the target of this run"""
    dtype: Dtype = "auto"
    """auto: as its config says, but float32 for bfloat16 on a CPU without instructions for it"""
    revision: NonEmptyText | None = None
    """branch, tag or commit on the hub; null: the default branch"""
    trust_remote_code: bool = False
    """run Python code of the checkpoint, which can do anything"""

    sharding: Literal["none", "fsdp"] = "none"
    """none: every process holds all of it; fsdp: a part of every layer, gathered while it
    computes"""

    @model_validator(mode="before")
    @classmethod
    def _revision_beside(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("model"), str):
            try:
                name, revision = split_revision(value["model"], value.get("revision"))
            except ConfigError as error:
                raise ValueError(str(error)) from None
            value = {**value, "model": name, "revision": revision}
        return value

    @property
    def source(self) -> dict[str, Any]:
        """Keywords of what loads it by its name."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def sketch(self, device: torch.device | str | None = None) -> TargetSketch:
        """The target's sizes, by its config.json. `device`: to run on; None: this machine's."""
        from draftsmith.speculators.target.info import sketch_target

        return sketch_target(self.model, dtype=self.dtype, device=device, **self.source)

    def load_tokenizer(self) -> Any:
        """The target's tokenizer."""
        from draftsmith.inference.entrypoints.loading import load_tokenizer

        advice = "give a folder with the target's tokenizer, or a repository id, as target.model"
        return load_tokenizer(self.model, None, **self.source, advice=advice)


BUDGETS = ("steps", "epochs", "max_minutes")  # of training; one of them at least


# A preset has a value for each of TUNED, which stands where the recipe leaves the key null. What
# papers publish belongs to some 10^5 steps; shorter runs take the family's `short_training`.
SHORT_RUN = 20_000  # steps
PRESETS = {
    "published": "what the family's paper takes for some 10^5 steps",
    "short": f"for runs of fewer than {SHORT_RUN:,} steps",
    "short_adamw": f"for runs of fewer than {SHORT_RUN:,} steps without Muon",
}
SHORT_MINUTES = 24 * 60  # where a budget has no steps
# AdamW's rate in `short_adamw`, unless the published one is higher: amid the published ones, 1e-4
# to 1e-3, and not measured. That of `short` is for the weights that Muon leaves.
SHORT_ADAMW_RATE = 5e-4
TUNED = ("optimizer", "learning_rate", "muon_learning_rate", "max_grad_norm", "warmup_ratio")


class TrainingSection(Section):
    """The optimiser and the loop."""

    steps: PositiveInt | None = None
    """optimiser steps; instead of epochs"""
    epochs: float | None = Field(None, gt=0)
    """passes over the data; 2 if no budget is given: heads overfit small data after a few"""
    max_minutes: float | None = Field(None, gt=0)
    """stop after this many minutes of training, of which the fit of the start is part"""
    batch_size: PositiveInt = 8
    """packed rows of data.max_length tokens per process and micro-step"""
    gradient_accumulation_steps: PositiveInt = 1
    """micro-steps per step; the loss is a mean over all their valid tokens"""
    global_batch_size: PositiveInt | None = None
    """rows per step over all processes; null: batch_size x processes x
    gradient_accumulation_steps"""
    preset: Literal["auto", "published", "short", "short_adamw"] = "auto"
    """the values of optimizer, learning_rate, muon_learning_rate, warmup_ratio and max_grad_norm,
    each where that key is null (--dry-run shows them); published: what the family's paper takes for
    some 10^5 steps; short: what suits few steps, Muon for most families; short_adamw: the same with
    AdamW for all weights; auto: short below 20,000 steps, or 24 hours where there are no steps, and
    published for a joint training"""
    optimizer: Literal["adamw", "muon"] | None = None
    """muon: for the layers' matrices, AdamW for the rest, mostly fewer steps; adamw: for all, and
    preset: short_adamw has a rate for it; null: the preset's"""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """AdamW's peak learning rate; EAGLE-3's is 1e-4; null: the preset's"""
    muon_learning_rate: float | None = Field(None, gt=0, le=1)
    """Muon's peak learning rate; same schedule; null: the preset's"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decay; none, a head is small and trained briefly"""
    warmup_ratio: Share | None = None
    """part of the run, behind the fit of a start, that warms the learning rate up; a cosine to
    zero after; null: the preset's"""
    max_grad_norm: float | None = Field(None, gt=0)
    """gradient clipping; 0.5 in every EAGLE paper; null: the preset's"""
    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """autocast of the head; its weights are fp32; auto: bf16 where the device computes in it"""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """seed of initialisation and sampling order"""
    eval_every: PositiveInt | None = None
    """steps between held-out evaluations; null: ten a run"""
    save_every: PositiveInt | None = None
    """steps between checkpoints; null: with every evaluation"""
    save_minutes: float | None = Field(30.0, gt=0)
    """a checkpoint also after this many minutes without one; null: none. The newest two are
    kept"""
    keep_features_gb: float = Field(0.0, ge=0)
    """memory for features of training rows, which later epochs then read; 0: none"""
    keep_features_on: Literal["device", "host"] = "device"
    """where that memory is: the device's, or the host's, from which rows are copied as they are
    needed"""
    activation_checkpointing: bool = False
    """compute each depth again in the backward pass; for long rows"""

    def is_short(self, steps: int | None) -> bool:
        """True for a run that the published values are not for. `steps`: of the run; None: not
        known, as with a budget of minutes."""
        if steps is not None:
            return steps < SHORT_RUN
        return self.max_minutes is not None and self.max_minutes < SHORT_MINUTES

    @model_validator(mode="before")
    @classmethod
    def _budget(cls, value: Any) -> Any:
        if isinstance(value, dict) and "settings" in value and "preset" not in value:
            value = _with_preset(value)
        if isinstance(value, dict) and all(value.get(key) is None for key in BUDGETS):
            value = {**value, "epochs": 2.0}
        return value

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("expected steps or epochs, got both; set one of them to null")
        if self.global_batch_size is not None and self.gradient_accumulation_steps != 1:
            raise ValueError("gradient_accumulation_steps follows from global_batch_size")
        return self


def _with_preset(section: dict[str, Any]) -> dict[str, Any]:
    """The section under today's name of the key, which older recipes call `settings`."""
    preset = "published" if section["settings"] == "given" else section["settings"]
    rest = {key: value for key, value in section.items() if key != "settings"}
    return {"preset": preset, **rest}


class RunTraining(TrainingSection):
    """The training of a run whose length is known: none of TUNED is null. The defaults are
    published for EAGLE-3, and stand for families that name no others."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-4, gt=0, le=1)
    muon_learning_rate: float = Field(0.02, gt=0, le=1)
    warmup_ratio: Share = 0.02
    max_grad_norm: float = Field(0.5, gt=0)

    def describe(self) -> str:
        """The optimizer, its rates, and the preset that they are from, with the reason for it."""
        rates = f"AdamW at {self.learning_rate:g}"
        if self.optimizer == "muon":
            rates = f"Muon at {self.muon_learning_rate:g} for matrices, {rates} for the rest"
        else:
            rates += " for all weights"
        return (
            f"{rates}, clipping {self.max_grad_norm:g}, warm-up {self.warmup_ratio:.1%}: preset"
            f" {self.preset}, {PRESETS[self.preset]}, except for what the recipe names itself"
            " (training.preset)"
        )


class JointSection(Section):
    """A LoRA on the target's linear layers, trained together with the heads."""

    r: PositiveInt = 16
    """rank of the LoRA"""
    alpha: PositiveInt = 32
    """scale of the LoRA: alpha / r"""
    heads_loss_weight: float = Field(0.2, gt=0)
    """weight of the heads' loss at its highest; Medusa-2's 0.2"""
    heads_schedule: Literal["sine", "constant"] = "sine"
    """growth of that weight: a quarter of a sine, or at once"""
    head_lr_multiplier: float = Field(4.0, gt=0)
    """training.learning_rate (the heads') divided by the LoRA's"""
    export: Literal["merged", "adapter"] = "merged"
    """write the target with the LoRA merged, or the adapter alone"""


def _float_weights(loss: dict[str, Any]) -> dict[str, Any]:
    return {name: float(term) if type(term) is int else term for name, term in loss.items()}


# divergences and their weights or options
LossTerms = Annotated[dict[str, Any], AfterValidator(_float_weights)]


class OnPolicySection(Section):
    """Texts that the drafter in training has a part in, in place of part of the data: a draft model
    with the target's vocabulary writes them, any other drafter drafts for the target."""

    share: Share = 1.0
    """probability that a micro-step learns from them"""
    max_new_tokens: PositiveInt = 256
    """longest response of a rollout, within data.max_length"""
    prompts: PositiveInt = 64
    """texts per refresh, over all processes; prompts are those of data.train"""
    refresh_every: PositiveInt = 50
    """steps after which texts are written anew, if a step needs any"""


class StageSection(Section):
    """A stage of a training: what differs from the recipe. It goes on from the one before."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """names the stage's checkpoints"""
    data: dict[str, Any] = Field({})
    """keys of data that differ"""
    regenerate: dict[str, Any] = Field({})
    """keys of regenerate that differ"""
    drafter: dict[str, Any] = Field({})
    """keys of drafter that differ; its shape cannot"""
    loss: dict[str, Any] | None = None
    """the stage's loss; null: the recipe's"""
    training: dict[str, Any] = Field({})
    """keys of training that differ"""
    on_policy: dict[str, Any] | None = None
    """keys of on_policy that differ, {} for defaults; null: as before"""


class ExportSection(Section):
    """The drafter's formats, and its upload."""

    formats: list[Literal["vllm", "speculators", "sglang", "transformers"]] = Field(
        ["vllm"], min_length=1
    )
    """(docs/serve.md) the first is written to `export`, others to `export-<format>` beside it"""
    dtype: Dtype = "auto"
    """precision of the exported weights; auto: the target checkpoint's"""
    push_to_hub: NonEmptyText | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """org/name of the private repository to upload to once the gates are passed; null: none"""


class VllmSection(Section):
    """How vLLM is run for the acceptance report."""

    options: dict[str, Any] = Field({})
    """options of its LLM, such as tensor_parallel_size"""
    speculative_config: dict[str, Any] = Field({})
    """options such as draft_tensor_parallel_size"""


class EvaluationSection(Section):
    """The acceptance report: the exported head, measured in the runtime."""

    prompts: list[Source] = Field([])
    """sources of the prompts, grouped by workload; empty: data.validation"""
    suites: dict[NonEmptyText, NonEmptyText | None] = Field(
        {},
        description=(
            "(docs/evaluate.md) suites that are measured too, each with its file's path, or a list"
            " of names: "
        )
        + ", ".join(SUITES),
    )
    suite_prompts: PositiveInt | None = None
    """conversations taken of each category of a suite; null: all"""
    engines: list[Literal["draftsmith", "vllm"]] = Field(["draftsmith"], min_length=1)
    """vllm needs DRAFTSMITH_VLLM_PYTHON, and is skipped without it unless a gate needs it, or it
    stands alone, for a target that this runtime cannot decode"""
    vllm: VllmSection = VllmSection()
    """how vLLM is run, if it is"""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 1.0], min_length=1)
    """sampling temperatures to measure at"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus of the sampled runs; 1: off"""
    top_k: Count = 0
    """most likely tokens kept in the sampled runs; 0: off"""
    num_speculative_tokens: PositiveInt = 4
    """tokens drafted per verification; of a tree that grows, its levels"""
    speculative_config: dict[str, Any] = Field({})
    """further options of drafting, such as enable_adaptive_verification or speculative_eagle_topk
    (docs/runtime.md); empty: chains of num_speculative_tokens, whose acceptance is also expected by
    replay"""
    max_tokens: PositiveInt = 128
    """longest response"""
    timed_prompts: PositiveInt = 3
    """least prompts of a timed pass, the same ones in every repeat"""
    timed_tokens: PositiveInt = 500
    """least tokens of a timed pass; more prompts are timed until there are as many"""
    repeats: Count = 3
    """timed passes with drafting and without, in turns, for medians; 0: none is taken"""
    prompts_per_workload: PositiveInt = 16
    """prompts taken of each workload"""
    batch_size: PositiveInt = 1
    """requests in flight; one shows latency, more show throughput"""
    lossless_check: bool = True
    """compare tokens with and without drafting, in float32"""

    @field_validator("suites", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        """A list of names; null is none."""
        names = [] if value is None else value
        if not isinstance(names, list | dict):
            raise ValueError(f"expected a list of names or name: path, got {value!r}")
        if unknown := [name for name in names if name not in list(SUITES)]:
            raise ValueError(f"expected names of {', '.join(SUITES)}, got '{unknown[0]}'")
        return dict.fromkeys(names) if isinstance(names, list) else names

    @field_validator("temperatures")
    @classmethod
    def _each_is_measured_once(cls, temperatures: list[float]) -> list[float]:
        if len(set(temperatures)) < len(temperatures):
            raise ValueError(f"expected each temperature once, got {temperatures}")
        return temperatures

    @model_validator(mode="after")
    def _drafting_is_ours(self) -> EvaluationSection:
        if self.speculative_config and self.engines != ["draftsmith"]:
            raise ValueError(
                "speculative_config: options of this runtime's drafting, but engines names vllm;"
                " measure with draftsmith alone"
            )
        return self

    @property
    def suite_paths(self) -> dict[str, str]:
        """The path of every suite that is measured."""
        return {name: path or default_path(name) for name, path in self.suites.items()}


class Gate(Section):
    """A bound on one measured figure; missing it makes the run exit non-zero."""

    min: float | None = None
    """smallest value that passes"""
    max: float | None = None
    """largest value that passes"""


# Every figure that a gate may name. Those of a temperature may be preceded by it, "t0." or "t0.7.";
# without one the bound holds at every temperature of the evaluation.
GATES = ("lossless_mismatches", "expected_measured_gap", "vllm_gap")  # over all temperatures
GATES_OF_TEMPERATURES = (
    "acceptance_length",
    "speedup_vs_autoregressive",
    "expected_measured_gap",
    "vllm_gap",
)


class FeaturesSection(Section):
    """The target's features of training rows. Only `mode: cache` reads `encoding`."""

    mode: Literal["online", "cache"] = "online"
    """online: computed when a step needs them; cache: written to disk once, then read"""
    overlap: bool = True
    """on CUDA, those that are computed here are computed on a second stream, while the head trains
    on the rows before; holds the features of one more micro-step"""
    encoding: Literal["exact", "bf16", "rotated"] = "bf16"
    """how states are written; exact: in the target's dtype, rotated: a quarter of bf16;
    docs/training.md has sizes and losses"""
    dir: NonEmptyText | None = None
    """folder of the cache, and of held-out texts' features where servers give them; recipes may
    share it, all machines must see it; null: `features` in the run's folder"""
    engine: Literal["draftsmith", "vllm"] = "draftsmith"
    """draftsmith: this process; vllm: its hidden-state extraction, at `endpoints`, or started here
    to fill a cache"""
    vllm_options: dict[str, Any] = Field({})
    """options of vLLM's LLM where it is started here, such as tensor_parallel_size"""
    endpoints: list[EndpointSection] = Field([])
    """vLLM servers that give the states, each a URL or a mapping; `draftsmith serving-args` prints
    their command"""
    states_dir: NonEmptyText | None = None
    """folder that the servers write states to and all processes of the run read; null: shared
    memory of this machine"""
    mooncake: NonEmptyText | None = None
    """HOST:PORT of a Mooncake master, through which the states come instead of through files, for
    servers on other machines; needs the package mooncake-transfer-engine"""
    unread_gb: float = Field(4.0, gt=0)
    """states of a process that servers may have under way or unread, at most"""

    @model_validator(mode="after")
    def _servers_are_vllm(self) -> FeaturesSection:
        if self.endpoints and self.engine != "vllm":
            raise ValueError("endpoints: these are vLLM servers; set features.engine: vllm")
        if self.engine == "vllm" and self.mode == "online" and not self.endpoints:
            raise ValueError(
                "engine: vllm gives features step by step at servers alone; name them in"
                " features.endpoints, or set features.mode: cache"
            )
        return self
