"""The recipe: one YAML file that says everything about a run, checked before anything is loaded.

`load_recipe` reads, applies `section.key=value` overrides and validates; every error names the file (or the
command line), the key, what was expected and what was found. `describe_schema` is the manual of all keys.
Must not know: models, data, devices. The sections themselves are in `train.recipe_sections`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from speculators.drafter import FAMILIES, family_class
from speculators.errors import ConfigError
from speculators.options import DrafterOptions, Section, Text
from train import recipe_yaml
from train.divergences import Mix
from train.recipe_data import DataSection, RegenerateSection
from train.recipe_on_policy import OnPolicySection
from train.recipe_sections import (
    BUDGETS,
    EvaluationSection,
    ExportSection,
    Gate,
    JointSection,
    Stage,
    TargetSection,
    TrainingSection,
    split_gate,
)

DEFAULT_FAMILY = "eagle3"


class Recipe(Section):
    """Everything about one run. The recipe of a family is `recipe_class(family)`."""

    family_defaults: ClassVar[Mapping[str, Any]] = {}

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*$",
        description="name of the run; its folder is runs/<name>",
    )
    output_dir: Text = Field("runs/<name>", description="where everything the run writes goes")
    family: Text = Field(DEFAULT_FAMILY, description="kind of drafter, as registered in speculators.drafter.FAMILIES")
    target: TargetSection = Field(description="the frozen model to draft for")
    drafter: DrafterOptions = Field(
        default_factory=lambda: DrafterOptions.model_validate({}),
        description="the trained head; its keys are the family's",
    )
    data: DataSection = Field(description="conversations to train and validate on")
    regenerate: RegenerateSection = Field(
        default_factory=lambda: RegenerateSection.model_validate({}), description="responses rewritten by the target"
    )
    loss: dict[str, Any] = Field(
        default_factory=lambda: {"forward_kl": 1.0},
        description="divergences by name, each a weight or {weight: ..., option: ...}; KL converges "
        "fastest from scratch",
    )
    training: TrainingSection = Field(
        default_factory=lambda: TrainingSection.model_validate({}), description="optimiser and loop"
    )
    joint: JointSection | None = Field(
        None,
        description="train the target along with the heads (Medusa-2), in the last stage if there are several; what is "
        "served is then the trained target; null: it is frozen",
    )
    on_policy: OnPolicySection | None = Field(
        None,
        description="learn part of the steps from texts that the drafter in training had a part in; null: from data",
    )
    stages: list[Stage] = Field(
        default_factory=list,
        description="stages of training one after the other, each with the keys that differ; empty: one stage",
    )
    export: ExportSection = Field(
        default_factory=lambda: ExportSection.model_validate({}), description="formats to write"
    )
    evaluation: EvaluationSection = Field(
        default_factory=lambda: EvaluationSection.model_validate({}), description="the acceptance report"
    )
    gates: dict[str, Gate] = Field(
        default_factory=dict,
        description="bounds on measured figures, such as t0.acceptance_length: {min: 3.0}; empty: nothing is gated",
    )
    trackers: list[Literal["wandb", "tensorboard"]] = Field(
        default_factory=list,
        description="where curves are sent besides the run's folder; none or []: nowhere",
    )
    project: Text = Field("draftsmith", description="project name shown in the trackers")

    @model_validator(mode="before")
    @classmethod
    def _published(cls, value: Any) -> Any:
        """The family's defaults where the recipe says nothing; `loss` is one value."""
        if isinstance(value, dict):
            for name, default in cls.family_defaults.items():
                given = value.get(name)
                if given is None:
                    value = {**value, name: default}
                elif isinstance(given, dict) and name != "loss":
                    value = {**value, name: {**default, **given}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _output_dir(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("output_dir") is None and isinstance(value.get("name"), str):
            value = {**value, "output_dir": f"runs/{value['name']}"}
        return value

    @field_validator("family")
    @classmethod
    def _registered(cls, name: str) -> str:
        if name not in FAMILIES:
            raise ValueError(f"expected one of {', '.join(FAMILIES)}, got '{name}'")
        return name

    @field_validator("loss")
    @classmethod
    def _weights_are_floats(cls, loss: dict[str, Any]) -> dict[str, Any]:
        return {name: float(term) if type(term) is int else term for name, term in loss.items()}

    @field_validator("trackers", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return [] if value in ("none", ["none"], None) else value

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        try:
            Mix.parse(self.loss)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        for name in self.gates:
            try:
                temperature, _ = split_gate(name)
            except ValueError as error:
                raise ValueError(f"gates.{name}: {error}") from None
            if temperature is not None and temperature not in self.evaluation.temperatures:
                raise ValueError(
                    f"gates.{name}: nothing is measured at temperature {temperature:g}; "
                    f"evaluation.temperatures is {self.evaluation.temperatures}"
                )
        if self.joint is not None and self.training.keep_features_gb:
            raise ValueError("training.keep_features_gb: a target that is trained says something else at every step")
        if self.joint is not None and self.on_policy is not None and not self.stages:
            raise ValueError(
                "on_policy: a target that is trained along is no longer the one that accepted and rejected the drafts; "
                "give joint and on_policy stages of their own"
            )
        if self.on_policy is not None and self.on_policy.written_by == "drafter" and not self._can_write():
            raise ValueError(
                f"on_policy.written_by: a drafter of family {self.family} writes no text of its own in the target's "
                "tokens; let the target write (target), with the drafter drafting"
            )
        if "lossless_mismatches" in self.gates and not self.evaluation.lossless_check:
            raise ValueError("gates.lossless_mismatches: needs evaluation.lossless_check: true")
        if self.gates and not (self.evaluation.prompts or self.data.validation):
            raise ValueError("gates: there is nothing to measure on; give evaluation.prompts or data.validation")
        return self

    @model_validator(mode="after")
    def _stages_are_recipes(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: each needs a name of its own, got {', '.join(names)}")
        fixed = set(type(self.drafter).model_fields) & set(family_class(self.family).config_class.model_fields)
        for i, stage in enumerate(self.stages):
            if shaped := sorted((fixed | {"init_from"}) & set(stage.drafter)):
                raise ValueError(f"stages.{i}.drafter.{shaped[0]}: a later stage goes on with the same head")
            try:
                self.stage(i)
            except ValidationError as error:
                raise ValueError(_explain(error, f"stages.{i} ({stage.name})", (), type(self))) from None
        return self

    def drafter_writes(self) -> bool:
        """Whether the texts of `on_policy` are the drafter's own, rather than the target's."""
        chosen = self.on_policy.written_by if self.on_policy is not None else "target"
        return self._can_write() if chosen is None else chosen == "drafter"

    def _can_write(self) -> bool:
        return family_class(self.family).writes and getattr(self.drafter, "vocab", "same") == "same"

    def stage(self, number: int) -> Recipe:
        """The recipe of one stage, which has none of its own."""
        stage, tree = self.stages[number], self.model_dump(mode="json", exclude={"stages"})
        if any(stage.training.get(budget) is not None for budget in BUDGETS):
            tree["training"] |= dict.fromkeys(BUDGETS)
        for name in ("data", "regenerate", "drafter", "training"):
            tree[name] |= getattr(stage, name)
        tree["loss"] = stage.loss or tree["loss"]
        if stage.on_policy is not None:
            tree["on_policy"] = (tree["on_policy"] or {}) | stage.on_policy
        if number < len(self.stages) - 1:
            tree["joint"] = None
        return type(self).model_validate(tree)

    def training_stages(self) -> list[tuple[str, Recipe]]:
        """(name, recipe) of every stage; of the whole, unnamed, if there is one only."""
        return [(stage.name, self.stage(i)) for i, stage in enumerate(self.stages)] or [("", self)]

    def resolved_yaml(self) -> str:
        """The recipe with every default written out; loading it gives this recipe again."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)

    def recipe_hash(self) -> str:
        """sha256 (hex) of the canonical JSON of the resolved recipe: equal exactly when all values are."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


@cache
def recipe_class(family: str = DEFAULT_FAMILY) -> type[Recipe]:
    """The recipe of a family: its own keys under `drafter`, and its published defaults elsewhere."""
    if family not in FAMILIES:
        return Recipe  # which refuses it by name
    drafter = family_class(family)
    options: Any = (
        drafter.options,
        Field(
            default_factory=lambda: drafter.options.model_validate({}),
            description=Recipe.model_fields["drafter"].description,
        ),
    )
    made = create_model("Recipe", __base__=Recipe, drafter=options)
    made.family_defaults = drafter.defaults
    return made


def make_recipe(tree: Mapping[str, Any]) -> Recipe:
    """The recipe a mapping stands for. Raises pydantic's ValidationError."""
    return recipe_class(_family_of(tree)).model_validate(tree)


def _family_of(tree: Any) -> str:
    family = tree.get("family", DEFAULT_FAMILY) if isinstance(tree, Mapping) else DEFAULT_FAMILY
    return family if isinstance(family, str) else DEFAULT_FAMILY


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate one recipe file. Raises ConfigError, whose text lists every mistake found.

    `overrides` are `section.key=value` strings; values are YAML, `null` included, and list items go by number
    (`data.train.0.limit=100`).
    """
    path = Path(path)
    tree = recipe_yaml.read(path)
    overridden: list[Location] = []
    parsed = [(override, *recipe_yaml.parse_override(override)) for override in overrides]
    families = [value for _, keys, value in parsed if tuple(keys) == ("family",)]
    model = recipe_class(_family_of({"family": families[-1]} if families else tree))
    for override, keys, value in parsed:
        overridden.append(_set(tree, _schema_path(tuple(keys), model), value, override))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, str(path), overridden, model)) from None


# --------------------------------------------------------------------------------------------- overrides

Location = tuple[str | int, ...]


def _schema_path(keys: tuple[str, ...], model: type[Recipe]) -> Location:
    """Join the keys that are one key with dots in it: gates.t0.acceptance_length.min has three levels."""
    location: list[str | int] = []
    node: Any = model
    while keys:
        if (value_model := _mapping_value(node)) is not None:
            tail = 1 if len(keys) > 1 and keys[-1] in value_model.model_fields else 0
            return (*location, ".".join(keys[: len(keys) - tail]), *keys[len(keys) - tail :])
        head, keys = keys[0], keys[1:]
        location.append(int(head) if head.isdigit() else head)
        if _is_model(node):
            info = node.model_fields.get(head)
            node = _plain(info.annotation) if info else None
        else:
            node = _plain(typing.get_args(node)[0]) if typing.get_origin(node) is list else None
    return tuple(location)


def _set(tree: Any, location: Location, value: Any, override: str) -> Location:
    """Put `value` at `location`, making the mappings on the way; returns the location."""
    for depth, key in enumerate(location):
        at = ".".join(map(str, location[:depth])) or "the recipe"
        if isinstance(tree, list):
            if not (isinstance(key, int) and key < len(tree)):
                raise ConfigError(
                    f"command line: {override}: {at} is a list of {len(tree)}; give an item's number, from 0"
                )
        elif not isinstance(tree, dict):
            raise ConfigError(f"command line: {override}: {at} is {tree!r}, not a section; override {at} itself")
        if depth == len(location) - 1:
            tree[key] = value
        elif isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        elif isinstance(tree, dict) and isinstance(tree[key], int | float) and location[0] == "loss":
            tree[key] = {"weight": tree[key]}  # loss.jsd.beta=0.3 over the shorthand jsd: 1.0
        tree = tree[key]
    return location


# --------------------------------------------------------------------------------------------- error texts


def _explain(error: ValidationError, path: str, overridden: Sequence[Location], model: type[Recipe]) -> str:
    """All mistakes, a line per source: `recipes/x.yaml: drafter.num_layers: expected ..., got ...; ...`."""
    texts: dict[str, list[str]] = {}
    wide = ("value_error", "extra_forbidden")  # blame a whole section, whichever key in it was set
    for item in error.errors(include_url=False):
        dotted = ".".join(str(key) for key in item["loc"])
        text = f"{dotted}: {_message(item, model)}" if dotted else _message(item, model)
        at, _, _ = text.partition(":")  # checks across sections have no location, but name the key first
        caused = any(_concerns(at, ".".join(map(str, o)), item["type"] in wide) for o in overridden)
        texts.setdefault("command line" if caused else path, []).append(text)
    return "\n".join(f"{source}: {'; '.join(messages)}" for source, messages in texts.items())


def _concerns(at: str, override: str, within: bool) -> bool:
    """Whether the override set the wrong key, or something around it, or (`within`) inside it."""
    return f"{at}.".startswith(f"{override}.") or (within and f"{override}.".startswith(f"{at}."))


def _message(item: ErrorDetails, model: type[Recipe]) -> str:
    kind, location, value = item["type"], item["loc"], item["input"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(location, model)}"
    info = _field_at(location, model)
    if kind == "missing":
        return f"required, but missing: {info.description}" if info else "required, but missing"
    return f"expected {_describe(info) if info else item['msg']}, got {_short(value)}"


def _suggestion(location: Location, recipe: type[Recipe]) -> str:
    """The nearest valid key here, else the same key in another section, else all keys valid here."""
    model = _model_at(location[:-1], recipe)
    key, valid = str(location[-1]), list(model.model_fields) if model else []
    if near := difflib.get_close_matches(key, valid, n=1, cutoff=0.6):
        return f"; did you mean '{near[0]}'?"
    names = [row.name for row in _rows(recipe, "", {})]
    if elsewhere := [name for name in names if name.rsplit(".", 1)[-1] == key]:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; valid keys here: {', '.join(valid)}"


def _short(value: Any) -> str:
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _field_at(location: Location, model: type[Recipe]) -> FieldInfo | Any:
    """The field, or the type of a list item or mapping value, that a validation error points at."""
    found: Any = None
    node: Any = model
    for key in location:
        if _is_model(node):
            found = node.model_fields.get(str(key))
            node = _plain(found.annotation) if found else None
        else:
            args = typing.get_args(node)
            found = FieldInfo.from_annotation(args[-1]) if args else None
            node = _plain(args[-1]) if args else None
    return found


def _model_at(location: Location, model: type[Recipe]) -> type[BaseModel] | None:
    if not location:
        return model
    info = _field_at(location, model)
    node = _plain(info.annotation) if info else None
    return node if _is_model(node) else None


# --------------------------------------------------------------------------------------------- the manual


class SchemaRow(NamedTuple):
    """One key of the recipe, as `draftsmith schema` prints it."""

    name: str
    type: str
    default: str
    description: str


def describe_schema(family: str = DEFAULT_FAMILY) -> list[SchemaRow]:
    """Every key in file order: dotted name (`[]` a list item, `<name>` any key), type, default, meaning.

    The keys under `drafter` and the published defaults are those of `family`. A section that several keys share is
    spelled out at the first of them.
    """
    if family not in FAMILIES:
        raise ConfigError(f"unknown family {family!r}; expected one of {', '.join(FAMILIES)}")
    rows = _rows(recipe_class(family), "", {})
    own = {".".join(keys): value for keys, value in _leaves(family_class(family).defaults)} | {"family": family}
    return [row._replace(default=str(own[row.name])) if row.name in own else row for row in rows]


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, value) of a tree of defaults; `loss` is one value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and key != "loss":
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), json.dumps(value)


def _rows(model: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str]) -> Iterator[SchemaRow]:
    for name, info in model.model_fields.items():
        node, dotted = _plain(info.annotation), prefix + name
        if (inner := _mapping_value(node)) is not None:
            below = dotted + ".<name>"
        elif typing.get_origin(node) is list and _is_model(_plain(typing.get_args(node)[0])):
            inner, below = _plain(typing.get_args(node)[0]), dotted + "[]"
        else:
            inner, below = (node if _is_model(node) else None), dotted
        meaning = f"{info.description} (keys: see {seen[inner]})" if inner in seen else info.description
        yield SchemaRow(dotted, _describe(info), _default(info), meaning or "")
        if inner is not None and inner not in seen:
            seen[inner] = below
            yield from _rows(inner, below + ".", seen)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""  # its keys follow, each with its own default
    if isinstance(value, list | dict):
        value = json.loads(json.dumps(value, default=lambda item: item.model_dump()))
    return json.dumps(value) if not isinstance(value, str) else value


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a mapping"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _describe(info: FieldInfo) -> str:
    """What a field takes, in words: `an integer >= 1 or null`."""
    arms = typing.get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    words = [_describe_arm(arm, info.metadata) for arm in arms if arm is not type(None)]
    return " or ".join(words + (["null"] if type(None) in arms else []))


def _describe_arm(arm: Any, metadata: Sequence[Any]) -> str:
    if typing.get_origin(arm) is typing.Annotated:
        inner = FieldInfo.from_annotation(arm)
        return _describe_arm(inner.annotation, [*inner.metadata, *metadata])
    if typing.get_origin(arm) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(arm)))
    if typing.get_origin(arm) is list:
        item = typing.get_args(arm)[0]
        least = max((getattr(m, "min_length", None) or 0 for m in metadata), default=0)
        prefix = {0: "a list", 1: "a non-empty list", 2: "a list of two"}[least]
        return f"{prefix}, each {'a mapping' if _is_model(item) else _describe(FieldInfo.from_annotation(item))}"
    if _is_model(arm) or typing.get_origin(arm) is dict:
        return "a mapping"
    word = _NAMES.get(arm, "a value")
    if arm is str:
        pattern = next((m.pattern for m in metadata if getattr(m, "pattern", None)), None)
        return f"a string matching {pattern}" if pattern else word
    bounds = [
        f"{sign} {getattr(m, name):g}"
        for m in metadata
        for name, sign in _BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return " ".join([word, " and ".join(bounds)]) if bounds else word


def _is_model(node: Any) -> bool:
    return isinstance(node, type) and issubclass(node, BaseModel)


def _is_union(node: Any) -> bool:
    return typing.get_origin(node) in (typing.Union, types.UnionType)


def _plain(annotation: Any) -> Any:
    """An annotation without `| None` and Annotated."""
    if _is_union(annotation):
        arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        annotation = arms[0] if len(arms) == 1 else annotation
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation


def _mapping_value(node: Any) -> type[BaseModel] | None:
    """The section type of a mapping's values (`loss`, `gates`), if `node` is such a mapping."""
    if typing.get_origin(node) is dict and _is_model(typing.get_args(node)[1]):
        return typing.get_args(node)[1]
    return None
