"""Quantised exports, held to what they cost in acceptance.

The target writes responses to held-out prompts; on these the exact replay gives the expected
acceptance length of the drafter as it is and of the folder that would take its place. Where that
falls by more than a stated share nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import default_device
from draftsmith.inference.evaluation.evaluate import EvaluationSettings
from draftsmith.inference.evaluation.expected_acceptance import WrittenText, expected_acceptance
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import (
    check_replaceable,
    load_drafter,
    read_drafter_config,
    read_fields,
)
from draftsmith.speculators.export.convert import convert
from draftsmith.speculators.export.quantisation import check_scheme
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline.acceptance_stage import settings_of, workloads
from draftsmith.train.pipeline.evaluate_again import prompts_of_file
from draftsmith.train.pipeline.export_stage import recipe_of, reexport
from draftsmith.train.recipe.recipe import TARGET
from draftsmith.train.recipe.sections import TargetSection

QUANTIZE = "--quantize"


@dataclass(frozen=True)
class HeldOut:
    """The target that judges, the prompts that it answers, and how; `source`: further arguments of
    its loading."""

    model: str
    prompts: Sequence[Sequence[int]]
    settings: EvaluationSettings
    source: Mapping[str, Any]

    @classmethod
    def for_export(cls, folder: str | Path, model: str, file: Path | None) -> HeldOut:
        """For a drafter without its run; `model`: empty is the one that its config.json names.
        ConfigError: there are no prompts, or no target."""
        if file is None:
            raise ConfigError(
                "there is no held-out text to judge the loss by; give --prompts FILE, prompts that"
                " it was not trained on, or the folder of its run in place of the drafter",
                where=QUANTIZE,
            )
        section = read_fields(folder).get("draftsmith") or {}
        model = model or (section.get("target") or {}).get("name_or_path", "")
        if not model:
            raise ConfigError("no target is named that could judge; give --model", where=QUANTIZE)
        settings = EvaluationSettings()
        prompts = prompts_of_file(model, file, settings.prompts_per_workload, settings.max_tokens)
        return cls(model, prompts, settings, {"dtype": "auto"})

    def load(self, tap_layers: Sequence[int]) -> FrozenTarget:
        """The target, on this machine's device."""
        device = default_device(None)
        taps = tuple(tap_layers)
        return FrozenTarget.from_pretrained(
            self.model, tap_layers=taps, device=device, **self.source
        )


@dataclass(frozen=True)
class AcceptanceChange:
    """The expected acceptance length of a drafter before and after; `texts`: how many it is of."""

    before: float
    after: float
    texts: int

    @property
    def loss(self) -> float:
        """The share by which it falls; below 0: it rises."""
        return 1 - self.after / self.before

    def __str__(self) -> str:
        change = f"{self.before:.3f} -> {self.after:.3f} ({-self.loss:+.2%})"
        return f"expected acceptance length {change} on {self.texts} held-out texts"


def quantise_run(
    run_dir: Path,
    out: Path,
    scratch: Path,
    scheme: Literal["int8"],
    max_loss: float,
    *,
    dtype: str = "auto",
    model: str = "",
) -> AcceptanceChange:
    """As `quantise_export`, of a run's best weights, held to the prompts of its recipe's evaluation
    (without any: its validation data). `scratch`: an empty folder. `model`: the target's folder or
    id now, in place of the recipe's."""
    check_scheme(scheme, QUANTIZE)
    check_replaceable(out, run_dir)
    recipe = recipe_of(run_dir, model)
    settings = settings_of(recipe)
    chosen = workloads(recipe, settings, folder=run_dir)
    prompts = [prompt for group in chosen.values() for prompt in group]
    if not prompts:
        raise ConfigError(
            "there is no held-out text to judge the loss by: the recipe has neither"
            " evaluation.prompts nor data.validation; give the run's export and --prompts FILE",
            where=QUANTIZE,
        )
    source = {**recipe.target.source, "dtype": recipe.target.dtype}
    judge = recipe.target.model
    if recipe.joint:  # the target that was trained with it
        judge = str(run_dir / TARGET)
        source["revision"] = None
    held_out = HeldOut(judge, prompts, settings, source)
    plain, _ = reexport(run_dir, scratch / "plain", dtype=dtype, model=model)
    return quantise_export(plain, out, held_out, scheme, max_loss)


def quantise_export(
    plain: str | Path,
    out: Path,
    held_out: HeldOut,
    scheme: Literal["int8"],
    max_loss: float,
    *,
    dtype: str = "auto",
    provenance: dict[str, Any] | None = None,
) -> AcceptanceChange:
    """Writes the drafter of the folder `plain` to `out` with weights in `scheme`, and says what
    that changes. ConfigError, with `out` as it was, if the expected acceptance length falls by more
    than the share `max_loss`."""
    target_layers = TargetSection(model=held_out.model).sketch().num_layers
    config = read_drafter_config(plain, target_layers)
    target = held_out.load(config.tap_layers)
    settings = held_out.settings
    texts = {t: _written(target, held_out, t) for t in settings.temperatures}
    k = _drafts(plain, config, settings)
    before = _expected(target, plain, texts, k, settings)
    changes: list[AcceptanceChange] = []

    def judge(folder: Path) -> None:
        after = _expected(target, folder, texts, k, settings)
        change = AcceptanceChange(before, after, sum(map(len, texts.values())))
        if change.loss > max_loss:
            raise ConfigError(
                f"{scheme} weights lose too much: {change}, and {max_loss:.2%} are allowed"
                f" (--max-acceptance-loss); {out} is as it was",
                where=QUANTIZE,
            )
        changes.append(change)

    convert(
        plain,
        out,
        dtype=dtype,
        provenance=provenance,
        num_target_layers=target.num_layers,
        target=target,
        quantize=scheme,
        judge=judge,
    )
    return changes[0]


def _written(target: FrozenTarget, held_out: HeldOut, temperature: float) -> list[WrittenText]:
    """The target's own responses to the prompts, under the filters that drafts are verified by."""
    settings = held_out.settings
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in held_out.prompts]
    params = settings.sampling(temperature, range(len(prompts)))
    outputs = LLM(target).generate(prompts, params, use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def _drafts(folder: str | Path, config: DrafterConfig, settings: EvaluationSettings) -> int:
    """Drafts of a round: what the export was made for, else the settings' own."""
    section = read_fields(folder).get("draftsmith") or {}
    k = section.get("num_speculative_tokens") or settings.num_speculative_tokens
    return min(k, config.max_drafts or k)


def _expected(
    target: FrozenTarget,
    folder: str | Path,
    texts: Mapping[float, Sequence[WrittenText]],
    k: int,
    settings: EvaluationSettings,
) -> float:
    """The expected acceptance length of a folder's drafter, the mean of all temperatures."""
    drafter = load_drafter(folder, target)
    lengths = []
    for temperature, written in texts.items():
        results = expected_acceptance(
            target, drafter, written, temperature, k, top_p=settings.top_p, top_k=settings.top_k
        )
        lengths.append(sum(results, ReplayResult()).expected_acceptance_length)
    return sum(lengths) / len(lengths)
