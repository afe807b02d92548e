"""Durable changes of consumer groups at a partition: they are registered before they read,
operators set their progress, old tokens are fenced, and deleted groups and partitions are
forgotten.

    POST /v1/partitions             groups
        ─▶ PARTITION, then as below
    POST /v1/partitions/{id}/groups groups, complete
        ─▶ CURSOR [group, 0, first offset, []]    for each group that is not known
        ─▶ TOLD                                   if these are all groups

A group acquires a partition only when a consumer is granted it, and a child partition only after
its parents are drained. Until then the broker would not know the group, and retention could remove
messages that the group has not read.

Invariants
    If a broker has been sent all groups of a partition, acquiring the partition adds no other
    group: a client cannot create groups. The groups of a partition count as complete only when TOLD
    and every group before it are durable. When the metaserver says that the broker may lack a
    group, no partition's groups count as complete until they are sent again.

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

    POST /v1/partitions/{id}/forget ─▶ FORGET [group, token]
    POST /v1/partitions/{id}/drop   ─▶ DROPPED [[[id, id + 1]], {subject: highest partition id}]

Calls for the group or the partition are refused from the decision on. A failed write undoes the
decision.

Invariants
    No record of the group or the partition that was decided earlier comes after this record in the
    log. A token up to that of the deletion never belongs to a later group of the same name. The id
    of a dropped partition is never hosted again.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

For a group without a token the fence is kept in memory only (`Store.fence_floor`). A lower token
can only come from a consumer whose group is missing in the accepted copy.

An accepted copy assigns offsets to messages although the original has assigned them to others. A
consumer that has read the original may still ack such offsets, and would thereby ack messages that
it never handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.control import DropPartition, Retention
from ...protocol.errors import (
    GroupDeletedError,
    GroupUnknownError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    OverloadedError,
)
from ...protocol.ids import check_name
from ...protocol.offsets import AckedOffsets
from ...protocol.parked import Adopt, AskedChange, Clear
from ...protocol.progress import ForgetGroup, SetCursor
from ..partition.park_views import passed_on
from ..partition.partition import Group, HostedPartition
from ..partition.pull_lock import decide_acquire, operator_session
from ..partition.records import DroppedBody, ForgetBody, encode_body, encode_told
from ..partition.suspects import Suspects
from .group_commit import Entry
from .parking import change_parked
from .store import OWN_RECORD_BYTES, Store


def know_groups(
    store: Store,
    partition: HostedPartition,
    names: Sequence[str],
    *,
    complete: bool = False,
    tokens_above: int = 0,
) -> asyncio.Future[None]:
    """
    Register these groups at the partition. Groups that are already registered are not changed.

    Args:
        complete: these are all groups of the subject.
        tokens_above: the upper bound of all tokens of the subject's deleted groups.

    Returns:
        A future that is resolved when the groups are durable.

    Raises:
        GroupDeletedError: a group was deleted after the call was made; none of the groups is
            registered.
        InvalidRequestError, OverloadedError, BrokerReadOnlyError: none or some of the groups are
            registered.
    """
    for name in names:
        if partition.forgotten.get(name, 0) > tokens_above:
            raise GroupDeletedError(
                f"consumer group {name!r} was deleted", subject=partition.facts.subject, group=name
            )
    store.firsts.rise(partition.partition_id)
    durable = store.commit.flushed()
    for name in dict.fromkeys(names):
        if name in partition.groups:
            continue
        group = partition.group_for_acquire(name)
        store.commit.check_room(OWN_RECORD_BYTES, own=True)
        durable = _keep(store, partition, group)
    if complete and not partition.groups_told:
        store.commit.check_room(OWN_RECORD_BYTES, own=True)
        durable = _mark(store, partition)
    return durable


def check_told(partition: HostedPartition, name: str) -> None:
    """
    Check that an owner of this group may acquire the partition, which has no progress of the group.

    A metaserver grants a partition only once its broker has stored the group durably, so an owner
    whose group is not among all groups has no grant. If retention is by time alone, a grant does
    not wait for that.

    Raises:
        GroupUnknownError: the metaserver has sent all groups of the subject, and this is none of
            them.
    """
    if partition.groups_told and partition.facts.retention is Retention.ACKED:
        raise GroupUnknownError(
            f"no metaserver has told this broker of consumer group {name!r}",
            subject=partition.facts.subject,
            group=name,
        )


def forget_told(store: Store) -> None:
    """Let the groups of no partition count as complete, because the metaserver may know groups that
    this broker was never sent.
    """
    for partition in store.state.partitions.values():
        if partition.groups_told:
            store.state.touch(partition)
            partition.groups_told = False


def _keep(store: Store, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
    # Retention may be about to decide without this group.
    store.firsts.grouped.add(partition.partition_id)
    group.acked = AckedOffsets(partition.first_offset)
    group.changed()
    partition.groups[group.name] = group
    return store.save_now(partition, group, undo=lambda: partition.groups.pop(group.name, None))


def _mark(store: Store, partition: HostedPartition) -> asyncio.Future[None]:
    """Mark the registered groups as all groups of the subject. Retention relies on the mark once it
    is durable.
    """
    store.state.touch(partition)

    def on_durable(_entry: Entry) -> None:
        store.state.touch(partition)
        partition.groups_told = True

    entry = Entry(
        encode_told(partition.partition_id),
        partition_id=partition.partition_id,
        base_offset=partition.next_offset,
        on_durable=on_durable,
    )
    return store.commit.submit(entry)


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


def forget_group(
    store: Store, partition: HostedPartition, ask: ForgetGroup
) -> tuple[int, asyncio.Future[None]]:
    """
    Forget a deleted group. A repeated call changes nothing.

    Returns:
        The highest token of the group that is refused, and a future that is resolved when that is
        durable.

    Raises:
        InvalidRequestError, OverloadedError, BrokerReadOnlyError
    """
    check_name("consumer group", ask.group)
    group = partition.groups.get(ask.group)
    known = partition.forgotten.get(ask.group, 0)
    if known >= ask.token:
        return known, store.commit.flushed()
    store.commit.check_room(OWN_RECORD_BYTES, own=True)
    store.state.touch(partition)
    body = ForgetBody(ask.group, max(ask.token, 0 if group is None else group.lock.fence))
    undo = partition.apply_forget(body)
    store.wake(partition.partition_id)
    entry = Entry(
        encode_body(partition.partition_id, body), partition_id=partition.partition_id, undo=undo
    )
    return body.token, store.commit.submit(entry)


def drop_partition(
    store: Store, partition_id: int, ask: DropPartition, *, now_ms: int
) -> asyncio.Future[None]:
    """
    Drop a partition, whether it is hosted or not. A repeated call changes nothing.

    Args:
        now_ms: the time of the boot clock.

    Raises:
        InvalidRequestError: the partition belongs to another subject.
        OverloadedError, BrokerReadOnlyError
    """
    state = store.state
    partition = state.partitions.get(partition_id)
    if partition is None and partition_id in state.dropped:
        return store.commit.flushed()
    # A partition of a hidden subject has the name of the subject in which it is to be published.
    if partition is not None and ask.subject not in {
        partition.facts.subject,
        partition.facts.hidden or partition.facts.subject,
    }:
        raise InvalidRequestError(
            f"partition {partition_id} is of {partition.facts.subject!r}, not of {ask.subject!r}",
            partition_id=partition_id,
        )
    store.commit.check_room(OWN_RECORD_BYTES, own=True)
    body = DroppedBody([(partition_id, partition_id + 1)], {ask.subject: ask.last_id})
    orphan, damaged = state.orphans.get(partition_id), partition_id in state.damaged
    state.dropped.begin(partition_id, body)
    state.forget_partition(partition_id)
    store.wake(partition_id)
    if partition is not None:
        store.traffic.note_left(partition.facts.subject, now_ms)

    def on_durable(_entry: Entry) -> None:
        state.dropped.add(body)
        store.holds.forget(partition_id)

    def undo() -> None:
        state.dropped.undo(partition_id)
        if partition is not None:
            state.partitions.add(partition)
        if orphan is not None:
            state.orphans[partition_id] = orphan
        if damaged:
            state.damaged.add(partition_id)

    entry = Entry(
        encode_body(partition_id, body),
        partition_id=partition_id,
        on_durable=on_durable,
        undo=undo,
    )
    return store.commit.submit(entry)


async def refuse_old_tokens(store: Store, token: int) -> None:
    """
    Refuse every token up to `token`, in all groups. A repeated call changes nothing.

    Raises:
        StorageError, BrokerReadOnlyError: some fences are not durable.
    """
    store.fence_floor = max(store.fence_floor, token)
    for partition in list(store.state.partitions.values()):
        for group in list(partition.groups.values()):
            while 0 < group.lock.fence < token:
                session = operator_session(group.lock.strategy)
                try:
                    store.raise_fence(partition, group, token=token, session=session)
                except OverloadedError:
                    await store.commit.flushed()
    await store.commit.flushed()
