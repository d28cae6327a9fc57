"""Uploads a folder to a private repository of the Hub; errors hide the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftsmith.speculators.errors import ConfigError, DraftsmithError, HubError
from draftsmith.speculators.hub import one_line


@dataclass(frozen=True)
class Destination:
    """The repository that a folder is sent to."""

    repository: str  # org/name
    private: bool = True
    token: str | None = None  # None: HF_TOKEN, or the one of `hf auth login`

    def __str__(self) -> str:
        return f"{self.repository} ({'private' if self.private else 'public'})"


def upload(
    folder: Path, to: Destination, message: str, *, delete_patterns: Sequence[str] = ()
) -> str:
    """Uploads the files of `folder`; returns the address of the commit. `delete_patterns`: files
    that are removed there if `folder` lacks them.

    ConfigError before anything is sent if the repository is public and `to` is private; HubError
    with the client's message in all other cases."""
    from huggingface_hub import HfApi

    api = HfApi(token=to.token, library_name="draftsmith")
    with _as_hub_error(f"push to {to.repository}", to.token):
        api.create_repo(to.repository, private=to.private, exist_ok=True)
        if to.private and api.model_info(to.repository).private is False:
            raise ConfigError(
                "it is public already, and a push is private unless asked for otherwise; pass"
                " --public or name another repository",
                where=f"push to {to.repository}",
            )
        commit = api.upload_folder(
            repo_id=to.repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=list(delete_patterns),
        )
    return commit.commit_url


def account() -> str:
    """The account whose token would be used; HubError if it is not accepted."""
    from huggingface_hub import HfApi

    with _as_hub_error("push", None):
        return HfApi().whoami()["name"]


@contextmanager
def _as_hub_error(action: str, token: str | None) -> Iterator[None]:
    """The client's exceptions as HubError, without the token they may quote."""
    from huggingface_hub import get_token

    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:
        message = one_line(error) or type(error).__name__
        if secret := token or get_token():
            message = message.replace(secret, "***")
        raise HubError(f"{message}", where=f"{action}") from None
