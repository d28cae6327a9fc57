"""Uploads a folder to a repository of the Hub, which is created private; failures are resumed,
errors hide the token.

Files that are there already are not sent again: they are compared by content, large ones also
before a commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from speculators.errors import ConfigError, DraftsmithError, HubError
from speculators.hub import hub_trouble, is_transient

ATTEMPTS = 3  # of a whole upload; the client itself repeats single requests
MAIN = "main"


@dataclass(frozen=True)
class Destination:
    """The repository that a folder is sent to."""

    repository: str  # org/name
    private: bool = True
    revision: str | None = None  # a branch, made if it is not there
    create_pr: bool = False  # a pull request instead of a commit
    token: str | None = None  # None: HF_TOKEN, or the one of `hf auth login`


@dataclass(frozen=True)
class Pushed:
    """The result of an upload."""

    url: str  # of the commit, or of the pull request
    private: bool
    changed: bool  # False: everything was there already

    def describe(self, repository: str) -> str:
        result = self.url if self.changed else "everything was there already"
        return f"{repository} ({'private' if self.private else 'public'}): {result}"


def upload(folder: Path, to: Destination, message: str, *, own: tuple[str, ...] = ()) -> Pushed:
    """Makes the repository hold the files of `folder`. `own`: files that are removed there if
    `folder` lacks them.

    ConfigError before anything is sent if the repository is public and `to` is private, or if it
    holds other weights; HubError in all other cases, with what to do."""
    from huggingface_hub import HfApi

    token = usable_token(to.token)
    api = HfApi(token=token, library_name="draftsmith")
    with _as_hub_error(f"push to {to.repository}", token):
        before = _prepare(api, to, folder)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _as_hub_error(f"push to {to.repository}", token), _lfs_without_xet(api, to, token):
                commit = api.upload_folder(
                    repo_id=to.repository,
                    folder_path=folder,
                    commit_message=message,
                    revision=None if to.create_pr else to.revision or MAIN,
                    create_pr=to.create_pr,
                    delete_patterns=list(own),
                )
            break
        except _Transient:
            if (
                attempt == ATTEMPTS or to.create_pr
            ):  # a second attempt would open another pull request
                raise
            time.sleep(2.0**attempt)
    return Pushed(
        commit.pr_url or commit.commit_url, bool(before.private), commit.oid != before.sha
    )


def usable_token(token: str | None) -> str:
    """`token`, or the one that is stored; HubError if there is none or the network is forbidden."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("push: HF_HUB_OFFLINE forbids talking to the Hub; unset it")
    if not (token := token or get_token()):
        raise HubError("push: no token of the Hub; set HF_TOKEN, or log in with `hf auth login`")
    return token


def account() -> str:
    """The name of the account whose token would be used; HubError if the token is not accepted."""
    from huggingface_hub import HfApi

    token = usable_token(None)
    with _as_hub_error("push", token):
        return HfApi(token=token).whoami()["name"]


class _Transient(HubError):
    """An error that may be gone a little later."""


def _prepare(api: Any, to: Destination, folder: Path) -> Any:
    """The state of the branch before the upload; repository and branch are created if need be."""
    if not api.repo_exists(to.repository) and not to.create_pr:
        api.create_repo(to.repository, private=to.private, exist_ok=True)
    whole = api.model_info(to.repository)
    if to.private and whole.private is False:
        raise ConfigError(
            f"push to {to.repository}: it is public already, and a push is private unless told"
            " otherwise; pass --public (export.hub_private_repo: false) or name another repository"
        )
    if to.revision is None or to.create_pr or to.revision == MAIN:
        state = whole
    else:
        if not to.revision.startswith("refs/"):
            api.create_branch(to.repository, branch=to.revision, exist_ok=True)
        state = api.model_info(to.repository, revision=to.revision)
    weights = {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}
    remote = {
        file.rfilename for file in state.siblings or () if file.rfilename.endswith(".safetensors")
    }
    if others := sorted(remote - weights):
        raise ConfigError(
            f"push to {to.repository}: it holds other weights, which would be loaded along with"
            f" these ({', '.join(others[:3])}); remove them there, or name another repository"
        )
    return state


@contextmanager
def _lfs_without_xet(api: Any, to: Destination, token: str) -> Iterator[None]:
    """Sends large files by LFS where the endpoint does not speak xet, which the client takes for
    granted."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    before = constants.HF_HUB_DISABLE_XET
    if not before:
        revision = quote(to.revision or MAIN, safe="")
        url = f"{api.endpoint}/api/models/{to.repository}/xet-write-token/{revision}"
        answer = get_session().get(
            url,
            headers=build_hf_headers(token=token),
            params={"create_pr": "1"} if to.create_pr else None,
        )
        if answer.status_code in (404, 405, 501):
            constants.HF_HUB_DISABLE_XET = True
        else:
            hf_raise_for_status(answer)
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextmanager
def _as_hub_error(what: str, token: str) -> Iterator[None]:
    """Raises the client's exceptions as HubError, without the token and without their causes, which
    may quote it."""
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:
        words = hub_trouble(error) or f"{type(error).__name__}: {str(error).strip()}"
        kind: type[HubError] = HubError
        if is_transient(error):
            kind, words = (
                _Transient,
                f"{words}. What arrived stays there: the same command sends only what is missing",
            )
        failure = kind(f"{what}: {words.replace(token, '***')}")
    else:
        return
    raise failure
