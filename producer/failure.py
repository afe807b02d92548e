"""What an executor does after a batch failed: the whole difference between STRICT and BEST_TRIED.  Pure.

Times are passed in: how long a partition has been failing decides whether its messages leave it, not how many tries
that was.  All messages of a partition leave together, in their order, when the oldest of them is due; so the newer
messages of a logical partition wait for the decision about the older ones.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..protocol.errors import (
    BrokerReadOnlyError,
    CorruptBatchError,
    InternalError,
    KeylaneError,
    OverloadedError,
    PartitionUnknownError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    StorageError,
    UnreachableError,
    WrongBrokerError,
)
from .settings import ProducerSettings


class Step(enum.Enum):
    """The next step for a batch that was not acked."""

    AGAIN = "same partition, same sequence, after a pause"
    NEW_ROUTE = "ask for a newer route, then older messages first"
    ELSEWHERE = "another available partition, declared as reordered"
    GIVE_UP = "out of the queue with its error"


_TRY_AGAIN = (
    UnreachableError,
    BrokerReadOnlyError,
    OverloadedError,
    SequenceGapError,
    SequenceReusedError,
    ProducerFencedError,
    CorruptBatchError,
    InternalError,
    StorageError,
)
NOT_HERE = (PartitionUnknownError, WrongBrokerError)
"""Refusals of a broker that need not be the one that was sent earlier tries: another may have its address now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where the oldest batch of a partition is, after a try that failed.  Times in milliseconds."""

    tries: int
    """Failed tries, there and elsewhere."""
    failing_ms: int
    """Since the first failure that the oldest message of this partition met here."""
    waited_ms: int
    """Since the first failure of the batch, there or elsewhere."""
    doubtful: bool
    """It may be stored there: a try ended without an answer."""
    leaving: bool
    """The route has no such open partition any more."""
    gone: bool
    """The route has no such partition at all, and since the refusal the metaserver said that its loss is not accepted."""


def decide_after_failure(
    error: KeylaneError, situation: Situation, *, may_leave: bool, settings: ProducerSettings
) -> Step:
    """
    The next step for the oldest batch of a partition, and with it for all that is behind it, after a try failed.

    Unless it `may_leave`, as under BEST_TRIED, it never leaves its partition but through a route change, and what may
    pass later is never given up.  What may leave stays until it has failed for `leave_after_ms`, so that a broker's
    restart reorders nothing, and is given up after `give_up_after_ms` and `tries_min` tries.
    A doubtful batch keeps its sequence until the right broker has answered, because only that broker knows it again.
    What is not doubtful need not wait for the broker of a partition that the route has left.
    """
    if isinstance(error, ProducerFencedError) and situation.doubtful:
        return Step.GIVE_UP  # only under the old epoch, which is fenced, would it be known again
    may_be_stored = situation.doubtful and isinstance(error, NOT_HERE)
    if may_be_stored and situation.gone and not may_leave:
        return Step.GIVE_UP
    exhausted = (
        may_leave
        and situation.tries >= settings.tries_min
        and situation.waited_ms >= settings.give_up_after_ms
    )
    left = situation.leaving and not situation.doubtful and isinstance(error, _TRY_AGAIN)
    if left or (isinstance(error, (StaleRouteError, *NOT_HERE)) and not may_be_stored):
        return Step.GIVE_UP if exhausted else Step.NEW_ROUTE
    if not isinstance(error, (*_TRY_AGAIN, *NOT_HERE)) or exhausted:
        return Step.GIVE_UP
    if not may_leave or situation.failing_ms < settings.leave_after_ms:
        return Step.AGAIN
    return Step.NEW_ROUTE if situation.leaving else Step.ELSEWHERE
