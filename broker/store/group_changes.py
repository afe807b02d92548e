"""Makes durable changes to a partition's consumer groups: registers groups, sets cursors, fences
old tokens, and forgets deleted groups and partitions.

    POST /v1/partitions             groups
        ─▶ PARTITION, then as below
    POST /v1/partitions/{id}/groups groups, complete
        ─▶ CURSOR [group, 0, first offset, []]    for each unknown group
        ─▶ TOLD                                   if these are all groups

A group acquires a partition only when it is granted to a consumer, and a child partition only after
its parents are drained. Without registration the broker would not know the group until then, and
retention could remove messages that the group has not read.

Invariants
    Once a broker has received all groups of a partition, acquiring the partition does not add a
    group, so clients cannot create groups. A partition's groups count as complete only when TOLD
    and all groups before it are durable. When the metaserver reports that the broker may lack a
    group, no partition's groups count as complete until they are sent again.

    POST /v1/partitions/{id}/cursor
        ─▶ FENCE [group, token, session] ─▶ CURSOR [group, token, cursor, []]
        ─▶ PARKED [Clear, Adopt]                                            one commit

Invariants
    The previous owner is refused as soon as the call is decided, so its acks cannot change the new
    cursor. A repeated call with the same token sets the same cursor, because no other call has that
    token. Parked messages are forgotten after the new cursor is written: a log that ends between
    the two has lost no message, and a repeated call clears the messages that are still parked.

    If the partition is reset without its children, those of its messages that are still parked at
    the children are kept for them (`passed`). Messages that it adopted from an ancestor which is
    not reset with it remain parked, and are not adopted again, because no cursor is set from which
    they would be delivered again. Children may have some or all of them, so they may be handled
    twice. The partition's owner notifies an ancestor. If children keep messages that they have
    adopted from the partition or the ancestor, the children's owners do so instead; they learn of
    this when they adopt from the partition again.

    POST /v1/partitions/{id}/forget ─▶ FORGET [group, token]
    POST /v1/partitions/{id}/drop   ─▶ DROPPED [[[id, id + 1]], {subject: highest partition id}]

Calls for the group or the partition are refused as soon as this is decided. A failed write undoes
the decision.

Invariants
    No record of the group or the partition that was decided earlier follows this record in the log.
    Tokens up to that of the deletion never belong to a later group with the same name. A dropped
    partition's id is never hosted again.

    BrokerWelcome.fence ─▶ FENCE [group, token, "=reset"] of every group that had a token ─▶ served

For a group without a token the fence is only in memory (`Store.fence_floor`): a lower token can
only come from a consumer whose group is missing in the accepted copy of a data folder.

An accepted copy assigns offsets to new messages that the original has assigned to others. A
consumer that has read from the original may still ack such offsets, and would ack messages that it
never handled.
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
from ...protocol.parked import Adopt, Clear, RequestedChange
from ...protocol.progress import ForgetGroup, SetCursor
from ..partition.park_views import offsets_needed_by_children
from ..partition.partition import Group, HostedPartition
from ..partition.pull_lock import decide_acquire, operator_session
from ..partition.records import DroppedBody, ForgetBody, encode_body, encode_told
from ..partition.suspects import Suspects
from .group_commit import Entry
from .parking import change_parked
from .store import CONTROL_RECORD_BYTES, Store


def register_groups_at(
    store: Store,
    partition: HostedPartition,
    names: Sequence[str],
    *,
    complete: bool = False,
    tokens_above: int = 0,
) -> asyncio.Future[None]:
    """
    Register consumer groups at a partition, so that retention waits for them. Registered groups are
    not changed.

    Args:
        complete: True if these are all groups of the subject.
        tokens_above: an upper bound of the tokens of the subject's deleted groups.

    Returns:
        A future that is resolved when the groups are durable.

    Raises:
        GroupDeletedError: a group was deleted after the call was sent; no group was registered.
        InvalidRequestError, OverloadedError, BrokerReadOnlyError: only some groups, or none, were
            registered.
    """
    for name in names:
        if partition.forgotten.get(name, 0) > tokens_above:
            raise GroupDeletedError(
                f"consumer group {name!r} was deleted", subject=partition.facts.subject, group=name
            )
    store.first_offsets.raise_pending(partition.partition_id)
    durable = store.commit.wait_flushed()
    for name in dict.fromkeys(names):
        if name in partition.groups:
            continue
        group = partition.group_for_acquire(name)
        store.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
        durable = _register_group(store, partition, group)
    if complete and not partition.groups_told:
        store.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
        durable = _mark_complete(store, partition)
    return durable


def check_registered(partition: HostedPartition, name: str) -> None:
    """
    Check that a group without progress at the partition may acquire it.

    A metaserver grants a partition only after its broker has stored the group durably, so if the
    groups are complete, an unknown group has no grant. With retention by time alone, grants do not
    wait for this.

    Raises:
        GroupUnknownError: the metaserver has sent all groups of the subject, and this is not one of
            them.
    """
    if partition.groups_told and partition.facts.retention is Retention.ACKED:
        raise GroupUnknownError(
            f"consumer group {name!r} is not among the groups that the metaserver sent",
            subject=partition.facts.subject,
            group=name,
        )


def mark_groups_incomplete(store: Store) -> None:
    """Stop treating any partition's groups as complete, because the metaserver may know groups that
    it has never sent to this broker.
    """
    for partition in store.state.partitions.values():
        if partition.groups_told:
            store.state.mark_dirty(partition)
            partition.groups_told = False


def _register_group(store: Store, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
    """Add a group, with its progress at the first offset, to the partition, and make it durable."""
    # Retention may be about to decide without taking this group into account.
    store.first_offsets.changed_ids.add(partition.partition_id)
    group.acked = AckedOffsets(partition.first_offset)
    group.mark_changed()
    partition.groups[group.name] = group
    return store.save_now(partition, group, undo=lambda: partition.groups.pop(group.name, None))


def _mark_complete(store: Store, partition: HostedPartition) -> asyncio.Future[None]:
    """Record that the registered groups are all groups of the subject. Retention relies on this
    once it is durable.
    """
    store.state.mark_dirty(partition)

    def on_durable(_entry: Entry) -> None:
        store.state.mark_dirty(partition)
        partition.groups_told = True

    entry = Entry(
        encode_told(partition.partition_id),
        partition_id=partition.partition_id,
        base_offset=partition.next_offset,
        on_durable=on_durable,
    )
    return store.commit.submit(entry)


def set_cursor(
    store: Store, partition: HostedPartition, request: SetCursor
) -> asyncio.Future[None]:
    """
    Set a group's cursor, raising it to the first offset if necessary. The group's parked messages
    in the partition are forgotten.

    Returns:
        A future that is resolved when the fence and the cursor are durable.

    Raises:
        FencedError: the fence is higher than the token, or a consumer has this token.
        BusyError: the group's owner was promised that no higher token is let in.
        OffsetOutOfRangeError: the cursor is beyond the durable messages.
        InvalidRequestError, OverloadedError, BrokerReadOnlyError, CorruptLogError: nothing was
            changed.
    """
    partition.check_fences_known()
    store.first_offsets.raise_pending(partition.partition_id)
    group = partition.group_for_acquire(request.group)
    partition.check_not_forgotten(request.group, request.token)
    session = operator_session(request.strategy)
    raises_fence = decide_acquire(group.lock, token=request.token, session=session, ttl_ms=1)
    if raises_fence:
        store.check_not_promised(partition.partition_id, group, request.token)
    if request.cursor > partition.readable_offset:
        raise OffsetOutOfRangeError(
            offset=request.cursor,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
        )
    cursor = max(request.cursor, partition.first_offset)
    if (
        not raises_fence
        and group.acked.cursor == cursor
        and not (group.acked.ranges or group.parked)
    ):
        return store.commit.wait_flushed()
    # Check that there is room for all records before deciding on the first one.
    store.commit.check_room(4 * CONTROL_RECORD_BYTES, is_control=True)
    if raises_fence:
        store.raise_fence(partition, group, token=request.token, session=session)
    durable = _submit_cursor(store, partition, group, cursor)
    if not group.parked:
        return durable
    parked = group.parked
    # Children that have adopted messages still need the ancestors, which would forget the messages
    # if the owner of this partition notified them.
    is_partial = bool(request.kept_children or request.kept_parents)
    children_notify_ancestors = is_partial and (parked.frozen or parked.children_notify_ancestors)
    offsets_for_children = offsets_needed_by_children(parked, request.kept_children)
    changes: list[RequestedChange] = [Clear(request.kept_parents)]
    if offsets_for_children or children_notify_ancestors:
        changes.append(
            Adopt(
                0,
                (),
                last=False,
                passed=offsets_for_children,
                children_notify_ancestors=children_notify_ancestors,
            )
        )
    return change_parked(store, partition, group, changes, at_ms=0)


def _submit_cursor(
    store: Store, partition: HostedPartition, group: Group, cursor: int
) -> asyncio.Future[None]:
    """Set the cursor, and forget failed attempts and suspects, both in memory and durably."""
    # The group may need older messages than before.
    store.first_offsets.changed_ids.add(partition.partition_id)
    previous = group.acked, group.attempts, group.suspects
    group.acked = AckedOffsets(cursor)
    group.attempts = {}
    group.suspects = Suspects()
    group.timed = None
    group.set_failing(None)
    group.mark_changed()

    def undo() -> None:
        group.acked, group.attempts, group.suspects = previous
        # A record with the new cursor may be durable, so the old cursor must be written again.
        group.mark_changed()

    return store.save_now(partition, group, undo=undo)


def forget_group(
    store: Store, partition: HostedPartition, request: ForgetGroup
) -> tuple[int, asyncio.Future[None]]:
    """
    Forget a deleted group. Repeating the call has no effect.

    Returns:
        The group's highest refused token, and a future that is resolved when this is durable.

    Raises:
        BusyError: the group's owner was promised that it stays.
        InvalidRequestError, OverloadedError, BrokerReadOnlyError: nothing was changed.
    """
    check_name("consumer group", request.group)
    group = partition.groups.get(request.group)
    forgotten_token = partition.forgotten.get(request.group, 0)
    if forgotten_token >= request.token:
        return forgotten_token, store.commit.wait_flushed()
    if group is not None:
        store.check_not_promised(partition.partition_id, group, group.lock.fence + 1)
    store.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
    store.state.mark_dirty(partition)
    body = ForgetBody(request.group, max(request.token, 0 if group is None else group.lock.fence))
    undo = partition.apply_forget(body)
    store.wake(partition.partition_id)
    entry = Entry(
        encode_body(partition.partition_id, body), partition_id=partition.partition_id, undo=undo
    )
    return body.token, store.commit.submit(entry)


def drop_partition(
    store: Store, partition_id: int, request: DropPartition, *, now_ms: int
) -> asyncio.Future[None]:
    """
    Drop a partition, whether or not it is hosted. Repeating the call has no effect.

    Args:
        now_ms: the current time, in milliseconds since boot.

    Raises:
        InvalidRequestError: the partition belongs to another subject.
        OverloadedError, BrokerReadOnlyError: nothing was changed.
    """
    state = store.state
    partition = state.partitions.get(partition_id)
    if partition is None and partition_id in state.dropped:
        return store.commit.wait_flushed()
    # A partition of a hidden subject has the name of the subject as which it will be published.
    if partition is not None and request.subject not in {
        partition.facts.subject,
        partition.facts.hidden or partition.facts.subject,
    }:
        raise InvalidRequestError(
            f"partition {partition_id} belongs to subject {partition.facts.subject!r}, not to "
            f"{request.subject!r}",
            partition_id=partition_id,
        )
    store.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
    body = DroppedBody([(partition_id, partition_id + 1)], {request.subject: request.last_id})
    orphan, was_damaged = state.orphans.get(partition_id), partition_id in state.damaged
    state.dropped.add_pending(partition_id, body)
    state.forget_partition(partition_id)
    store.wake(partition_id)
    if partition is not None:
        store.traffic.record_drop(partition.facts.subject, now_ms)

    def on_durable(_entry: Entry) -> None:
        state.dropped.add(body)
        store.holds.forget(partition_id)

    def undo() -> None:
        state.dropped.remove_pending(partition_id)
        if partition is not None:
            state.partitions.add(partition)
        if orphan is not None:
            state.orphans[partition_id] = orphan
        if was_damaged:
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
    Refuse all tokens up to `token`, in all groups. Repeating the call has no effect.

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
                    await store.commit.wait_flushed()
    await store.commit.wait_flushed()
