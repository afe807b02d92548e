"""How often messages failed, as brokers and owners tell each other."""

from __future__ import annotations

from keylane.consumer.pulling.failed_tries import FAILING_MAX, REPORTED_MAX, FailedTries
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure
from keylane.protocol.text import key_digest


def message(offset: int) -> Message:
    return Message("s", b"k", b"", offset, 1, 0)


def failure(at_ms: int = 7, *, attempts: int = 1, text: str = "no such town") -> Failure:
    return Failure("ValueError", text, "host-1", at_ms, attempts)


def test_attempt_counts_on_from_an_earlier_owner():
    """Once: a message that comes again under this grant keeps its own count."""
    tries = FailedTries()
    tries.load_earlier([(3, 2)])
    again, other = message(3), message(4)
    tries.add_earlier_tries([again, other])
    assert (again.attempt, other.attempt) == (3, 1)
    once_more = message(3)
    tries.add_earlier_tries([once_more])
    assert once_more.attempt == 1


def test_tries_are_told_until_the_broker_has_them():
    tries = FailedTries()
    failing = message(3)
    tries.record_failure(failing, failure())
    told = tries.next_unreported()
    assert told == ((3, 1),)
    failing.attempt = 2
    tries.record_failure(failing, failure())
    tries.mark_reported(told)
    assert tries.next_unreported() == ((3, 2),), "it failed again meanwhile"
    tries.mark_reported(tries.next_unreported())
    assert not tries


def test_request_tells_a_limited_number():
    tries = FailedTries()
    for offset in range(REPORTED_MAX + 5):
        tries.record_failure(message(offset), failure())
    assert len(tries.next_unreported()) == REPORTED_MAX


def test_oldest_failing_message_is_told_with_its_last_failure():
    """Since its first one; a younger message is told only when the older one is handled or set
    aside.
    """
    tries = FailedTries()
    assert tries.oldest() is None
    tries.record_failure(message(5), failure(1))
    tries.record_failure(message(3), failure(2))
    tries.record_failure(message(3), failure(9, attempts=2, text="still not"))
    oldest = tries.oldest()
    assert oldest is not None
    assert (oldest.offset, oldest.since_ms, oldest.at_ms) == (3, 2, 9)
    assert (oldest.kind, oldest.text, oldest.attempts) == ("ValueError", "still not", 2)
    assert oldest.key_digest == key_digest(b"k")
    tries.remove([(0, 4)])
    younger = tries.oldest()
    assert younger is not None
    assert younger.offset == 5
    tries.remove([(4, 9)])
    assert tries.oldest() is None


def test_message_that_hangs_is_told_until_it_fails_or_ends():
    """Since its try began, or since it failed first; with how long its present try takes."""
    tries = FailedTries()
    assert tries.record_hang(message(5), failure(20_000, text="has not returned"), 12_000)
    assert not tries.record_hang(message(5), failure(21_000, text="has not returned"), 13_000), (
        "no news"
    )
    told = tries.oldest()
    assert told is not None
    assert (told.offset, told.since_ms, told.at_ms, told.running_ms) == (5, 8_000, 21_000, 13_000)
    tries.record_failure(message(5), failure(22_000))
    failed = tries.oldest()
    assert failed is not None
    assert (failed.kind, failed.since_ms, failed.running_ms) == ("ValueError", 8_000, None)
    assert tries.record_hang(message(5), failure(40_000, text="has not returned"), 10_000)
    assert tries.oldest().since_ms == 8_000  # type: ignore[union-attr]
    tries.remove([(5, 6)])
    assert tries.oldest() is None


def test_redriven_message_that_hangs_is_told():
    tries = FailedTries()
    assert tries.report_redriven_hang(9, message(4), failure(20_000), 12_000)
    told = tries.oldest()
    assert told is not None
    assert (told.source, told.offset, told.running_ms) == (9, 4, 12_000)
    tries.clear_redriven(9, 4)
    assert tries.oldest() is None


def test_failures_are_kept_of_a_limited_number():
    """Those that came first: what is told is the oldest of them."""
    tries = FailedTries()
    for offset in range(FAILING_MAX):
        tries.record_failure(message(10 + offset), failure())
    tries.record_failure(message(3), failure())
    oldest = tries.oldest()
    assert oldest is not None
    assert oldest.offset == 10


def test_redriven_message_is_told_when_no_other_fails_and_until_it_ends():
    tries = FailedTries()
    tries.report_redriven_failure(9, message(4), failure(5))
    tries.report_redriven_failure(9, message(4), failure(7, attempts=2))
    told = tries.oldest()
    assert told is not None
    assert (told.source, told.offset, told.since_ms, told.attempts) == (9, 4, 5, 2)
    tries.record_failure(message(30), failure())
    assert tries.oldest().offset == 30  # type: ignore[union-attr]
    tries.remove([(30, 31)])
    tries.clear_redriven(9, 4)
    assert tries.oldest() is None
