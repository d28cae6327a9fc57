"""An exported drafter on the Hub: what is sent, gathered in a folder of its own, and sent.

The drafter is loaded strictly first. Weights are linked, the card is written from `acceptance.json`, and names of
folders on this machine stay here. The drafter's own folder is only read.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from inference.entrypoints.speculative_defaults import NUM_SPECULATIVE_TOKENS
from inference.provenance import weights_sha256
from inference.report.model_card import CardFacts, model_card
from inference.report.schema import AcceptanceReport, load_report, save_report
from speculators.config import DrafterConfig
from speculators.errors import CheckpointError, ConfigError, DraftsmithError
from speculators.export import load_weights, read_drafter_config, read_fields
from speculators.export.upload import Destination, Pushed, upload
from speculators.hub import is_repository_id, repository_id
from speculators.registry import family_class
from speculators.vocab.token_map import FILE as TOKEN_MAP
from train.recipe.load import load_recipe
from train.recipe.recipe import Recipe
from train.recipe.run_folder import EXPORT, PAGE, RECIPE, REPORT

CARD = "README.md"
WRITTEN = (REPORT, PAGE, RECIPE)  # besides the card; what a push did not write any more is removed there

Say = Callable[[str], None]


@dataclass(frozen=True)
class PushOptions:
    """What the card cannot know by itself, and what is done about faults."""

    base_model: str | None = None  # the target's id; None: as recipe and report name it
    license: str | None = None
    report: Path | None = None  # acceptance.json; None: the one beside the drafter
    target_layers: int | None = None  # for heads that do not say which layers they tap
    force: bool = False  # send a drafter that does not load


@dataclass
class Found:
    """What lies in a folder, or beside it where it is the export of a run."""

    export: Path
    config: DrafterConfig | None = None
    report: AcceptanceReport | None = None
    page: Path | None = None
    recipe: Recipe | None = None
    notes: list[str] = field(default_factory=list)  # for who pushes


def push(folder: str | Path, to: Destination, options: PushOptions, *, message: str = "", say: Say = print) -> Pushed:
    """Stages `folder` (an export, or a run that has one) and uploads it. CheckpointError: it does not load."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as scratch:
        staged = stage(folder, to.repository, Path(scratch) / "repository", options, say=say)
        return upload(staged, to, message or f"Upload {to.repository.partition('/')[2]}", own=WRITTEN)


def stage(folder: str | Path, repository: str, out: Path, options: PushOptions, *, say: Say = print) -> Path:
    """Writes what would be sent to `out`, which must hold nothing, and returns it. `say`: remarks to who pushes."""
    if not is_repository_id(repository):
        raise ConfigError(f"push: {repository!r} is not the id of a repository; expected org/name")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"push: {out} holds something already; name a folder that is empty or not there")
    found = find(Path(folder), options)
    target = _Target.of(found, options)
    if target.base_model == repository:
        raise ConfigError(f"push: {repository} is the target itself; name a repository for the drafter")
    out.mkdir(parents=True, exist_ok=True)
    paths = _paths(found, target)
    left_out = link_files(found.export, out, paths, (*WRITTEN, CARD))
    if found.report is not None:
        save_report(_without(found.report, paths), out / REPORT)
    if found.report is not None and found.page is not None:
        (out / PAGE).write_text(renamed_in_page(found.page.read_text(encoding="utf-8"), paths), encoding="utf-8")
    recipe = None if found.recipe is None else _recipe_text(found.recipe, paths)
    if recipe is not None:
        (out / RECIPE).write_text(recipe, encoding="utf-8")
    if (found.export / CARD).is_file():
        shutil.copyfile(found.export / CARD, out / CARD)
        found.notes.append(f"{found.export / CARD} is sent as it is; remove it to have a card written")
    else:
        files = sorted(path.name for path in out.iterdir())
        facts = _facts(found, target, repository, options, recipe, files)
        (out / CARD).write_text(model_card(facts, found.report), encoding="utf-8")
    if left_out:
        found.notes.append(f"not sent: {', '.join(left_out)}")
    for note in found.notes:
        say(note)
    return out


