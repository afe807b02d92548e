"""Decides what an executor does after a batch has failed. This is the only place where STRICT and
BEST_TRIED differ. Pure.

How long a partition has been failing, not the number of attempts, determines when messages leave
it. All messages of a partition leave together, in order, when the oldest is due, so newer messages
of a logical partition never overtake older ones.
"""

from __future__ import annotations

import enum

from ..protocol.errors import (
    BrokerReadOnlyError,
    CapabilityEndedError,
    CorruptBatchError,
    InternalError,
    KeylaneError,
    OverloadedError,
    PartitionUnknownError,
    ProducerFencedError,
    RetryRule,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    StorageError,
    UnpackError,
    UnreachableError,
    WrongBrokerError,
)
from .settings import ProducerSettings


class Step(enum.Enum):
    """What an executor does next with a batch that was not acked."""

    RETRY = "same partition, same sequence, after a pause"
    NEW_ROUTE = "wait for a newer route, and send older messages first"
    REROUTE = "another available partition, declared as reordered"
    GIVE_UP = "give up the batch with its error"


class WaitStage(enum.Enum):
    """How long the messages of a failing partition have waited, compared with the settings."""

    ENDLESS = "they never leave their partition, as under STRICT"
    EARLY = "they stay, for less than `leave_after_ms` so far"
    DUE = "they go to another partition"
    EXHAUSTED = (
        "the oldest batch has failed for `give_up_after_ms` and in `tries_min` "
        "tries: it is given up"
    )


_TRANSIENT_ERRORS = (
    UnreachableError,
    CapabilityEndedError,
    BrokerReadOnlyError,
    OverloadedError,
    SequenceGapError,
    SequenceReusedError,
    ProducerFencedError,
    CorruptBatchError,
    InternalError,
    StorageError,
)
WRONG_BROKER_ERRORS = (PartitionUnknownError, WrongBrokerError)
"""Refusals that may come from the wrong broker, which has taken over the right broker's address."""


def decide_wait_stage(
    settings: ProducerSettings,
    *,
    may_reroute_keys: bool,
    tries: int,
    waited_ms: int,
    failing_ms: int,
) -> WaitStage:
    """
    Return the stage that the wait of a failing partition's messages has reached.

    Args:
        may_reroute_keys: whether keyed messages may go to another partition, as with BEST_TRIED.
        tries: failed tries of the oldest batch, in this partition and in others.
        waited_ms: milliseconds since the first of these tries.
        failing_ms: milliseconds since the first failure of the oldest message in this partition.
    """
    if not may_reroute_keys:
        return WaitStage.ENDLESS
    if tries >= settings.tries_min and waited_ms >= settings.give_up_after_ms:
        return WaitStage.EXHAUSTED
    return WaitStage.EARLY if failing_ms < settings.leave_after_ms else WaitStage.DUE


def _is_transient(error: KeylaneError) -> bool:
    """Return True if the broker may accept the same batch later, for example once a quota allows
    it.
    """
    if isinstance(error, UnpackError):  # the same bytes would be sent again
        return False
    return isinstance(error, _TRANSIENT_ERRORS) or error.retry is RetryRule.LATER


def decide_after_failure(
    error: KeylaneError, stage: WaitStage, *, doubtful: bool, closed: bool, unrecoverable: bool
) -> Step:
    """
    Return the next step for the oldest batch of a partition and all batches after it, after an
    attempt has failed.

    Under STRICT, a batch leaves its partition only through a route change, and is not given up
    because of a transient error. A doubtful batch keeps its sequence until the right broker has
    replied, because only that broker recognizes it. A batch that is not doubtful leaves a partition
    that is no longer open without waiting for the partition's broker.

    Args:
        doubtful: True if the batch may be stored in the partition, because an attempt got no reply.
        closed: True if the partition is no longer open in the route.
        unrecoverable: True if the route does not list the partition at all, and the metaserver
            confirmed after the refusal that its loss has not been accepted.
    """
    if isinstance(error, ProducerFencedError) and doubtful:
        # The broker would recognize the batch only under the old epoch, which is fenced.
        return Step.GIVE_UP
    may_be_stored = doubtful and isinstance(error, WRONG_BROKER_ERRORS)
    if may_be_stored and unrecoverable and stage is WaitStage.ENDLESS:
        return Step.GIVE_UP
    is_exhausted = stage is WaitStage.EXHAUSTED
    may_move = closed and not doubtful and _is_transient(error)
    if may_move or (
        isinstance(error, (StaleRouteError, *WRONG_BROKER_ERRORS)) and not may_be_stored
    ):
        return Step.GIVE_UP if is_exhausted else Step.NEW_ROUTE
    if not (_is_transient(error) or isinstance(error, WRONG_BROKER_ERRORS)) or is_exhausted:
        return Step.GIVE_UP
    if stage is not WaitStage.DUE:
        return Step.RETRY
    return Step.NEW_ROUTE if closed else Step.REROUTE
