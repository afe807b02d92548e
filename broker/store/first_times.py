"""Has the times of a partition begin where those end that it continues on other brokers, durably.

    POST /v1/partitions   times_from_ms ─▶ PARTITION once more, with it    if no message has a time yet

The metaserver tells it between the seal of the parents and the route that leads to their children.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from msgspec.structs import replace

from ..partition.first_times import counts
from ..partition.partition import HostedPartition
from ..partition.records import encode_body
from .group_commit import Entry
from .store import OWN_RECORD_BYTES, Store

log = logging.getLogger("keylane.broker")

HELD_MS_MIN = 60_000
"""A partition whose times are held for longer is told of in the log."""


def begin_times(
    store: Store, partition: HostedPartition, from_ms: int, *, now_ms: int
) -> asyncio.Future[None]:
    """
    Let no message of the partition have a time before `from_ms`, unless that is too far ahead; a repeat changes nothing.

    Args:
        from_ms: milliseconds since 1970 by the calendars of other brokers.
        now_ms: the calendar of this one.

    Returns:
        A future that is resolved when it is durable.

    Raises:
        OverloadedError, BrokerReadOnlyError
    """
    before = partition.appended_at_ms
    if from_ms <= before:
        return store.commit.flushed()
    number, subject = partition.partition_id, partition.facts.subject
    if not counts(from_ms, now_ms):
        log.warning(
            "partition %d of %s begins with this broker's calendar: the one of what it continues was %d s ahead of it, "
            "so reads of a range of times may pass over messages between the two",
            number, subject, (from_ms - now_ms) // 1_000,
        )  # fmt: skip
        return store.commit.flushed()
    store.commit.check_room(OWN_RECORD_BYTES, own=True)
    if from_ms > now_ms + HELD_MS_MIN:
        log.warning(
            "messages of partition %d of %s have one time for %d s, that of what it continues: "
            "this broker's calendar is behind; `keylane cluster check` compares the calendars",
            number, subject, (from_ms - now_ms) // 1_000,
        )  # fmt: skip
    store.state.touch(partition)
    partition.appended_at_ms = from_ms
    entry = Entry(
        encode_body(number, replace(partition.facts, times_from_ms=from_ms)),
        partition_id=number,
        undo=partial(setattr, partition, "appended_at_ms", before),
    )
    return store.commit.submit(entry)
