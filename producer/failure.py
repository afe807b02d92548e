"""What an executor does after a batch failed: the whole difference between STRICT and BEST_TRIED.  Pure."""

from __future__ import annotations

import enum

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
from ..protocol.routing import OrderStrategy


class Step(enum.Enum):
    """The next step for a parcel that was not acked."""

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
_NOT_HERE = (PartitionUnknownError, WrongBrokerError)
"""Refusals of a broker that need not be the one that was sent earlier tries: another may have its address now."""


def decide_after_failure(
    error: KeylaneError,
    strategy: OrderStrategy,
    *,
    tries: int,
    tries_max: int,
    home_tries: int,
    doubtful: bool,
    leaving: bool,
    gone: bool,
) -> Step:
    """
    The next step after try number `tries` (from 1) of a parcel ended in `error`.

    STRICT never leaves its partition but through a route change, and never gives up what may pass later.
    BEST_TRIED goes elsewhere after `home_tries` and gives up after `tries_max`.
    A `doubtful` parcel, which may be stored, keeps its sequence until the right broker has answered, because only
    that one knows it again; `gone`: there is none any more, as no route has this partition.  What is not doubtful
    need not wait for the broker of a partition that is `leaving`, sealed as the route says.
    """
    if isinstance(error, ProducerFencedError) and doubtful:
        return Step.GIVE_UP  # only under the old epoch, which is fenced, would it be known again
    may_be_stored = doubtful and isinstance(error, _NOT_HERE)
    if may_be_stored and gone and strategy is OrderStrategy.STRICT:
        return Step.GIVE_UP
    left = leaving and not doubtful and isinstance(error, _TRY_AGAIN)
    if left or (isinstance(error, (StaleRouteError, *_NOT_HERE)) and not may_be_stored):
        if strategy is OrderStrategy.BEST_TRIED and tries >= tries_max:
            return Step.GIVE_UP
        return Step.NEW_ROUTE
    if not isinstance(error, (*_TRY_AGAIN, *_NOT_HERE)):
        return Step.GIVE_UP
    if strategy is OrderStrategy.STRICT:
        return Step.AGAIN
    if tries >= tries_max:
        return Step.GIVE_UP
    return Step.AGAIN if tries < home_tries else Step.ELSEWHERE
