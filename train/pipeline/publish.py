"""Pushes an exported drafter to the Hub, with a card written from its `acceptance.json`.

The drafter is loaded strictly first, and its own folder is only read. No absolute path of this
machine is sent: the target is named by its id or the last part of its folder, and a recipe or a
page that holds such a path is left out."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError

from draftsmith.inference.report.model_card import CardFacts, model_card
from draftsmith.inference.report.schema import AcceptanceReport, load_report, save_report
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.digests import weights_sha256
from draftsmith.speculators.errors import CheckpointError, ConfigError, DraftsmithError
from draftsmith.speculators.export import load_weights, read_drafter_config, read_fields
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from draftsmith.speculators.export.upload import Destination, upload
from draftsmith.speculators.hub import is_repository_id, repository_id
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.vocab.token_map import FILE as TOKEN_MAP
from draftsmith.train.recipe.data_sections import CREDENTIALS
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import EXPORT, PAGE, RECIPE, REPORT, Recipe
from draftsmith.train.regeneration.store import write_json

CARD = "README.md"
WRITTEN = (REPORT, PAGE, RECIPE)  # an old one is removed there if a push has none
SENT = ["*.safetensors", "*.json", "tokenizer*", "vocab.*", "merges.txt", "*.jinja"]
SENT += ["LICENSE*", "NOTICE*", CARD]

Say = Callable[[str], None]
Fields = dict[str, Any]  # config.json
LOCAL = re.compile(r"""(?<=[\s"'\[{])(?:/|~/)[\w.-]+/[^\s"',\]}]*""")  # but not "/no_think"


@dataclass(frozen=True)
class PushOptions:
    """Facts for the card that no file has."""

    base_model: str | None = None  # the target's id; None: as recipe or config.json name it
    license: str | None = None
    report: Path | None = None  # acceptance.json; None: the one beside the drafter


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
        assembled = assemble(folder, to.repository, Path(scratch), options, say=say)
        return upload(assembled, to, message or f"Upload {to.repository}", delete_patterns=WRITTEN)


def push_run(recipe: Recipe, code: int, say: Say = print) -> None:
    """Pushes the run's export to `export.push_to_hub`, unless a gate is missed (`code` 1)."""
    repository = recipe.export.push_to_hub
    folder = Path(recipe.output_dir)
    assert repository is not None
    if code:
        say(f"not pushed to {repository}: a gate is missed")
        return
    to = Destination(repository)
    try:
        url = push(folder, to, PushOptions(), message=f"Upload {recipe.name}", say=say)
    except DraftsmithError as error:
        again = f"draftsmith push {folder} {repository}"
        raise type(error)(f"{error}. The run is done; `{again}` pushes it") from error
    say(f"{to}: {url}")


@dataclass(frozen=True)
class PublicDrafter:
    """A drafter as it will be called in its repository.

    export       its folder here
    fields       its config.json as it is here
    recipe       of the run that exported it; None: it lies alone
    repository   org/name that it is sent to
    base_model   the target's id on the Hub; None: it has none
    target_name  `base_model`, or the last part of the target's folder
    """

    export: Path
    config: DrafterConfig
    fields: Fields
    recipe: Recipe | None
    repository: str
    base_model: str | None
    target_name: str

    @property
    def public_fields(self) -> Fields:
        """config.json with the target under its public name."""
        public = copy.deepcopy(self.fields)
        for section in _target_sections(public):
            section["name_or_path"] = self.target_name
        return public


def assemble(
    folder: str | Path, repository: str, out: Path, options: PushOptions, *, say: Say = print
) -> Path:
    """Puts the files to be sent into `out`, weights as links; returns it. `folder`: an export, or
    a run that has one. ConfigError: a name of the Hub is none; CheckpointError: the drafter does
    not load."""
    drafter = _public_drafter(folder, repository, options, say)
    _link_files(drafter.export, out)
    _write_config(drafter, out)
    report = _write_report(drafter, out, options, say)
    recipe_text = _write_recipe(drafter, out, say)
    if not (out / CARD).exists():
        _write_card(drafter, out, report, recipe_text, options)
    return out


def _public_drafter(
    folder: str | Path, repository: str, options: PushOptions, say: Say
) -> PublicDrafter:
    """The drafter of `folder`, loaded strictly, and its names."""
    for name in filter(None, (repository, options.base_model)):
        if not is_repository_id(name):
            raise ConfigError(f"expected org/name, got {name!r}", where="push")
    alone = (Path(folder) / "config.json").is_file()
    export = Path(folder) if alone else Path(folder) / EXPORT
    config = _load_strictly(export)
    fields = read_fields(export)
    recipe = _recipe_beside(export)
    target = _target_of(fields) if recipe is None else recipe.target.model
    base_model = options.base_model or (repository_id(target) if target else None)
    if base_model is None:
        say("the target has no repository id: the card names no base_model (--base-model)")
    if base_model == repository:
        raise ConfigError("it is the target; name a repository for the drafter", where="push")
    target_name = base_model or Path(target or "TARGET").name
    return PublicDrafter(export, config, fields, recipe, repository, base_model, target_name)


def _recipe_beside(export: Path) -> Recipe | None:
    """The recipe of the run whose export this is."""
    run = export.absolute().parent
    if export.name != EXPORT or not (run / RECIPE).is_file():
        return None
    return load_recipe(run / RECIPE)


def _write_config(drafter: PublicDrafter, out: Path) -> None:
    """config.json in place of the link to it."""
    (out / "config.json").unlink()
    write_json(out / "config.json", drafter.public_fields)


def _write_report(
    drafter: PublicDrafter, out: Path, options: PushOptions, say: Say
) -> AcceptanceReport | None:
    """The acceptance report under public names, and its page unless that holds a path of this
    machine. None if there is no report of these very files."""
    path = _report_of(drafter.export, drafter.fields, options, say)
    if path is None:
        return None
    page = path.with_name(PAGE)
    if page.is_file() and not LOCAL.search(page.read_text(encoding="utf-8")):
        (out / PAGE).symlink_to(page.resolve())
    report = load_report(path)
    names = {
        "target_name": drafter.target_name,
        "drafter_path": drafter.repository,
        "drafter_config": drafter.public_fields,
    }
    provenance = report.provenance.model_copy(update=names)
    save_report(report.model_copy(update={"provenance": provenance}), out / REPORT)
    return report


def _write_recipe(drafter: PublicDrafter, out: Path, say: Say) -> str | None:
    """The recipe of the run, resolved and without passwords; its text. None: there is none, or it
    names a path."""
    if drafter.recipe is None:
        return None
    text = CREDENTIALS.sub("***@", drafter.recipe.resolved_yaml())
    if local := LOCAL.search(text):
        say(f"{RECIPE} is not sent, since it names {local[0]}")
        return None
    (out / RECIPE).write_text(text, encoding="utf-8")
    return text


def _write_card(
    drafter: PublicDrafter,
    out: Path,
    report: AcceptanceReport | None,
    recipe_text: str | None,
    options: PushOptions,
) -> None:
    """The card, from the report and the recipe."""
    drafts = (drafter.fields.get("draftsmith") or {}).get("num_speculative_tokens")
    if report is not None:
        drafts = report.provenance.num_speculative_tokens
    facts = CardFacts(
        repository=drafter.repository,
        config=drafter.config,
        fields=drafter.public_fields,
        target_name=drafter.target_name,
        base_model=drafter.base_model,
        num_speculative_tokens=drafts or NUM_SPECULATIVE_TOKENS,
        license=options.license,
        recipe=recipe_text,
        files=sorted(path.name for path in out.iterdir()),
        **_facts_of_recipe(drafter.recipe, drafter.target_name),
    )
    (out / CARD).write_text(model_card(facts, report), encoding="utf-8")


def _load_strictly(export: Path) -> DrafterConfig:
    """The drafter's config, once every tensor has its place."""
    try:
        config = read_drafter_config(export)
        loaded = config
        if getattr(config, "other_tokenizer", False):  # its map can be read only beside the target
            if not (export / TOKEN_MAP).is_file():
                raise CheckpointError("is missing; export it again", where=TOKEN_MAP)
            loaded = config.model_copy(update={"other_tokenizer": False})
        load_weights(family_class(config.family)(loaded), export)
    except (DraftsmithError, SafetensorError) as error:
        raise CheckpointError(f"nothing was sent: {error}", where=f"push {export}") from error
    return config


def _report_of(export: Path, fields: Fields, options: PushOptions, say: Say) -> Path | None:
    """The acceptance report, if it was measured on these very files."""
    beside = [folder / REPORT for folder in (export, export.absolute().parent)]
    path = options.report or next((path for path in beside if path.is_file()), None)
    if path is None:
        say(f"there is no {REPORT}: the card says that nothing was measured (draftsmith evaluate)")
        return None
    measured = load_report(path).provenance
    same = measured.drafter_weights_sha256 in (None, weights_sha256(export))
    if same and measured.drafter_config == fields:
        return path
    if options.report is not None:
        raise ConfigError("measured on another drafter", where=f"--report {path}")
    say(f"{path} is not sent: it was measured on another drafter; evaluate again")
    return None


def _facts_of_recipe(recipe: Recipe | None, target: str) -> dict[str, Any]:
    """The data of a card, and what a reader must know of a target that was trained jointly."""
    if recipe is None:
        return {}
    sources = recipe.data.train
    remark = (
        "The target was trained jointly with this drafter (`joint` in the recipe): it drafts for"
        f" that changed {target}, which is not in this repository."
    )
    return {
        "datasets": list(dict.fromkeys(s.resolved().hub_id[0] for s in sources if s.name)),
        "other_data": list(dict.fromkeys(Path(s.label).name for s in sources if not s.name)),
        "remarks": [] if recipe.joint is None else [remark],
    }


def _target_sections(fields: Fields) -> list[Fields]:
    """The parts of config.json that name the target."""
    described = fields.get("draftsmith") or {}
    wrapped = fields.get("speculators_config") or {}
    sections = (described.get("target"), wrapped.get("verifier"))
    return [section for section in sections if section and section.get("name_or_path")]


def _target_of(fields: Fields) -> str | None:
    return next((section["name_or_path"] for section in _target_sections(fields)), None)


def _link_files(export: Path, out: Path) -> None:
    """Links the files that match SENT."""
    files = [path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()]
    hidden = [".*", "*/.*"]
    for name in filter_repo_objects(files, allow_patterns=SENT, ignore_patterns=hidden):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to((export / name).resolve())
