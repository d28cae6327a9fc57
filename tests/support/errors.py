"""Errors by what they speak of: their class and their `where`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftsmith.speculators.errors import DraftsmithError


@contextmanager
def raises_at(kind: type[DraftsmithError], where: object) -> Iterator[None]:
    """Expects an error of this class whose `where` is this key, file or option."""
    with pytest.raises(kind) as error:
        yield
    assert error.value.where == str(where)
