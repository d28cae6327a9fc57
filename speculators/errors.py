"""The project's exceptions. Every message says what was wrong, where, what was expected and what to do."""


class DraftsmithError(Exception):
    """Base of every error that a user can cause and mend; the command line prints it without a traceback."""


class ConfigError(DraftsmithError):
    """A recipe, an option or a configuration file is wrong."""


class DataError(DraftsmithError):
    """A data row cannot be turned into tokens and a loss mask that can be trusted."""


class CheckpointError(DraftsmithError):
    """A directory of weights is not what its configuration says it is."""


class UnsupportedTarget(DraftsmithError):
    """The target's architecture cannot be used, and silently working around it would change its output."""


class HubError(DraftsmithError):
    """The Hub could not be reached, or did not do what it was asked."""
