"""The recipe: one YAML file that describes a run, checked before anything is loaded.

`Recipe` checks that its sections agree; the sections themselves are in `sections.py` and
`data_sections.py`. `load.py` reads one from a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.options import AUTO, DrafterOptions, NonEmptyText, Section
from draftsmith.speculators.registry import FAMILIES, family_class
from draftsmith.train.losses.divergences import Mix
from draftsmith.train.losses.position_weights import PositionWeights
from draftsmith.train.recipe.data_sections import DataSection, RegenerateSection
from draftsmith.train.recipe.schema import SchemaRow, explain, schema_rows
from draftsmith.train.recipe.sections import (
    BUDGETS,
    GATES,
    GATES_OF_TEMPERATURES,
    SHORT_ADAMW_RATE,
    TUNED,
    EvaluationSection,
    ExportSection,
    FeaturesSection,
    Gate,
    JointSection,
    LossTerms,
    OnPolicySection,
    RunTraining,
    StageSection,
    TargetSection,
    TrainingSection,
)

# Names of what a run leaves in its folder.
RECIPE = "recipe.yaml"  # resolved: every key, every default
EXPORT = "export"  # the drafter in the recipe's first format
TARGET = "target"  # the target, where it was trained as well
REPORT = "acceptance.json"
PAGE = "report.html"

DEFAULT_FAMILY = "eagle3"
EVAL_TEXTS = 128  # of a held-out evaluation, over all temperatures and workloads
ONE_VALUE = ("loss", "position_weights")  # mappings that are replaced as a whole


class Recipe(Section):
    """Everything about one run. The recipe of a family is `recipe_class(family)`."""

    family_defaults: ClassVar[Mapping[str, Any]] = {}

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*$")
    """name of the run; its folder is runs/<name>"""
    output_dir: NonEmptyText = "runs/<name>"
    """where everything the run writes goes"""
    family: NonEmptyText = DEFAULT_FAMILY
    """kind of drafter, as registered in speculators.registry.FAMILIES"""
    target: TargetSection
    """the frozen model to draft for"""
    drafter: DrafterOptions = DrafterOptions()
    """the trained head; its keys are the family's"""
    data: DataSection
    """conversations to train and validate on"""
    regenerate: RegenerateSection = RegenerateSection()
    """responses rewritten by the target"""
    features: FeaturesSection = FeaturesSection()
    """the target's features of training rows: made as they are needed, or kept on disk"""
    loss: LossTerms = Field({"forward_kl": 1.0})
    """divergences by name, each a weight or {weight: ..., option: ...}; KL converges fastest from
    scratch"""
    position_weights: dict[str, float | bool] = Field({"step_decay": 0.8})
    """weights of the depths of a chain in the loss: {step_decay: d}, {gamma: g}, {uniform: true} or
    {d_pace: alpha}"""
    training: TrainingSection = TrainingSection()
    """optimiser and loop"""
    joint: JointSection | None = None
    """train the target along with the heads (Medusa-2), in the last stage if there are several;
    what is served is then the trained target; null: it is frozen"""
    on_policy: OnPolicySection | None = None
    """train some steps on text generated with the current drafter; null: on the data only"""
    stages: list[StageSection] = Field([])
    """stages of training one after the other, each with the keys that differ; empty: one stage"""
    export: ExportSection = ExportSection()
    """formats to write"""
    evaluation: EvaluationSection = EvaluationSection()
    """the acceptance report"""
    gates: dict[str, Gate] = Field({})
    """bounds on measured results, such as t0.acceptance_length: {min: 3.0}; empty: nothing is
    gated"""
    trackers: list[Literal["wandb", "trackio", "tensorboard"]] = Field([])
    """where curves are sent besides the run's folder; none or []: nowhere"""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        """The folder of the run, and the family's defaults where the recipe says nothing; those of
        ONE_VALUE are one value each."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if value.get("output_dir") is None and isinstance(value.get("name"), str):
            value["output_dir"] = f"runs/{value['name']}"
        for name, default in cls.family_defaults.items():
            section = value.get(name)
            if name not in value:
                value[name] = default
            elif isinstance(section, dict) and name not in ONE_VALUE:
                value[name] = {**default, **section}
        return value

    @field_validator("family")
    @classmethod
    def _registered(cls, name: str) -> str:
        if name not in FAMILIES:
            raise ValueError(f"expected one of {', '.join(FAMILIES)}, got '{name}'")
        return name

    @field_validator("trackers", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return [] if value in ("none", ["none"], None) else value

    @model_validator(mode="after")
    def _losses_are_known(self) -> Recipe:
        try:
            Mix.parse(self.loss)
            PositionWeights.parse(self.position_weights)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _gates_are_measured(self) -> Recipe:
        if unknown := sorted(set(self.gates) - self.gate_names()):
            known = ", ".join(sorted(self.gate_names())) or "nothing"
            raise ValueError(
                f"gates.{unknown[0]}: this evaluation does not measure it; it measures {known}"
            )
        return self

    def gate_names(self) -> set[str]:
        """The names of the figures that the evaluation measures."""
        e = self.evaluation
        if not self.measured:
            return set()
        alone = [f"t{t:g}.{name}" for t in e.temperatures for name in GATES_OF_TEMPERATURES]
        names = {*GATES, *GATES_OF_TEMPERATURES, *alone}
        if not e.lossless_check:
            names.remove("lossless_mismatches")
        if len(e.engines) < 2:
            names = {name for name in names if not name.endswith("vllm_gap")}
        if e.speculative_config:
            names = {name for name in names if not name.endswith("expected_measured_gap")}
        return names

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        """What changes the target excludes what keeps its features, and the processes of a sharded
        target run it the same number of times."""
        parts = {
            "joint": self.joint is not None,
            "on_policy": self.on_policy is not None,
            "stages": bool(self.stages),
            "training.keep_features_gb": bool(self.training.keep_features_gb),
            "features.mode": self.features.mode == "cache",
            "features.endpoints": bool(self.features.endpoints),
            "target.adapter": self.target.adapter is not None,
        }
        joint = ["target.adapter", "training.keep_features_gb"]
        joint += ["features.mode", "features.endpoints"]
        if not self.stages:  # else on_policy and joint are stages of their own
            joint.append("on_policy")
        excluded = [name for name in joint if parts[name]]
        if self.joint is not None and excluded:
            raise ValueError(
                f"{excluded[0]}: not with joint, which changes the target at every step"
            )
        del parts["target.adapter"], parts["features.endpoints"]
        alone = [name for name in parts if parts[name]]
        if self.target.sharding != "none" and alone:
            raise ValueError(
                f"target.sharding: not with {alone[0]}, where some processes run the target alone"
            )
        return self

    @model_validator(mode="after")
    def _engines_load_the_target(self) -> Recipe:
        adapter = self.joint is not None and self.joint.export == "adapter"
        if adapter and "vllm" in self.evaluation.engines:
            raise ValueError(
                "joint.export: adapter is a folder that vLLM does not load as a target; say merged,"
                " or take vllm out of evaluation.engines"
            )
        return self

    @model_validator(mode="after")
    def _vocabulary_can_be_measured(self) -> Recipe:
        if getattr(self.drafter, "draft_vocab_size", None) != AUTO:
            return self
        elsewhere = {
            "features.endpoints": bool(self.features.endpoints),
            "target.sharding": self.target.sharding != "none",
        }
        for key in (key for key, used in elsewhere.items() if used):
            raise ValueError(
                "drafter.draft_vocab_size: auto times steps of the target in one process, which has"
                f" no whole target with {key}; give a number of tokens"
            )
        return self

    @model_validator(mode="after")
    def _stages_are_recipes(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: each needs a name of its own, got {', '.join(names)}")
        fixed = set(type(self.drafter).model_fields) & set(
            family_class(self.family).config_class.model_fields
        )
        for i, stage in enumerate(self.stages):
            if shaped := sorted((fixed | {"init_from"}) & set(stage.drafter)):
                raise ValueError(
                    f"stages.{i}.drafter.{shaped[0]}: a later stage goes on with the same head"
                )
            try:
                self.stage(i)
            except ValidationError as error:
                raise ValueError(f"stages.{i}: {explain(error, type(self))}") from None
        return self

    @property
    def measured(self) -> bool:
        """True if there is anything to measure the drafter on."""
        return bool(self.evaluation.prompts or self.data.validation or self.evaluation.suites)

    @property
    def trains_with_decoder(self) -> bool:
        """True if the training itself runs the target's decoder; else it needs the target's
        embedding, final norm and output head alone."""
        parts = [part for _, part in self.training_stages()]
        computes = any(p.features.mode == "online" and not p.features.endpoints for p in parts)
        return computes or any(p.joint is not None or p.on_policy is not None for p in parts)

    @property
    def writes_with_decoder(self) -> bool:
        """True if responses or features that are missing are written by the target here."""
        responses = bool(self.regenerate.enabled or self.data.validation)
        features = self.features.mode == "cache" and self.features.engine == "draftsmith"
        return features or (responses and not self.regenerate.endpoints)

    def drafter_writes(self) -> bool:
        """True if the drafter writes the texts of `on_policy` by itself, False: the target does."""
        same_vocabulary = getattr(self.drafter, "vocab", "same") == "same"
        return same_vocabulary and family_class(self.family).traits.writes

    def preset_for(self, steps: int | None) -> str:
        """The preset of a run of `steps` (None: not known), a key of PRESETS."""
        training = self.training
        if training.preset != "auto":
            return training.preset
        short = training.is_short(steps) and self.joint is None
        return "short" if short else "published"

    def training_for(self, steps: int | None) -> RunTraining:
        """The training of a run of `steps` (None: not known): of TUNED those values that the recipe
        names, and for the others, one by one, the preset's."""
        preset = self.preset_for(steps)
        tree = self.training.model_dump()
        named = {key: value for key, value in tree.items() if key not in TUNED or value is not None}
        values = preset_values(self.family, preset)
        return RunTraining.model_validate(values | named | {"preset": preset})

    def for_steps(self, steps: int | None) -> Recipe:
        """The recipe with the preset of a run of `steps` written out (None: not known)."""
        return self.model_copy(update={"training": self.training_for(steps)})

    def resolved(self) -> Recipe:
        """The recipe with its preset written out, if its length is known before its data is:
        stages have their own, and epochs are counted in rows."""
        training = self.training
        counted = training.preset != "auto" or training.epochs is None
        return self if self.stages or not counted else self.for_steps(training.steps)

    def stage(self, number: int) -> Recipe:
        """The recipe of one stage, which has none of its own."""
        stage = self.stages[number]
        tree = self.model_dump(mode="json", exclude={"stages"})
        if any(stage.training.get(budget) is not None for budget in BUDGETS):
            tree["training"] |= dict.fromkeys(BUDGETS)
        for name in ("data", "regenerate", "drafter", "training"):
            tree[name] |= getattr(stage, name)
        tree["loss"] = stage.loss or tree["loss"]
        if stage.on_policy is not None:
            tree["on_policy"] = (tree["on_policy"] or {}) | stage.on_policy
        if number < len(self.stages) - 1:
            tree["joint"] = None
        return type(self).model_validate(tree).resolved()

    @property
    def held_out_prompts(self) -> int:
        """Validation prompts that a held-out evaluation reads at each temperature."""
        return -(-EVAL_TEXTS // len(self.evaluation.temperatures))

    def training_stages(self) -> list[tuple[str, Recipe]]:
        """(name, recipe) of every stage; of the whole, unnamed, if there is one only."""
        return [(stage.name, self.stage(i)) for i, stage in enumerate(self.stages)] or [("", self)]

    def checkpoints(self, stage: str = "") -> Path:
        """The folder of a stage's checkpoints, by default of the last; without stages there is
        one."""
        root = Path(self.output_dir) / "checkpoints"
        return root / (stage or self.stages[-1].name) if self.stages else root

    def resolved_yaml(self) -> str:
        """The recipe with every default written out; loading it gives this recipe again."""
        return yaml_text(self.model_dump(mode="json"))

    def recipe_hash(self) -> str:
        """sha256 (hex) of the resolved recipe: equal exactly when all values are."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def preset_values(family: str, preset: str) -> dict[str, Any]:
    """The value of each of TUNED in a preset, a key of PRESETS, of a family."""
    kind = family_class(family)
    values: dict[str, Any] = {key: RunTraining.model_fields[key].default for key in TUNED}
    published = kind.traits.defaults.get("training", {})
    values |= {key: value for key, value in published.items() if key in TUNED}
    published_rate = values["learning_rate"]
    if preset != "published":
        values |= kind.traits.short_training
    if preset == "short_adamw" and values["optimizer"] == "muon":
        rate = max(published_rate, SHORT_ADAMW_RATE)
        values |= {"optimizer": "adamw", "learning_rate": rate}
    return values


def yaml_text(tree: Mapping[str, Any]) -> str:
    """A mapping of plain data as YAML 1.2, in its order."""
    return _dump(tree, flow=False, width=100)


def yaml_line(value: Any) -> str:
    """Plain data as YAML 1.2 on one line. Text that YAML would read as something else is quoted,
    such as a folder `runs/head #2` or a name `null`."""
    return _dump(value, flow=True, width=sys.maxsize).removesuffix("\n...\n").rstrip("\n")


def _dump(value: Any, *, flow: bool, width: int) -> str:
    from ruamel.yaml import YAML  # of the extra `train`, without which `inspect` reads this file

    writer: Any = YAML(typ="safe", pure=True)
    text = io.StringIO()
    writer.default_flow_style = flow
    writer.width = width
    writer.sort_base_mapping_type_on_output = False
    writer.dump(value, text)
    return text.getvalue()


@cache
def recipe_class(family: str = DEFAULT_FAMILY) -> type[Recipe]:
    """The recipe of a family: its keys under `drafter`, and its published defaults elsewhere."""
    if family not in FAMILIES:
        return Recipe  # which refuses it by name
    drafter = family_class(family)
    options: Any = (
        drafter.options,
        Field(drafter.options(), description=Recipe.model_fields["drafter"].description),
    )
    model = create_model("Recipe", __base__=Recipe, drafter=options)
    model.family_defaults = _section_defaults(drafter.traits.defaults)
    return model


def _section_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The published defaults of a family, without those that a preset has."""
    training = {k: v for k, v in defaults.get("training", {}).items() if k not in TUNED}
    return {**defaults, "training": training}


def make_recipe(tree: Mapping[str, Any]) -> Recipe:
    """The recipe of a mapping. Raises pydantic's ValidationError."""
    return recipe_class(family_of(tree)).model_validate(tree).resolved()


def family_of(tree: Any) -> str:
    """The family that the mapping of a recipe names, or the default one."""
    family = tree.get("family", DEFAULT_FAMILY) if isinstance(tree, Mapping) else DEFAULT_FAMILY
    return family if isinstance(family, str) else DEFAULT_FAMILY


def describe_schema(family: str = DEFAULT_FAMILY) -> list[SchemaRow]:
    """Every key in file order: dotted name (`[]` a list item, `<name>` any key), type, default,
    meaning.

    The keys under `drafter` and the published defaults are those of `family`. A section that
    several keys share is spelled out at the first of them."""
    if family not in FAMILIES:
        raise ConfigError(f"expected one of {', '.join(FAMILIES)}", where=f"family {family}")
    rows = schema_rows(recipe_class(family))
    defaults = recipe_class(family).family_defaults
    published = {".".join(keys): value for keys, value in _leaves(defaults)} | {"family": family}
    return [row._replace(default=str(published.get(row.name, row.default))) for row in rows]


def _leaves(
    tree: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, value) of a tree of defaults; those of ONE_VALUE are one value each."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in ONE_VALUE:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), json.dumps(value)
