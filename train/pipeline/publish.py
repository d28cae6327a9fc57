"""Pushes an exported drafter to the Hub, with a card written from its `acceptance.json`.

The drafter is loaded strictly first, and its own folder is only read. No absolute path of this
machine is sent: the target is named by its id or the last part of its folder, and a recipe or a
page that holds such a path is left out."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError

from draftsmith.inference.entrypoints.speculative_defaults import NUM_SPECULATIVE_TOKENS
from draftsmith.inference.provenance import weights_sha256
from draftsmith.inference.report.model_card import CardFacts, model_card
from draftsmith.inference.report.schema import AcceptanceReport, load_report, save_report
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import CheckpointError, ConfigError, DraftsmithError
from draftsmith.speculators.export import load_weights, read_drafter_config, read_fields
from draftsmith.speculators.export.upload import Destination, upload
from draftsmith.speculators.hub import is_repository_id, repository_id
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.vocab.token_map import FILE as TOKEN_MAP
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.run_folder import EXPORT, PAGE, RECIPE, REPORT

CARD = "README.md"
WRITTEN = (REPORT, PAGE, RECIPE)  # an old one is removed there if a push has none
SENT = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "LICENSE*",
    "NOTICE*",
    CARD,
)

Say = Callable[[str], None]
Fields = dict[str, Any]  # config.json


@dataclass(frozen=True)
class PushOptions:
    """Facts for the card that no file has."""

    base_model: str | None = None  # the target's id; None: as recipe or config.json name it
    license: str | None = None
    report: Path | None = None  # acceptance.json; None: the one beside the drafter
    target_layers: int | None = None  # for heads that do not say which layers they tap


def push(
    folder: str | Path,
    to: Destination,
    options: PushOptions,
    *,
    message: str = "",
    say: Say = print,
) -> str:
    """Uploads `folder` (an export, or a run that has one); returns the address of the commit.
    CheckpointError if the drafter does not load."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as scratch:
        staged = stage(folder, to.repository, Path(scratch), options, say=say)
        return upload(staged, to, message or f"Upload {to.repository}", delete_patterns=WRITTEN)


def push_run(recipe: Recipe, code: int, say: Say = print) -> None:
    """Pushes the run's export with its report, as `export.push_to_hub` asks for, unless a gate is
    missed (`code` 1)."""
    repository, folder = recipe.export.push_to_hub, Path(recipe.output_dir)
    assert repository is not None
    if code:
        say(f"not pushed to {repository}: a gate is missed")
        return
    to = Destination(repository, recipe.export.hub_private_repo)
    try:
        url = push(folder, to, PushOptions(), message=f"Upload {recipe.name}", say=say)
    except DraftsmithError as error:
        again = f"draftsmith push {folder} {repository}{'' if to.private else ' --public'}"
        raise type(error)(f"{error}. The run is done; `{again}` pushes it") from error
    say(f"{to}: {url}")


def stage(
    folder: str | Path, repository: str, out: Path, options: PushOptions, *, say: Say = print
) -> Path:
    """Puts the files to be sent into `out`, weights as links; returns it."""
    for name in filter(None, (repository, options.base_model)):
        if not is_repository_id(name):
            raise ConfigError(
                f"{name!r} is not the id of a repository; expected org/name", where="push"
            )
    export = _export_of(Path(folder))
    config = _load_strictly(export, options.target_layers)
    fields, recipe = read_fields(export), _recipe_of(export)
    report, page = _report_of(export, options, say)
    given = recipe.target.model if recipe is not None else _target_of(fields)
    base_model = options.base_model or (repository_id(given) if given else None)
    if base_model is None:
        say("the target has no repository id: the card names no base_model (--base-model)")
    if base_model == repository:
        raise ConfigError(
            f"{repository} is the target; name a repository for the drafter", where="push"
        )
    target = base_model or (Path(given).name if given else "TARGET")

    _link_files(export, out)
    public = _with_target(fields, target)
    if public != fields:
        (out / "config.json").unlink()
        (out / "config.json").write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
    if report is not None:
        if page is not None and not any(_local_paths(report.model_dump(mode="json"))):
            os.symlink(page.resolve(), out / PAGE)
        names = {"target_name": target, "drafter_path": repository, "drafter_config": public}
        provenance = report.provenance.model_copy(update=names)
        save_report(report.model_copy(update={"provenance": provenance}), out / REPORT)
    text = None
    if recipe is not None:
        if path := next(_local_paths(recipe.model_dump(mode="json")), None):
            say(f"{RECIPE} is not sent, since it names {path}")
        else:
            text = recipe.resolved_yaml()
            (out / RECIPE).write_text(text, encoding="utf-8")
    if not (out / CARD).exists():
        facts = CardFacts(
            repository=repository,
            config=config,
            fields=public,
            target_name=target,
            base_model=base_model,
            num_speculative_tokens=_num_speculative_tokens(report, fields),
            license=options.license,
            recipe=text,
            files=sorted(path.name for path in out.iterdir()),
            **_facts_of_recipe(recipe, target),
        )
        (out / CARD).write_text(model_card(facts, report), encoding="utf-8")
    return out


