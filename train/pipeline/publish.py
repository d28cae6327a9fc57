"""Pushes an exported drafter to the Hub, from a folder in which its files are staged.

The drafter is loaded strictly first. Weights are linked, the card is written from
`acceptance.json`, and paths of this machine are replaced by names. The drafter's own folder is only
read."""

from __future__ import annotations

import html
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
WRITTEN = (
    REPORT,
    PAGE,
    RECIPE,
)  # besides the card; what a push did not write any more is removed there

Say = Callable[[str], None]


@dataclass(frozen=True)
class PushOptions:
    """Facts for the card that no file has, and the handling of faults."""

    base_model: str | None = None  # the target's id; None: as recipe and report name it
    license: str | None = None
    report: Path | None = None  # acceptance.json; None: the one beside the drafter
    target_layers: int | None = None  # for heads that do not say which layers they tap
    force: bool = False  # send a drafter that does not load


@dataclass
class Contents:
    """The files of a drafter's folder, and of the run beside it where it is the export of one."""

    export: Path
    config: DrafterConfig | None = None
    report: AcceptanceReport | None = None
    page: Path | None = None
    recipe: Recipe | None = None
    notes: list[str] = field(default_factory=list)  # shown to the user


def push(
    folder: str | Path,
    to: Destination,
    options: PushOptions,
    *,
    message: str = "",
    say: Say = print,
) -> Pushed:
    """Stages `folder` (an export, or a run that has one) and uploads it. CheckpointError if it does
    not load."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as scratch:
        staged = stage(folder, to.repository, Path(scratch) / "repository", options, say=say)
        return upload(
            staged, to, message or f"Upload {to.repository.partition('/')[2]}", own=WRITTEN
        )


def stage(
    folder: str | Path, repository: str, out: Path, options: PushOptions, *, say: Say = print
) -> Path:
    """Writes the files to be sent into `out`, which must be empty, and returns it. `say` gets
    remarks for the user."""
    if not is_repository_id(repository):
        raise ConfigError(f"push: {repository!r} is not the id of a repository; expected org/name")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"push: {out} holds something already; name a folder that is empty or not there"
        )
    contents = find(Path(folder), options)
    target = _Target.of(contents, options)
    if target.base_model == repository:
        raise ConfigError(
            f"push: {repository} is the target itself; name a repository for the drafter"
        )
    out.mkdir(parents=True, exist_ok=True)
    paths = _paths(contents, target)
    left_out = link_files(contents.export, out, paths, (*WRITTEN, CARD))
    if contents.report is not None:
        provenance = type(contents.report.provenance)(
            **renamed(contents.report.provenance.model_dump(), paths)
        )
        save_report(contents.report.model_copy(update={"provenance": provenance}), out / REPORT)
        if contents.page is not None:
            (out / PAGE).write_text(
                renamed_in_page(contents.page.read_text(encoding="utf-8"), paths), encoding="utf-8"
            )
    recipe = None
    if contents.recipe is not None:
        tree = renamed(contents.recipe.model_dump(mode="json"), paths)
        recipe = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
        (out / RECIPE).write_text(recipe, encoding="utf-8")
    if (contents.export / CARD).is_file():
        shutil.copyfile(contents.export / CARD, out / CARD)
        contents.notes.append(
            f"{contents.export / CARD} is sent as it is; remove it to have a card written"
        )
    else:
        files = sorted(path.name for path in out.iterdir())
        facts = _facts(contents, target, repository, options, recipe, files)
        (out / CARD).write_text(model_card(facts, contents.report), encoding="utf-8")
    if left_out:
        contents.notes.append(f"not sent: {', '.join(left_out)}")
    for note in contents.notes:
        say(note)
    return out


def listing(folder: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every file below, links followed."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]


def push_run(recipe: Recipe, code: int, say: Say = print) -> None:
    """Pushes the run's export with its report, as `export.push_to_hub` asks for, unless a gate is
    missed (`code` 1)."""
    section, folder = recipe.export, Path(recipe.output_dir)
    assert section.hub_model_id is not None  # checked with the recipe
    if code:
        say(f"not pushed to {section.hub_model_id}: a gate is missed")
        return
    to = Destination(section.hub_model_id, section.hub_private_repo)
    options = PushOptions(base_model=section.hub_base_model)
    try:
        say(
            push(folder, to, options, message=f"Upload {recipe.name}", say=say).describe(
                section.hub_model_id
            )
        )
    except DraftsmithError as error:
        again = (
            f"draftsmith push {folder}"
            f" {section.hub_model_id}{'' if section.hub_private_repo else ' --public'}"
        )
        raise type(error)(f"{error}. The run is done; `{again}` pushes it") from error


def find(folder: Path, options: PushOptions) -> Contents:
    """The drafter in `folder` or its `export`, strictly checked, and what came with it."""
    export = folder if (folder / "config.json").is_file() else folder / EXPORT
    if not (export / "config.json").is_file():
        raise CheckpointError(
            f"push: no config.json in {folder} or {folder / EXPORT}; give an export or a run"
        )
    contents = Contents(export)
    _check(contents, options)
    run = export.absolute().parent
    places = [export] + ([run] if export.name == EXPORT and (run / RECIPE).is_file() else [])
    recipe = _first(places, RECIPE)
    if recipe is not None:
        contents.recipe = load_recipe(recipe)
        recorded = (read_fields(export).get("draftsmith") or {}).get("recipe_hash")
        if recorded not in (None, contents.recipe.recipe_hash()):
            contents.notes.append(
                f"{recipe} has other values than the recipe that config.json names"
            )
    path = options.report or _first(places, REPORT)
    if path is None:
        contents.notes.append(
            f"there is no {REPORT}: the card says that nothing was measured (draftsmith evaluate)"
        )
        return contents
    report = load_report(path)
    if fault := _of_another(report, export):
        if options.report is not None:
            raise ConfigError(f"push: {path} was measured on another drafter: {fault}")
        contents.notes.append(
            f"{path} is left out, since it was measured on another drafter: {fault}; evaluate again"
        )
        return contents
    contents.report = report
    page = path.with_name(PAGE)
    contents.page = page if page.is_file() else None
    return contents


def _first(places: list[Path], name: str) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _check(contents: Contents, options: PushOptions) -> None:
    """Loads the drafter strictly. A fault is raised, or noted with `force`."""
    try:
        contents.config = read_drafter_config(contents.export, options.target_layers)
        config = contents.config
        if getattr(config, "other_tokenizer", False):  # its map can be read only beside the target
            if not (contents.export / TOKEN_MAP).is_file():
                raise CheckpointError(
                    f"drafter {contents.export}: {TOKEN_MAP} is missing; export it again"
                )
            config = config.model_copy(update={"other_tokenizer": False})
        load_weights(family_class(config.family)(config), contents.export)
    except (DraftsmithError, SafetensorError) as error:
        if not options.force:
            raise CheckpointError(
                f"push: nothing was sent: {error} (--force sends it all the same)"
            ) from error
        contents.notes.append(f"sent although it is broken: {error}")
    if contents.config is None:
        raise CheckpointError(
            f"push: no card can be written of {contents.export}; mend its config.json"
        )


def _of_another(report: AcceptanceReport, export: Path) -> str | None:
    """The reason why the report is not that of `export`; None if it is."""
    p = report.provenance
    fields = read_fields(export)
    if p.drafter_config != fields:
        differ = sorted(
            n for n in {*p.drafter_config, *fields} if p.drafter_config.get(n) != fields.get(n)
        )
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
    def of(cls, contents: Contents, options: PushOptions) -> _Target:
        recipe = contents.recipe
        given = [] if recipe is None else [recipe.target.model]
        if contents.report is not None and (recipe is None or recipe.joint is None):
            given.append(contents.report.provenance.target_name)
        fields = read_fields(contents.export)
        places = (
            (fields.get("draftsmith") or {}).get("target"),
            (fields.get("speculators_config") or {}).get("verifier"),
        )
        given += [
            str(place["name_or_path"]) for place in places if place and place.get("name_or_path")
        ]
        if options.base_model is not None and not is_repository_id(options.base_model):
            raise ConfigError(
                f"--base-model {options.base_model}: expected the id of a repository, org/name"
            )
        base = options.base_model or (recipe.export.hub_base_model if recipe is not None else None)
        base = base or (repository_id(given[0]) if given else None)
        if base is None:
            what = (
                f"the target is a folder here ({Path(given[0]).name})"
                if given
                else "the target is not known"
            )
            contents.notes.append(
                f"{what}, so the card names no base_model; give its id with --base-model"
            )
        return cls(base or (Path(given[0]).name if given else "TARGET"), base, tuple(given))


def _facts(
    contents: Contents,
    target: _Target,
    repository: str,
    options: PushOptions,
    text: str | None,
    files: list[str],
) -> CardFacts:
    config, fields = contents.config, read_fields(contents.export)
    assert config is not None
    k = (fields.get("draftsmith") or {}).get("num_speculative_tokens")
    if contents.report is not None:
        k = contents.report.provenance.num_speculative_tokens
    license_ = options.license or (
        contents.recipe.export.hub_license if contents.recipe is not None else None
    )
    if license_ is None:
        contents.notes.append("no license is stated; give one with --license or export.hub_license")
    recipe = contents.recipe
    sources = [] if recipe is None else recipe.data.train
    remark = (
        "The target was trained along with this drafter (`joint` in the recipe): it drafts for"
        f" that changed {target.name}, which is not in this repository."
    )
    return CardFacts(
        repository=repository,
        config=config,
        fields=fields,
        target_name=target.name,
        base_model=target.base_model,
        num_speculative_tokens=k or NUM_SPECULATIVE_TOKENS,
        license=license_,
        recipe=text,
        files=files,
        datasets=list(dict.fromkeys(source.name for source in sources if source.name)),
        other_data=list(
            dict.fromkeys(Path(source.label).name for source in sources if not source.name)
        ),
        remarks=[remark] if recipe is not None and recipe.joint is not None else [],
    )


def _paths(contents: Contents, target: _Target) -> Renaming:
    """The paths of this machine in configuration, report and recipe, with names; the target has the
    card's name."""
    trees: list[Any] = [read_fields(contents.export)]
    trees += [] if contents.recipe is None else [contents.recipe.model_dump(mode="json")]
    trees += [] if contents.report is None else [contents.report.provenance.model_dump()]
    paths = [
        name for name in target.given if len(Path(name).parts) > 1
    ]  # a single word may mean other things as well
    own = {name: target.name for name in paths if target.base_model or local_paths(name)}
    return dict(sorted({**local_paths(*trees), **own}.items(), key=lambda item: -len(item[0])))


