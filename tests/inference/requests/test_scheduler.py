"""Who gets a row, and who moves when one is freed."""

from __future__ import annotations

from draftsmith.inference import SamplingParams
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.scheduler import Scheduler


def test_first_come_first_served_and_rows_stay_contiguous():
    def request(name, tokens):
        prompt = [1] * tokens
        return Request(name, 0, prompt, SamplingParams(), generator=None, max_model_len=8)

    scheduler = Scheduler(3)
    a, b, c, d = (request(name, tokens) for name, tokens in zip("abcd", (2, 3, 2, 4), strict=True))
    for waiting in (a, b, c, d):
        scheduler.add(waiting)
    # the longest prompt first, of those that came first
    assert scheduler.admit() == [b, a, c] == scheduler.running
    assert scheduler.admit() == [] and list(scheduler.waiting) == [d]
    assert scheduler.release(0) == 2 and scheduler.running == [c, a]
    assert scheduler.admit() == [d] and scheduler.running == [c, a, d]
    assert scheduler.release(2) is None and scheduler.has_unfinished
