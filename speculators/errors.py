"""The project's exceptions. Every message says what was wrong, where, what was expected and what to
do."""


class DraftsmithError(Exception):
    """Base of every error that a user can cause and fix; the command line prints it without a
    traceback."""


class ConfigError(DraftsmithError):
    """A recipe, an option or a configuration file is wrong."""


class DataError(DraftsmithError):
    """A data row cannot be turned into tokens with a provable loss mask."""


class CheckpointError(DraftsmithError):
    """The weights in a directory do not match its configuration."""


class UnsupportedTarget(DraftsmithError):
    """The target's architecture is not supported, and a workaround would change its output."""


class HubError(DraftsmithError):
    """The Hub could not be reached, or a request to it failed."""
