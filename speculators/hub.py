"""Names of folders and of repositories on the Hub, their revisions and cache folders.

The contents of a repository do not belong here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import ConfigError

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(rf"^{_PART}(?:/{_PART})?$")
_REPOSITORY = re.compile(rf"^{_PART}/{_PART}$")
_WITH_REVISION = re.compile(rf"^(?P<repository>{_PART}(?:/{_PART})?)@(?P<revision>\w[\w./-]*)$")
_CACHED = re.compile(
    r"(?:^|[\\/])models--(?P<owner>[^\\/]+?)--(?P<name>[^\\/]+)[\\/]snapshots[\\/]"
)


def expanded(value: Any) -> Any:
    """`value`, plain data or a path, with the home folder in place of `~/` at the beginning of its
    texts."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, Path):
        return Path(expanded(str(value)))
    if isinstance(value, dict):
        return {key: expanded(part) for key, part in value.items()}
    return [expanded(part) for part in value] if isinstance(value, list) else value


def split_revision(path_or_id: str, revision: str | None = None) -> tuple[str, str | None]:
    """Splits `org/name@revision`. Any other text, and the name of an existing folder, is returned
    with `revision`.

    ConfigError if the text and `revision` name different revisions.
    """
    match = _WITH_REVISION.match(path_or_id)
    if match is None or Path(path_or_id).exists():
        return path_or_id, revision
    if revision not in (None, match["revision"]):
        raise ConfigError(
            f"revision {revision!r} is given too; give only one", where=f"{path_or_id}"
        )
    return match["repository"], match["revision"]


def with_revision(path_or_id: str, revision: str | None) -> str:
    """The inverse of `split_revision`; a folder has no revision."""
    return (
        path_or_id if revision is None or Path(path_or_id).exists() else f"{path_or_id}@{revision}"
    )


def is_repository_id(text: str) -> bool:
    """True if the text has the form org/name; the disk is not looked at."""
    return _REPOSITORY.match(text) is not None


def may_be_on_hub(text: str) -> bool:
    """True if the Hub has names of this form: `org/name`, or `name` alone as those of its first
    years. No path with more parts is one, and none from the root or from `.`."""
    return _HUB_NAME.match(text) is not None


def repository_id(path_or_id: str) -> str | None:
    """The `org/name` of an id, perhaps with revision, or of a folder in the Hub's cache."""
    if cached := _CACHED.search(path_or_id):
        return f"{cached['owner']}/{cached['name']}"
    name, _ = split_revision(path_or_id)
    return name if is_repository_id(name) and not Path(name).exists() else None


def cached_folder(path_or_id: str, revision: str | None = None) -> Path:
    """A folder as it is, of an id the cache folder of its config.json; makes no request."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = split_revision(path_or_id, revision)
    if Path(name).is_dir():
        return Path(name)
    path = None
    if may_be_on_hub(name):
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(path, str):
        raise ConfigError(
            "neither a folder nor in the Hub's cache; load it first", where=f"{path_or_id}"
        )
    return Path(path).parent


def one_line(error: BaseException) -> str:
    """The message of an exception, which may be a paragraph."""
    return " ".join(str(error).split()).removesuffix(".")


def why_not_loaded(path_or_id: str, error: BaseException) -> str:
    """Why nothing was loaded from there. Of a folder that is not there, the libraries say that it
    is no repository id, or that they have no network."""
    name, _ = split_revision(path_or_id)
    if Path(name).is_dir():
        return one_line(error)
    if not may_be_on_hub(name):
        return "no such folder"
    return f"no such folder, and the Hub did not give it: {one_line(error)}"