def listing(folder: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every file below, links followed."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]


# --------------------------------------------------------------------------------------------- what there is


def push_run(recipe: Recipe, say: Say = print) -> Pushed:
    """What `export.push_to_hub` asks for: the run's export, with what it measured."""
    section, folder = recipe.export, Path(recipe.output_dir)
    assert section.hub_model_id is not None  # checked with the recipe
    to = Destination(section.hub_model_id, section.hub_private_repo, section.hub_revision)
    options = PushOptions(base_model=section.hub_base_model)
    try:
        return push(folder, to, options, message=f"Upload {recipe.name}", say=say)
    except DraftsmithError as error:
        again = f"draftsmith push {folder} {section.hub_model_id}{'' if section.hub_private_repo else ' --public'}"
        raise type(error)(f"{error}. The run is done; `{again}` pushes it") from error


def find(folder: Path, options: PushOptions) -> Found:
    """The drafter in `folder` or its `export`, strictly checked, and what came with it."""
    export = folder if (folder / "config.json").is_file() else folder / EXPORT
    if not (export / "config.json").is_file():
        raise CheckpointError(
            f"push: {folder} holds no config.json, nor does {folder / EXPORT}; give an export or a run"
        )
    found = Found(export)
    _check(found, options)
    run = export.absolute().parent
    places = [export] + ([run] if export.name == EXPORT and (run / RECIPE).is_file() else [])
    recipe = _first(places, RECIPE)
    if recipe is not None:
        found.recipe = load_recipe(recipe)
        recorded = (read_fields(export).get("draftsmith") or {}).get("recipe_hash")
        if recorded not in (None, found.recipe.recipe_hash()):
            found.notes.append(f"{recipe} has other values than the recipe that config.json names")
    path = options.report or _first(places, REPORT)
    if path is None:
        found.notes.append(f"there is no {REPORT}: the card says that nothing was measured (draftsmith evaluate)")
        return found
    report = load_report(path)
    if fault := _of_another(report, export):
        if options.report is not None:
            raise ConfigError(f"push: {path} was measured on another drafter: {fault}")
        found.notes.append(f"{path} is left out, since it was measured on another drafter: {fault}; evaluate again")
        return found
    found.report = report
    page = path.with_name(PAGE)
    found.page = page if page.is_file() else None
    return found


def _first(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _check(found: Found, options: PushOptions) -> None:
    """Loads the drafter as `draftsmith inspect` does. What is wrong is raised, or noted with `force`."""
    try:
        found.config = read_drafter_config(found.export, options.target_layers)
        base = getattr(found.config, "adapter_of", None)
        if base is not None and repository_id(base) is None:
            raise CheckpointError(
                f"drafter {found.export}: an adapter of {Path(base).name}, a folder of this machine, which nobody else "
                "can load; export the merged model (drafter.peft_export: merged), or train on a repository id"
            )
        config = found.config
        if getattr(config, "other_tokenizer", False):  # its map can be read only beside the target
            if not (found.export / TOKEN_MAP).is_file():
                raise CheckpointError(f"drafter {found.export}: {TOKEN_MAP} is missing; export it again")
            config = config.model_copy(update={"other_tokenizer": False})
        load_weights(family_class(config.family)(config), found.export)
    except (DraftsmithError, SafetensorError) as error:
        if not options.force:
            raise CheckpointError(f"push: nothing was sent: {error} (--force sends it all the same)") from error
        found.notes.append(f"sent although it is broken: {error}")
    if found.config is None:
        raise CheckpointError(f"push: {found.export}: no card can be written of what cannot be read; mend config.json")


def _of_another(report: AcceptanceReport, export: Path) -> str | None:
    """Why the report cannot be that of `export`; None if it is."""
    p = report.provenance
    fields = read_fields(export)
    if p.drafter_config != fields:
        differ = sorted(n for n in {*p.drafter_config, *fields} if p.drafter_config.get(n) != fields.get(n))
        return f"config.json differs in {', '.join(differ)}"
    if p.drafter_weights_sha256 not in (None, weights_sha256(export)):
        return "its weights are others"
    return None


@dataclass(frozen=True)
class _Target:
    """The target as others may know it."""

    name: str
    base_model: str | None
    given: tuple[str, ...]  # what it is called here: in the recipe, the report, config.json

    @classmethod
    def of(cls, found: Found, options: PushOptions) -> _Target:
        recipe = found.recipe
        given = [] if recipe is None else [recipe.target.model]
        if found.report is not None and (recipe is None or recipe.joint is None):
            given.append(found.report.provenance.target_name)
        fields = read_fields(found.export)
        places = (
            (fields.get("draftsmith") or {}).get("target"),
            (fields.get("speculators_config") or {}).get("verifier"),
        )
        given += [str(place["name_or_path"]) for place in places if place and place.get("name_or_path")]
        if options.base_model is not None and not is_repository_id(options.base_model):
            raise ConfigError(f"--base-model {options.base_model}: expected the id of a repository, org/name")
        base = options.base_model or (recipe.export.hub_base_model if recipe is not None else None)
        base = base or (repository_id(given[0]) if given else None)
        if base is None:
            what = f"the target is a folder here ({Path(given[0]).name})" if given else "the target is not known"
            found.notes.append(f"{what}, so the card names no base_model; give its id with --base-model")
        return cls(base or (Path(given[0]).name if given else "TARGET"), base, tuple(given))


# --------------------------------------------------------------------------------------------- what is written


def _facts(
    found: Found, target: _Target, repository: str, options: PushOptions, recipe: str | None, files: list[str]
) -> CardFacts:
    config, fields = found.config, read_fields(found.export)
    assert config is not None
    k = (fields.get("draftsmith") or {}).get("num_speculative_tokens")
    if found.report is not None:
        k = found.report.provenance.num_speculative_tokens
    license_ = options.license or (found.recipe.export.hub_license if found.recipe is not None else None)
    if license_ is None:
        found.notes.append("no license is stated; give one with --license or export.hub_license")
    facts = CardFacts(
        repository=repository, config=config, fields=fields, target_name=target.name, base_model=target.base_model,
        num_speculative_tokens=k or NUM_SPECULATIVE_TOKENS, license=license_, recipe=recipe, files=files,
    )  # fmt: skip
    if found.recipe is None:
        return facts
    sources = found.recipe.data.train
    remarks = []
    if found.recipe.joint is not None:
        remarks.append(
            f"The target was trained along with this drafter (`joint` in the recipe): it drafts for that changed "
            f"{target.name}, which is not in this repository."
        )
    return replace(
        facts,
        datasets=list(dict.fromkeys(source.name for source in sources if source.name)),
        other_data=list(dict.fromkeys(Path(source.label).name for source in sources if not source.name)),
        remarks=remarks,
    )


def _paths(found: Found, target: _Target) -> Renaming:
    """Paths of this machine in configuration, report and recipe; the target is called what the card calls it."""
    trees: list[Any] = [read_fields(found.export)]
    trees += [] if found.recipe is None else [found.recipe.model_dump(mode="json")]
    trees += [] if found.report is None else [found.report.provenance.model_dump()]
    paths = [name for name in target.given if len(Path(name).parts) > 1]  # a single word may mean other things as well
    own = {name: target.name for name in paths if target.base_model or local_paths(name)}
    return dict(sorted({**local_paths(*trees), **own}.items(), key=lambda item: -len(item[0])))


def _without(report: AcceptanceReport, paths: Renaming) -> AcceptanceReport:
    """The report with names in place of paths, in its provenance, where alone there are any."""
    provenance = type(report.provenance).model_validate(renamed(report.provenance.model_dump(), paths))
    return report.model_copy(update={"provenance": provenance})


def _recipe_text(recipe: Recipe, paths: Renaming) -> str:
    """The resolved recipe, with names in place of paths."""
    tree = renamed(recipe.model_dump(mode="json"), paths)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


SENT = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "*.jinja", "LICENSE*", "NOTICE*",
)  # fmt: skip
NAMING = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
NAMES = ("_name_or_path", "name_or_path", "base_model_name_or_path")  # keys of these that may hold a path

Renaming = Mapping[str, str]  # what names something on this machine -> what others know it by


def link_files(export: Path, out: Path, paths: Renaming, kept: Iterable[str]) -> list[str]:
    """Links what is sent into `out`, or copies it with names in place of `paths`; returns what is neither sent nor
    `kept`."""
    left_out = []
    for path in sorted(export.rglob("*")):
        name = path.relative_to(export)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if any(fnmatch(path.name, pattern) for pattern in SENT):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            _place(path, out / name, paths)
        elif name.as_posix() not in kept:
            left_out.append(name.as_posix())
    return left_out


def _place(path: Path, there: Path, paths: Renaming) -> None:
    """A link, or a copy where names stand for paths or the file system has no links."""
    if path.name in NAMING:
        fields = json.loads(path.read_text(encoding="utf-8"))
        public = renamed(fields, {**local_paths({key: fields.get(key) for key in NAMES}), **paths})
        if public != fields:
            there.write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
            return
    try:
        os.symlink(path.resolve(), there)
    except OSError:
        shutil.copyfile(path, there)


def local_paths(*trees: Any) -> dict[str, str]:
    """Absolute paths among the strings of trees -> their last parts; the longest first."""
    paths = {text for tree in trees for text in _strings(tree) if _is_local(text)}
    return {path: Path(path).name for path in sorted(paths, key=len, reverse=True)}


def renamed(tree: Any, paths: Renaming) -> Any:
    """A tree with names in place of the strings that are paths."""
    if isinstance(tree, dict):
        return {key: renamed(value, paths) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value, paths) for value in tree]
    return paths.get(tree, tree) if isinstance(tree, str) else tree


def renamed_in_page(page: str, paths: Renaming) -> str:
    """The same in a text of HTML, wherever they stand."""
    for path, name in paths.items():
        for written, instead in ((path, name), (html.escape(path), html.escape(name)), (json.dumps(path)[1:-1], name)):
            page = page.replace(written, instead)
    return page


def _is_local(text: str) -> bool:
    absolute = Path(text).is_absolute() and len(Path(text).parts) > 2  # "/no_think" is none
    return "\n" not in text and (absolute or text.startswith("~/") or text[1:3] in (":\\", ":/"))


def _strings(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [text for value in tree.values() for text in _strings(value)]
    if isinstance(tree, list):
        return [text for value in tree for text in _strings(value)]
    return [tree] if isinstance(tree, str) else []
