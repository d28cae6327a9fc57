"""The date that a chat template prints: one for all renderings of a run.

Templates of Llama 3.2, gpt-oss and others ask for today's date (`strftime_now`). A run of several
days has to render every prompt as its first day did, or the responses of the first day would be
those to other prompts. The time of the first start is kept in the run's folder."""

from __future__ import annotations

import json
import string
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import DataError

FILE = "template_date.json"
CLOCK = "strftime_now"  # the function that transformers gives to templates
KEY = "template_date"


def asks_for_date(template: str) -> bool:
    """True if a chat template prints the date of the day."""
    return CLOCK in template


@lru_cache(maxsize=4)
def dated(template: str, date: datetime) -> str:
    """The chat template with a clock that stands at `date`.

    The clock is a macro, since newer transformers hand templates no functions. jinja drops the
    newline behind it, so that the template begins as it did."""
    percent = "\x00"  # a written one, which begins no code
    codes = [f"%{pad}{letter}" for letter in string.ascii_letters for pad in ("", "-")]
    pairs = [("%%", percent), *((code, date.strftime(code)) for code in codes), (percent, "%")]
    filters = "".join(f"|replace({old!r}, {new!r})" for old, new in pairs)
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def run_date(folder: Path, *, keep: bool = False) -> datetime:
    """The time of the run's first start; now, if it has none. `keep`: write that into `folder`.

    DataError if the file is damaged."""
    path = folder / FILE
    if not path.exists():
        now = datetime.now().replace(microsecond=0)
        if keep:
            write_whole(path, json.dumps({KEY: now.isoformat()}) + "\n")
        return now
    try:
        return datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))[KEY])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'expected {{"{KEY}": "2026-01-31T09:00:00"}}, {error}; write the time of the run\'s'
            " first start there, which its responses were written with",
            where=f"{path}",
        ) from None
