"""Hub repository ids, revisions and cache folders, and readable messages for the Hub client's
exceptions.

The contents of a repository do not belong here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from speculators.errors import ConfigError

_PART = r"[A-Za-z0-9][\w.-]*"
_REPOSITORY = re.compile(rf"^{_PART}/{_PART}$")
_WITH_REVISION = re.compile(rf"^(?P<repository>{_PART}(?:/{_PART})?)@(?P<revision>\w[\w./-]*)$")
_CACHED = re.compile(
    r"(?:^|[\\/])models--(?P<owner>[^\\/]+?)--(?P<name>[^\\/]+)[\\/]snapshots[\\/]"
)
_IDENTIFIER = re.compile(rf"^{_PART}(?:/{_PART})?$")
REACHABLE_S = 5.0  # for the first answer of the Hub
TOKEN_HINT = "HF_TOKEN, or `hf auth login`"


def split_revision(path_or_id: str, revision: str | None = None) -> tuple[str, str | None]:
    """Splits `org/name@revision`. Any other text, and the name of an existing folder, is returned
    with `revision`.

    ConfigError if the text and `revision` name different revisions.
    """
    match = _WITH_REVISION.match(path_or_id)
    if match is None or Path(path_or_id).exists():
        return path_or_id, revision
    if revision not in (None, match["revision"]):
        raise ConfigError(f"{path_or_id}: revision {revision!r} is given too; give only one")
    return match["repository"], match["revision"]


def with_revision(path_or_id: str, revision: str | None) -> str:
    """Joins an id and its revision, the inverse of `split_revision`; a folder has no revision."""
    return (
        path_or_id if revision is None or Path(path_or_id).exists() else f"{path_or_id}@{revision}"
    )


def is_repository_id(text: str) -> bool:
    """True if the text has the form org/name; the disk is not looked at."""
    return _REPOSITORY.match(text) is not None


def repository_id(path_or_id: str) -> str | None:
    """The `org/name` of an id, with or without revision, or of a folder in the Hub's cache; None
    for anything else."""
    if cached := _CACHED.search(path_or_id):
        return f"{cached['owner']}/{cached['name']}"
    name, _ = split_revision(path_or_id)
    return name if is_repository_id(name) and not Path(name).exists() else None


def cached_folder(path_or_id: str, revision: str | None = None) -> Path:
    """Returns a folder as it is, and for an id the cache folder of its config.json; makes no
    request."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = split_revision(path_or_id, revision)
    if Path(name).is_dir():
        return Path(name)
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ConfigError(f"{path_or_id}: neither a folder nor in the Hub's cache; load it first")
    return Path(found).parent


def require_reachable(path_or_id: str, revision: str | None = None) -> None:
    """ConnectionError within seconds for an id that is not in the cache while the Hub cannot be
    reached; its client would ask again and again for a minute."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    name, revision = split_revision(path_or_id, revision)
    if constants.HF_HUB_OFFLINE or Path(name).exists() or not _IDENTIFIER.match(name):
        return
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=REACHABLE_S)
    except Exception as error:
        if not is_network_error(error):
            raise
        raise ConnectionError(f"{path_or_id}: the Hub could not be reached") from error


def hub_trouble(error: BaseException) -> str | None:
    """Explains an exception of the Hub's client, or one in its chain, with what to do; None if it
    is not the Hub's."""
    from huggingface_hub import constants, errors

    seen = list(_chain(error))
    absent = any(isinstance(each, errors.LocalEntryNotFoundError) for each in seen)
    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in seen) or (
        absent and constants.HF_HUB_OFFLINE
    ):
        return (
            "not in the cache, and HF_HUB_OFFLINE forbids asking the Hub; unset it, or fetch it"
            " with `hf download`"
        )
    if words := next((words for each in seen if (words := _words_for(each))), None):
        return words
    if status := next((status for each in seen if (status := http_status(each))), None):
        return f"the Hub answered with status {status}: {' '.join(str(error).split())}"
    return (
        "the Hub could not be reached; try again later"
        if absent or is_network_error(error)
        else None
    )


def _words_for(error: BaseException) -> str | None:
    """Explains one exception of the client, without its chain; None if there is nothing to say."""
    from huggingface_hub import errors

    status = http_status(error)
    if isinstance(error, errors.HFValidationError):
        return "no such folder, and not the id of a repository, which is org/name"
    if isinstance(error, errors.GatedRepoError):
        return f"access is granted on its page, to the account whose token is used ({TOKEN_HINT})"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hub has no such repository, or it is private and not for this token"
            f" ({TOKEN_HINT})"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the repository lacks a file that is needed"
    if status == 401:
        return f"the Hub does not accept the token; renew it ({TOKEN_HINT})"
    if status == 403:
        return f"the token is not allowed to do this; use one with the permission ({TOKEN_HINT})"
    if status in TRANSIENT:
        return f"the Hub answered with status {status}; try again later"
    return None


TRANSIENT = (408, 429, 500, 502, 503, 504)


def is_transient(error: BaseException) -> bool:
    """True if the same request may succeed later."""
    statuses = [code for each in _chain(error) if (code := http_status(each))]
    return any(code in TRANSIENT for code in statuses) or (not statuses and is_network_error(error))


def is_network_error(error: BaseException) -> bool:
    """True if the connection failed; an answer with an error status is not a network error."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(
        isinstance(each, (ConnectionError, TimeoutError))
        or type(each).__module__.partition(".")[0].startswith("httpx")
        for each in _chain(error)
        if not isinstance(each, OfflineModeIsEnabled) and http_status(each) is None
    )


def http_status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception and its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
