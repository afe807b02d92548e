"""What is recorded of a failed attempt."""

from __future__ import annotations

from keylane.consumer.dispatch.failures import FailureRecords
from keylane.protocol.parked import FAILURE_TEXT_CHARS_MAX

RECORDS = FailureRecords(client="host:1", wall_ms=lambda: 77)


def test_failure_keeps_the_error_within_limits():
    failure = RECORDS.build_failure(ValueError("x" * 5_000 + "\ud800"), 4)
    assert (failure.kind, failure.client) == ("ValueError", "host:1")
    assert (failure.at_ms, failure.attempts) == (77, 4)
    assert failure.text == "x" * FAILURE_TEXT_CHARS_MAX


def test_failure_of_an_error_without_a_text_is_kept():
    """The `__str__` of an error is user code, and may raise."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert RECORDS.build_failure(MuteError(), 1).text == "its text is not available"
