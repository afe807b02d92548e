"""Decides what becomes of a message whose try has failed: one table. Pure.

    policy   exclusive                                   shared
    BLOCK    tried again in place, for ever              the same
    PARK     after `tries_max` its key is parked         after `tries_max` a dead letter
    DEAD     after `tries_max` a dead letter             the same
    RETRY    set aside after each try; after             tried again in place; after
             `retry_tries_max` a dead letter             `retry_tries_max` a dead letter

A message without a key, and one that is loose already, becomes a dead letter in place of a parked
key. A handler that asks for another try gets it, except under RETRY.
"""

from __future__ import annotations

import enum
import random
from typing import NamedTuple

from ...protocol.groups import FailurePolicy
from ...protocol.routing import ConsumeStrategy
from ..settings import ConsumerSettings

ASKED_PAUSE_MS_MAX = 1_000
"""The longest pause of a message that asks again and again to be tried at once."""


class Treatment(enum.Enum):
    """What becomes of a message whose try has failed."""

    AGAIN = enum.auto()
    """It is tried again in place, and its key waits."""
    ASIDE = enum.auto()
    """It waits alone, at the broker, for its next try."""
    PARKED = enum.auto()
    DEAD = enum.auto()
    LOST = enum.auto()
    """It was acked before its handler was called."""
    EXPIRED = enum.auto()
    """Its time in flight is over: the broker of a shared group hands it out again."""


class Row(NamedTuple):
    """What a policy does before the last try, and after it."""

    before: Treatment
    after: Treatment


_P, _EXCLUSIVE, _SHARED = FailurePolicy, ConsumeStrategy.EXCLUSIVE, ConsumeStrategy.SHARED
TABLE: dict[tuple[FailurePolicy, ConsumeStrategy], Row] = {
    (_P.BLOCK, _EXCLUSIVE): Row(Treatment.AGAIN, Treatment.AGAIN),
    (_P.BLOCK, _SHARED): Row(Treatment.AGAIN, Treatment.AGAIN),
    (_P.PARK, _EXCLUSIVE): Row(Treatment.AGAIN, Treatment.PARKED),
    (_P.PARK, _SHARED): Row(Treatment.AGAIN, Treatment.DEAD),
    (_P.DEAD, _EXCLUSIVE): Row(Treatment.AGAIN, Treatment.DEAD),
    (_P.DEAD, _SHARED): Row(Treatment.AGAIN, Treatment.DEAD),
    (_P.RETRY, _EXCLUSIVE): Row(Treatment.ASIDE, Treatment.DEAD),
    (_P.RETRY, _SHARED): Row(Treatment.AGAIN, Treatment.DEAD),
}


def decide_treatment(
    settings: ConsumerSettings, *, attempt: int, has_order: bool, is_asked: bool
) -> Treatment:
    """
    Return the treatment of a message whose attempt number `attempt` has failed.

    Args:
        has_order: True if later messages of its key wait for it: it has a key.
        is_asked: its handler has asked for another try, which is no error.
    """
    policy = settings.failure_policy
    row = TABLE[policy, settings.consume_strategy]
    is_last = attempt >= settings.last_try
    if is_last and is_asked and policy is not FailurePolicy.RETRY:
        is_last = False
    treatment = row.after if is_last else row.before
    return Treatment.DEAD if treatment is Treatment.PARKED and not has_order else treatment


def sets_aside(settings: ConsumerSettings) -> bool:
    """Return True if a message is set aside that has ended its process too often."""
    return settings.failure_policy is not FailurePolicy.BLOCK


def pause_ms(
    settings: ConsumerSettings, rng: random.Random, *, attempt: int, asked_ms: int | None
) -> int:
    """Return the milliseconds until the next try in place; `asked_ms` is what its handler asked
    for.
    """
    backoff = settings.try_backoff
    if asked_ms is None:
        return backoff.wait_ms(attempt, rng)
    if attempt > 1:
        asked_ms = max(asked_ms, min(1 << min(attempt - 2, 10), ASKED_PAUSE_MS_MAX))
    if backoff is settings.retry_backoff:
        return max(asked_ms, backoff.wait_ms(attempt, rng))
    return asked_ms


def aside_ms(
    settings: ConsumerSettings, rng: random.Random, *, attempt: int, asked_ms: int | None
) -> int:
    """Return the milliseconds until the next try of a message that waits alone."""
    return max(asked_ms or 0, settings.retry_backoff.wait_ms(attempt, rng))
