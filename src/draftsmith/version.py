"""The package's version. Imports nothing of the package, so that every layer may ask."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The version of the installed distribution; "0+unknown" in a source tree that is not
    installed."""
    try:
        return metadata.version("draftsmith")
    except metadata.PackageNotFoundError:
        return "0+unknown"
