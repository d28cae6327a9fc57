"""Fixtures over the cases of every family."""

from __future__ import annotations

import pytest

from tests.support.cases import BASE, World, world_of


@pytest.fixture(params=BASE.values())
def world(request) -> World:
    """A target with a drafter of each family in turn."""
    return world_of(request.param)
