"""Scheduled messages that were given up: counted exactly, with the error of few."""

from __future__ import annotations

from keylane.producer.given_up import CAUSES_KEPT
from keylane.producer.scheduled.given_up import UntoldMessages
from keylane.protocol.errors import Fate, OutcomeUnknownError, ScheduleFullError


def test_error_is_of_a_message_that_nothing_told_of():
    untold = UntoldMessages()
    refused, doubtful = ScheduleFullError("full"), OutcomeUnknownError("silent")
    untold.add(1, refused)
    untold.add(2, doubtful)
    untold.told(1, refused)
    error = untold.error()
    assert error is not None
    assert (error.messages, error.unknown, error.fate) == (1, 1, Fate.UNKNOWN)
    assert error.__cause__ is doubtful
    untold.told(2, doubtful)
    assert untold.error() is None


def test_counts_are_exact_when_more_are_given_up_than_errors_are_kept():
    untold = UntoldMessages()
    errors = [ScheduleFullError(str(number)) for number in range(3 * CAUSES_KEPT)]
    for number, error in enumerate(errors):
        untold.add(number, error)
    for number in range(2 * CAUSES_KEPT):
        untold.told(number, errors[number])
    left = untold.error()
    assert left is not None
    assert (left.messages, left.unknown, left.fate) == (CAUSES_KEPT, 0, Fate.NOT_DONE)
    assert left.__cause__ is None, "the errors that were kept are told"
