"""Fixtures over the cases of every family."""

from __future__ import annotations

import pytest

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import BASE, CASES, Case, make


@pytest.fixture(params=BASE.values(), ids=BASE.values())
def case(request) -> Case:
    """A case of each family in turn."""
    return CASES[request.param]


@pytest.fixture
def world(case, tiny_model) -> tuple[FrozenTarget, Drafter]:
    return make(case, tiny_model(case.architecture))


@pytest.fixture(params=CASES, ids=CASES)
def any_case(request) -> Case:
    """Every case in turn."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def make_drafter():
    """The function `make(case, model, noise=None)`."""
    return make


@pytest.fixture(scope="session")
def case_of():
    """The function `case_of(family, shape)`: a case of one's own."""
    return Case


@pytest.fixture(scope="session")
def all_cases() -> dict[str, Case]:
    return CASES
