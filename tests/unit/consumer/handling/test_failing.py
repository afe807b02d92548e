"""When a failing message is set aside."""

from __future__ import annotations

import pytest

from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.handling.not_acked import Retry
from keylane.consumer.settings import ConsumerSettings, FailurePolicy
from keylane.protocol.backoff import Backoff
from keylane.protocol.message import Message
from keylane.protocol.parked import FAILURE_TEXT_CHARS_MAX


def message(attempt: int) -> Message:
    return Message("s", b"k", b"", 0, 1, 0, attempt=attempt)


@pytest.mark.parametrize("policy", [FailurePolicy.PARK, FailurePolicy.DEAD])
def test_message_is_set_aside_after_its_last_try(policy: FailurePolicy):
    failing = FailureRules(policy=policy, tries_max=3)
    assert [failing.is_last(message(attempt), ValueError()) for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


def test_message_is_tried_on_when_the_policy_is_block():
    assert not FailureRules(tries_max=1).is_last(message(9), ValueError())


def test_message_is_tried_again_when_its_handler_asks():
    failing = FailureRules(policy=FailurePolicy.PARK, tries_max=1)
    assert not failing.is_last(message(5), Retry("later"))
    assert not failing.is_last(message(5), ExceptionGroup("g", [Retry("later")]))


def test_failure_keeps_the_error_within_limits():
    failing = FailureRules(client="host:1", wall_ms=lambda: 77)
    failure = failing.build_failure(ValueError("x" * 5_000 + "\ud800"), 4)
    assert (failure.kind, failure.client, failure.at_ms, failure.attempts) == (
        "ValueError",
        "host:1",
        77,
        4,
    )
    assert failure.text == "x" * FAILURE_TEXT_CHARS_MAX


def test_policy_is_replaced_while_messages_wait():
    """The next failed attempt follows the new settings."""
    failing = FailureRules()
    assert not failing.is_last(message(3), ValueError())
    failing.apply_settings(ConsumerSettings(on_failure="park", tries_max=3))
    assert failing.is_last(message(3), ValueError())
    failing.apply_settings(ConsumerSettings())
    assert not failing.is_last(message(3), ValueError())


def test_failure_of_an_error_without_a_text_is_kept():
    """The `__str__` of an error is user code, and may raise."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert FailureRules().build_failure(MuteError(), 1).text == "its text is not available"


def test_each_failure_sets_a_message_aside_under_retry():
    """Also if the handler requested a retry, which then waits at least as long as requested."""
    failing = FailureRules()
    pauses = Backoff(first_ms=100, max_ms=100)
    failing.apply_settings(
        ConsumerSettings(on_failure="retry", retry_tries_max=3, retry_backoff=pauses)
    )
    assert failing.is_last(message(1), Retry())
    assert failing.is_last(message(1), ValueError())
    pause_ms = failing.pause_ms(message(2), None)
    assert pause_ms is not None
    assert 50 <= pause_ms <= 100
    assert failing.pause_ms(message(1), 5_000) == 5_000
    assert failing.pause_ms(message(3), 5_000) is None


def test_message_of_a_shared_group_under_retry_waits_in_place_and_is_then_set_aside():
    """A handler that requests a retry gets no more attempts than others; a longer requested pause
    counts.
    """
    slow = Backoff(first_ms=5_000, max_ms=5_000)
    failing = FailureRules(
        policy=FailurePolicy.RETRY, in_place=True, retry_tries_max=3, retry_backoff=slow
    )
    for error in (ValueError(), Retry("later")):
        last = [failing.is_last(message(attempt), error) for attempt in (1, 2, 3)]
        assert last == [False, False, True]
    assert failing.pause_ms(message(3), 9_000) is None, "it is a dead letter"
    assert 2_000 <= failing.retry_wait_ms(0, 1) <= 8_000
    assert failing.retry_wait_ms(60_000, 1) == 60_000


def test_pauses_of_a_shared_group_under_retry_are_those_of_retries():
    retry = ConsumerSettings(on_failure="retry", consume_strategy="shared")
    assert retry.try_backoff == retry.retry_backoff
    assert retry.last_try == retry.retry_tries_max
    dead = ConsumerSettings(on_failure="dead", consume_strategy="shared")
    assert dead.try_backoff == dead.handler_backoff
    assert dead.last_try == dead.tries_max
