"""One report for the tests of its views."""

from __future__ import annotations

import pytest

from draftsmith.inference.report.build import Bound
from draftsmith.inference.report.schema import AcceptanceReport
from tests.support.reports import make_report


@pytest.fixture(scope="session")
def report() -> AcceptanceReport:
    return make_report(
        lossless_mismatches=Bound(max=0),
        t0__acceptance_length=Bound(min=3.0),
        t1__speedup_vs_autoregressive=Bound(min=9),
    )