def _export_of(folder: Path) -> Path:
    export = folder if (folder / "config.json").is_file() else folder / EXPORT
    if not (export / "config.json").is_file():
        raise CheckpointError(
            f"no config.json in {folder} or {folder / EXPORT}; give an export or a run",
            where="push",
        )
    return export


def _load_strictly(export: Path, target_layers: int | None) -> DrafterConfig:
    """The drafter's config, once every tensor has its place."""
    try:
        config = read_drafter_config(export, target_layers)
        loaded = config
        if getattr(config, "other_tokenizer", False):  # its map can be read only beside the target
            if not (export / TOKEN_MAP).is_file():
                raise CheckpointError(
                    f"{TOKEN_MAP} is missing; export it again", where=f"drafter {export}"
                )
            loaded = config.model_copy(update={"other_tokenizer": False})
        load_weights(family_class(config.family)(loaded), export)
    except (DraftsmithError, SafetensorError) as error:
        raise CheckpointError(f"nothing was sent: {error}", where="push") from error
    return config


def _recipe_of(export: Path) -> Recipe | None:
    """The recipe of the run that the export is of."""
    path = export.absolute().parent / RECIPE
    return load_recipe(path) if export.name == EXPORT and path.is_file() else None


def _report_of(
    export: Path, options: PushOptions, say: Say
) -> tuple[AcceptanceReport | None, Path | None]:
    """The acceptance report and its page, if they were measured on these very files."""
    beside = [folder / REPORT for folder in (export, export.absolute().parent)]
    path = options.report or next((path for path in beside if path.is_file()), None)
    if path is None:
        say(f"there is no {REPORT}: the card says that nothing was measured (draftsmith evaluate)")
        return None, None
    report, fields = load_report(path), read_fields(export)
    p = report.provenance
    measured = p.drafter_weights_sha256 in (None, weights_sha256(export))
    if not measured or p.drafter_config != fields:
        if options.report is not None:
            raise ConfigError(f"--report {path}: measured on another drafter", where="push")
        say(f"{path} is not sent: it was measured on another drafter; evaluate again")
        return None, None
    page = path.with_name(PAGE)
    return report, page if page.is_file() else None


def _facts_of_recipe(recipe: Recipe | None, target: str) -> dict[str, Any]:
    """The data of a card, and what a reader must know of a target that was trained jointly."""
    if recipe is None:
        return {}
    named = [source.name for source in recipe.data.train if source.name]
    other = [Path(source.label).name for source in recipe.data.train if not source.name]
    remark = (
        "The target was trained jointly with this drafter (`joint` in the recipe): it drafts for"
        f" that changed {target}, which is not in this repository."
    )
    return {
        "datasets": list(dict.fromkeys(named)),
        "other_data": list(dict.fromkeys(other)),
        "remarks": [] if recipe.joint is None else [remark],
    }


def _num_speculative_tokens(report: AcceptanceReport | None, fields: Fields) -> int:
    if report is not None:
        return report.provenance.num_speculative_tokens
    own = fields.get("draftsmith") or {}
    return own.get("num_speculative_tokens") or NUM_SPECULATIVE_TOKENS


def _target_sections(fields: Fields) -> list[Fields]:
    """The parts of config.json that name the target."""
    own, wrapped = fields.get("draftsmith") or {}, fields.get("speculators_config") or {}
    sections = (own.get("target"), wrapped.get("verifier"))
    return [section for section in sections if section and section.get("name_or_path")]


def _target_of(fields: Fields) -> str | None:
    return next((section["name_or_path"] for section in _target_sections(fields)), None)


def _with_target(fields: Fields, name: str) -> Fields:
    """config.json with this name of the target."""
    changed = copy.deepcopy(fields)
    for section in _target_sections(changed):
        section["name_or_path"] = name
    return changed


def _link_files(export: Path, out: Path) -> None:
    """Links the files that match SENT, or copies them where the file system has no links."""
    files = [path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()]
    hidden = [".*", "*/.*"]
    for name in filter_repo_objects(files, allow_patterns=list(SENT), ignore_patterns=hidden):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.symlink((export / name).resolve(), out / name)
        except OSError:
            shutil.copyfile(export / name, out / name)


def _local_paths(tree: Any) -> Iterator[str]:
    """The strings of a tree of dicts and lists that are absolute paths."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _local_paths(item)
    elif isinstance(tree, str) and "\n" not in tree:
        path = Path(tree).expanduser() if tree.startswith("~/") else Path(tree)
        if path.is_absolute() and len(path.parts) > 2:  # not "/no_think"
            yield tree
