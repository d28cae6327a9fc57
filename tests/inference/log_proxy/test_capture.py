"""Which answers the proxy has logged."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from draftsmith.inference.log_proxy import app
from draftsmith.inference.log_proxy.app import Capture
from draftsmith.inference.traffic_log.recorder import Draw

JSON = (b"Content-Type", b"application/json")


@pytest.mark.parametrize(
    ("status", "headers", "answer", "logged"),
    [
        (200, [JSON], b"a" * 12, True),
        (404, [JSON], b"a", False),
        (200, [JSON, (b"Content-Encoding", b"gzip")], b"a", False),
        (200, [JSON], b"a" * 13, False),  # with the request more than is held
    ],
)
def test_errors_and_what_is_compressed_or_too_long_are_not_logged(
    status, headers, answer, logged, monkeypatch
):
    monkeypatch.setattr(app, "MOST_BYTES", 20)
    recorder = Mock()
    capture = Capture(Draw(1.0, 0.5))
    capture.request_piece(b"asked...")
    capture.begin(status, headers)
    for place in range(0, len(answer), 5):
        capture.piece(answer[place : place + 5])
    capture.hand_over(recorder)
    assert recorder.record.called is logged
