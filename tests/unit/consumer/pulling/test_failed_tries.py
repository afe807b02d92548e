"""How often messages failed, as brokers and owners tell each other."""

from __future__ import annotations

from keylane.consumer.pulling.failed_tries import TOLD_MAX, FailedTries
from keylane.protocol.message import Message


def message(offset: int) -> Message:
    return Message("s", b"k", b"", offset, 1, 0)


def test_attempt_counts_on_from_an_earlier_owner():
    """Once: a message that comes again under this grant keeps its own count."""
    tries = FailedTries()
    tries.begin([(3, 2)])
    again, other = message(3), message(4)
    tries.count_on([again, other])
    assert (again.attempt, other.attempt) == (3, 1)
    once_more = message(3)
    tries.count_on([once_more])
    assert once_more.attempt == 1


def test_tries_are_told_until_the_broker_has_them():
    tries = FailedTries()
    failing = message(3)
    tries.failed(failing)
    told = tries.next()
    assert told == ((3, 1),)
    failing.attempt = 2
    tries.failed(failing)
    tries.told(told)
    assert tries.next() == ((3, 2),), "it failed again meanwhile"
    tries.told(tries.next())
    assert not tries


def test_request_tells_a_limited_number():
    tries = FailedTries()
    for offset in range(TOLD_MAX + 5):
        tries.failed(message(offset))
    assert len(tries.next()) == TOLD_MAX
