"""Uploads a folder to a repository of the Hub, which is created private; errors hide
the token.

Files that are there already are not sent again: they are compared by content, large ones also
before a commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.errors import ConfigError, DraftsmithError, HubError
from speculators.hub import hub_trouble, is_transient


@dataclass(frozen=True)
class Destination:
    """The repository that a folder is sent to."""

    repository: str  # org/name
    private: bool = True
    token: str | None = None  # None: HF_TOKEN, or the one of `hf auth login`


@dataclass(frozen=True)
class Pushed:
    """The result of an upload."""

    url: str  # of the commit
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
        commit = api.upload_folder(
            repo_id=to.repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=list(own),
        )
    return Pushed(commit.commit_url, bool(before.private), commit.oid != before.sha)


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


def _prepare(api: Any, to: Destination, folder: Path) -> Any:
    """The state of the repository before the upload; it is created if need be."""
    if not api.repo_exists(to.repository):
        api.create_repo(to.repository, private=to.private, exist_ok=True)
    state = api.model_info(to.repository)
    if to.private and state.private is False:
        raise ConfigError(
            f"push to {to.repository}: it is public already, and a push is private unless told"
            " otherwise; pass --public (export.hub_private_repo: false) or name another repository"
        )
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
def _as_hub_error(what: str, token: str) -> Iterator[None]:
    """Raises the client's exceptions as HubError, without the token and without their causes, which
    may quote it."""
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:
        words = hub_trouble(error) or f"{type(error).__name__}: {str(error).strip()}"
        if is_transient(error):
            words += ". What arrived stays there: the same command sends only what is missing"
        failure = HubError(f"{what}: {words.replace(token, '***')}")
    else:
        return
    raise failure