SENT = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "*.jinja",
    "LICENSE*",
    "NOTICE*",
)
NAMING = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
NAMES = (
    "_name_or_path",
    "name_or_path",
    "base_model_name_or_path",
)  # keys of these that may hold a path

Renaming = Mapping[str, str]  # path on this machine -> name


def link_files(export: Path, out: Path, paths: Renaming, kept: Iterable[str]) -> list[str]:
    """Links the files to be sent into `out`, or copies them with names in place of `paths`; returns
    the names of those that are neither sent nor `kept`."""
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
    paths: set[str] = set()
    _mapped(trees, lambda text: paths.add(text) if _is_local(text) else None)
    return {path: Path(path).name for path in sorted(paths, key=len, reverse=True)}


def renamed(tree: Any, paths: Renaming) -> Any:
    """A tree with names in place of the strings that are paths."""
    return _mapped(tree, lambda text: paths.get(text, text))


def _mapped(tree: Any, change: Callable[[str], Any]) -> Any:
    """A tree of dicts and lists with `change` applied to every string, keys apart."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def renamed_in_page(page: str, paths: Renaming) -> str:
    """A page of HTML with names in place of paths."""
    for path, name in paths.items():
        for written, instead in (
            (path, name),
            (html.escape(path), html.escape(name)),
            (json.dumps(path)[1:-1], name),
        ):
            page = page.replace(written, instead)
    return page


def _is_local(text: str) -> bool:
    absolute = Path(text).is_absolute() and len(Path(text).parts) > 2  # not "/no_think"
    return "\n" not in text and (absolute or text.startswith("~/") or text[1:3] in (":\\", ":/"))
