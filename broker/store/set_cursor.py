"""Sets a group's progress for an operator: the fence rises to a new token, then the cursor is set.

    POST /v1/partitions/{id}/cursor
        ─▶ FENCE [group, token, session] ─▶ CURSOR [group, token, cursor, []]
        ─▶ PARKED [Clear, Adopt]                                            one commit

Invariants
    The earlier owner is refused from the decision on, so none of its acks changes the new cursor. A
    repeated call with the same token sets the same cursor, because no other call has that token.
    Parked messages are forgotten after the new cursor is written: a log that ends between the two
    has lost no message, and a repeated call clears what is still parked. If the partition is set
    without its children, those of its own messages that the children keep parked are kept for them
    (`passed`). What was taken over from an ancestor that is not set with the partition stays
    parked, and is not taken over again: the reset sets no cursor from which it would be delivered
    again. Children may have some or all of it; it may then be handled twice. An ancestor is
    notified by the owner of the partition. If children have taken over messages that they keep, of
    the partition or of the ancestor, their owners notify the ancestor instead: they learn of it
    when they take the partition over again.
"""

from __future__ import annotations

import asyncio

from ...protocol.errors import OffsetOutOfRangeError
from ...protocol.offsets import AckedOffsets
from ...protocol.parked import Adopt, AskedChange, Clear
from ...protocol.progress import SetCursor
from ..partition.park_views import passed_on
from ..partition.partition import Group, HostedPartition
from ..partition.pull_lock import decide_acquire, operator_session
from ..partition.suspects import Suspects
from .parking import change_parked
from .store import OWN_RECORD_BYTES, Store


def set_cursor(store: Store, partition: HostedPartition, ask: SetCursor) -> asyncio.Future[None]:
    """
    Set a group's cursor. A cursor below the first offset is raised to it. The messages that the
    group has parked on the partition are forgotten.

    Returns:
        A future that is resolved when fence and cursor are durable.

    Raises:
        FencedError: the fence is higher, or a consumer has this token.
        OffsetOutOfRangeError: the cursor is above the end of the durable messages.
        InvalidRequestError, OverloadedError, BrokerReadOnlyError, CorruptLogError: nothing was
            changed.
    """
    partition.check_owners()
    store.firsts.rise(partition.partition_id)
    group = partition.group_for_acquire(ask.group)
    partition.check_not_forgotten(ask.group, ask.token)
    session = operator_session(ask.strategy)
    rises = decide_acquire(group.lock, token=ask.token, session=session, ttl_ms=1)
    if ask.cursor > partition.readable_offset:
        raise OffsetOutOfRangeError(
            offset=ask.cursor,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
        )
    cursor = max(ask.cursor, partition.first_offset)
    if not rises and group.acked.cursor == cursor and not (group.acked.ranges or group.parked):
        return store.commit.flushed()
    # Check room for all records before the first is decided.
    store.commit.check_room(4 * OWN_RECORD_BYTES, own=True)
    if rises:
        store.raise_fence(partition, group, token=ask.token, session=session)
    durable = _submit(store, partition, group, cursor)
    if not group.parked:
        return durable
    parked = group.parked
    # Children that have taken something over need the ancestors to be kept: the ancestors would
    # otherwise forget what the owner of this partition says.
    keeps = bool(ask.kept_children or ask.kept_parents)
    tell = keeps and (parked.frozen or parked.children_tell)
    passed = passed_on(parked, ask.kept_children, partition.facts.partition.range_start)
    changes: list[AskedChange] = [Clear(ask.kept_parents)]
    if passed or tell:
        changes.append(Adopt(0, (), last=False, passed=passed, children_tell=tell))
    return change_parked(store, partition, group, changes, at_ms=0)


def _submit(
    store: Store, partition: HostedPartition, group: Group, cursor: int
) -> asyncio.Future[None]:
    # The group may need older messages than before.
    store.firsts.grouped.add(partition.partition_id)
    before = group.acked, group.attempts, group.suspects
    group.acked = AckedOffsets(cursor)
    group.attempts = {}
    group.suspects = Suspects()
    group.note_failing(None)
    group.changed()

    def undo() -> None:
        group.acked, group.attempts, group.suspects = before
        # a record with the new cursor may be durable, so the old cursor must be written again
        group.changed()

    return store.save_now(partition, group, undo=undo)
