"""Who gets a row, and who gives it back."""

from __future__ import annotations

from inference import SamplingParams
from inference.requests.request import Request
from inference.requests.scheduler import Scheduler


def test_scheduler_is_first_come_first_served():
    def request(name):
        return Request(name, 0, [1], SamplingParams(), generator=None, max_model_len=8)

    scheduler, (a, b, c, d) = Scheduler(3), [request(name) for name in "abcd"]
    for each in (a, b, c, d):
        scheduler.add(each)
    assert scheduler.candidates() == [a, b, c]
    scheduler.admit([b, a])
    assert (
        scheduler.running == [b, a]
        and list(scheduler.waiting) == [c, d]
        and scheduler.candidates() == [c]
    )
    scheduler.admit([c])
    assert (
        scheduler.youngest() == 2
        and scheduler.preempt(2) is None
        and list(scheduler.waiting) == [c, d]
    )
    assert scheduler.youngest() == 0 and scheduler.preempt(0) == 1
    assert scheduler.running == [a] and list(scheduler.waiting) == [b, c, d]
