"""Options of a log, which are flags of `draftsmith serve` and `draftsmith log`. Imports no
torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from draftsmith.inference.engine_options import option


class LogOptions(BaseModel):
    """What is kept of the traffic, and for how long."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log: Path | None = option(
        None,
        "folder in which prompts and responses are logged, for `draftsmith refresh`; default: none",
    )
    log_redact: Path | None = option(
        None,
        "what is removed before anything is written: a Python file with redact(exchange), which"
        " returns the exchange to write or None, or a file of regular expressions, one a line",
    )
    log_slice_s: int = option(
        3600, "seconds of a slice of time, of which a sample is kept", ge=60, le=86400
    )
    log_samples: int = option(1000, "most exchanges that are kept of a slice", ge=1)
    log_max_bytes: int = option(
        1024**3, "bytes of the log, beyond which the oldest files are removed", ge=1024**2
    )
    log_max_days: float = option(30, "days after which files are removed", gt=0)
