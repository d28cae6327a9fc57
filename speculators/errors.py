"""The project's exceptions. A message says where, what was wrong, what was expected, what to do.

All derive from `DraftsmithError`, so that the command line and the servers tell a fault of the user
from one of the program, which keeps its traceback. Packages add classes of their own, beside what
raises them."""

from __future__ import annotations


class DraftsmithError(Exception):
    """Base of every error that a user can cause and fix; the command line prints it without a
    traceback.

    `where`: the key, file or option that it is about, which the message begins with; None: in the
    message."""

    def __init__(self, message: str = "", *, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}")
        self.where = where


class ConfigError(DraftsmithError):
    """A recipe, an option or a configuration file is wrong."""


class DataError(DraftsmithError):
    """A data row cannot be turned into tokens with a provable loss mask."""


class CheckpointError(DraftsmithError):
    """The weights in a directory do not match its configuration."""


class UnsupportedTarget(DraftsmithError):
    """The target's architecture is not supported, and a workaround would change its output."""


class QuantisedTensors(UnsupportedTarget):
    """Tensors that are needed as floating-point numbers are quantised in the checkpoint."""


class HubError(DraftsmithError):
    """The Hub could not be reached, or a request to it failed."""
