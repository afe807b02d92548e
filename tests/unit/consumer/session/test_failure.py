"""The table of failures: policy × exclusive or shared."""

import random

import pytest

from keylane.consumer.session.failure import TABLE, Treatment, aside_ms, decide_treatment, pause_ms
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.groups import FailurePolicy
from keylane.protocol.routing import ConsumeStrategy

EXCLUSIVE, SHARED = ConsumeStrategy.EXCLUSIVE, ConsumeStrategy.SHARED


def treatment(policy, strategy, attempt, *, has_order=True, is_asked=False):
    settings = ConsumerSettings(
        on_failure=policy, consume_strategy=strategy, tries_max=3, retry_tries_max=5
    )
    return decide_treatment(settings, attempt=attempt, has_order=has_order, is_asked=is_asked)


def test_table_has_a_row_for_each_policy_and_strategy():
    assert set(TABLE) == {(policy, each) for policy in FailurePolicy for each in ConsumeStrategy}


@pytest.mark.parametrize(
    ("policy", "strategy", "fates"),
    [
        ("block", EXCLUSIVE, "AGAIN AGAIN AGAIN AGAIN AGAIN"),
        ("block", SHARED, "AGAIN AGAIN AGAIN AGAIN AGAIN"),
        ("park", EXCLUSIVE, "AGAIN AGAIN PARKED PARKED PARKED"),
        ("park", SHARED, "AGAIN AGAIN DEAD DEAD DEAD"),
        ("dead", EXCLUSIVE, "AGAIN AGAIN DEAD DEAD DEAD"),
        ("dead", SHARED, "AGAIN AGAIN DEAD DEAD DEAD"),
        ("retry", EXCLUSIVE, "ASIDE ASIDE ASIDE ASIDE DEAD"),
        ("retry", SHARED, "AGAIN AGAIN AGAIN AGAIN DEAD"),
    ],
)
def test_fate_follows_from_the_number_of_the_try(policy, strategy, fates):
    assert [treatment(policy, strategy, attempt).name for attempt in range(1, 6)] == fates.split()


def test_message_without_order_is_never_parked_with_its_key():
    assert treatment("park", EXCLUSIVE, 3, has_order=False) is Treatment.DEAD


def test_handler_that_asks_for_another_try_gets_it_except_under_retry():
    assert treatment("park", EXCLUSIVE, 9, is_asked=True) is Treatment.AGAIN
    assert treatment("dead", SHARED, 9, is_asked=True) is Treatment.AGAIN
    assert treatment("retry", EXCLUSIVE, 5, is_asked=True) is Treatment.DEAD


def test_pause_is_what_was_asked_for():
    rng, settings = random.Random(1), ConsumerSettings()
    assert pause_ms(settings, rng, attempt=1, asked_ms=0) == 0
    assert pause_ms(settings, rng, attempt=1, asked_ms=7_000) == 7_000
    assert 50 <= pause_ms(settings, rng, attempt=1, asked_ms=None) <= 100


def test_pause_grows_when_a_message_asks_again_and_again_for_none():
    rng, settings = random.Random(1), ConsumerSettings()
    pauses = [pause_ms(settings, rng, attempt=each, asked_ms=0) for each in (2, 3, 4, 30)]
    assert pauses == [1, 2, 4, 1_000]


def test_message_that_waits_alone_waits_at_least_what_was_asked_for():
    backoff = Backoff(first_ms=100, max_ms=100)
    settings, rng = ConsumerSettings(retry_backoff=backoff), random.Random(1)
    assert aside_ms(settings, rng, attempt=1, asked_ms=5_000) == 5_000
    assert 50 <= aside_ms(settings, rng, attempt=1, asked_ms=None) <= 100


def test_message_of_a_shared_group_under_retry_waits_in_place_at_least_what_was_asked_for():
    """The pauses are those of retries; a message that asks gets no more tries than others."""
    slow = Backoff(first_ms=5_000, max_ms=5_000)
    settings = ConsumerSettings(
        on_failure="retry", consume_strategy="shared", retry_tries_max=3, retry_backoff=slow
    )
    rng = random.Random(1)
    assert 2_000 <= pause_ms(settings, rng, attempt=1, asked_ms=0) <= 8_000
    assert 2_000 <= pause_ms(settings, rng, attempt=1, asked_ms=None) <= 8_000
    assert pause_ms(settings, rng, attempt=1, asked_ms=60_000) == 60_000
    for is_asked in (False, True):
        fates = [
            decide_treatment(settings, attempt=attempt, has_order=False, is_asked=is_asked)
            for attempt in (1, 2, 3)
        ]
        assert fates == [Treatment.AGAIN, Treatment.AGAIN, Treatment.DEAD]


def test_pauses_and_tries_of_a_shared_group_are_those_of_its_policy():
    retry = ConsumerSettings(on_failure="retry", consume_strategy="shared")
    assert retry.try_backoff == retry.retry_backoff
    assert retry.last_try == retry.retry_tries_max
    dead = ConsumerSettings(on_failure="dead", consume_strategy="shared")
    assert dead.try_backoff == dead.handler_backoff
    assert dead.last_try == dead.tries_max
