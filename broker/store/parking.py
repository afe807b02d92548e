"""Makes changes to parked messages durable, as a PARKED record followed by a cursor that counts the
messages as acked.

Invariants
    PARKED precedes the first CURSOR that counts its messages as acked, so a log that ends between
    them loses no message. A failed write undoes both: the messages are neither parked nor acked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.offsets import AckedOffsets
from ...protocol.parked import DeadLetterKey, Park, RequestedChange
from ..partition.offset_ranges import OffsetRanges
from ..partition.park_checks import decide_park_changes
from ..partition.parked import NextTry
from ..partition.partition import Group, HostedPartition
from ..partition.records import ParkedBody, encode_body
from .group_commit import Entry
from .store import CONTROL_RECORD_BYTES, Store


def change_parked(
    store: Store,
    partition: HostedPartition,
    group: Group,
    changes: Sequence[RequestedChange],
    *,
    at_ms: int,
    next_tries: Sequence[NextTry] = (),
) -> asyncio.Future[None]:
    """
    Make all of these changes, or none, and return a future that is resolved when they are durable.
    Changes that were already made have no effect.

    Args:
        next_tries: the retry times of the messages that wait for a retry after the changes.

    Raises:
        OverloadedError, StaleRouteError, InvalidRequestError, BrokerReadOnlyError,
        MessageTooLargeError: nothing was changed.
    """
    parked = group.get_or_create_parked(partition.facts.partition)
    fence = group.lock.fence
    changes_to_write = decide_park_changes(
        parked, changes, group.acked, next_offset=partition.readable_offset, token=fence
    )
    if not changes_to_write:
        return store.commit.wait_flushed()
    body = ParkedBody(group.name, fence, at_ms, tuple(changes_to_write), tuple(next_tries))
    record = encode_body(partition.partition_id, body)
    store.commit.check_room(CONTROL_RECORD_BYTES + len(record), is_control=True)
    store.state.mark_dirty(partition)
    undos = [
        parked.apply(change, at_ms=at_ms, acked=group.acked, token=fence)
        for change in changes_to_write
    ]
    undos.append(parked.set_retry_times(next_tries))
    group.pending_park_changes += 1
    newly_acked = [
        range_
        for change in changes_to_write
        if isinstance(change, Park | DeadLetterKey)
        for range_ in change.ranges
    ]
    if newly_acked:
        group.mark_changed()

    def undo() -> None:
        group.pending_park_changes -= 1
        for undo_change in reversed(undos):
            undo_change()
        if newly_acked:
            group.acked = _remove_acked(group.acked, newly_acked)
            group.mark_changed()  # a durable CURSOR may count these messages as acked
        # The group may need older messages than before.
        store.first_offsets.changed_ids.add(partition.partition_id)

    def on_durable(_entry: Entry) -> None:
        group.pending_park_changes -= 1
        group.is_durable = True
        store.traffic.group(partition.facts.subject, group.name).count_park_changes(body.changes)

    entry = Entry(
        record,
        partition_id=partition.partition_id,
        base_offset=partition.next_offset,
        on_durable=on_durable,
        undo=undo,
    )
    durable = store.commit.submit(entry)
    if newly_acked:
        store.save_progress(partition, group)
    return durable


def _remove_acked(acked: AckedOffsets, ranges: Sequence[tuple[int, int]]) -> AckedOffsets:
    """Return the progress as it would be if these messages were not acked."""
    offsets = OffsetRanges([(0, acked.cursor)] if acked.cursor else [])
    for start, end in acked.ranges:
        offsets.add(start, end)
    for start, end in ranges:
        offsets.remove(start, end)
    remaining_ranges = list(offsets)
    cursor = remaining_ranges.pop(0)[1] if remaining_ranges and remaining_ranges[0][0] == 0 else 0
    return AckedOffsets(cursor, remaining_ranges)
