"""Forgets deleted consumer groups, and drops partitions of deleted subjects, durably.

    POST /v1/partitions/{id}/forget ─▶ FORGET [group, token]
    POST /v1/partitions/{id}/drop   ─▶ DROPPED [[[id, id + 1]], {subject: highest partition id}]

Calls for the group or the partition are refused from the decision on. A failed write undoes the
decision.

Invariants
    No record of the group or the partition that was decided earlier comes after this record in the
    log. A token up to that of the deletion never belongs to a later group of the same name. The id
    of a dropped partition is never hosted again.
"""

from __future__ import annotations

import asyncio

from ...protocol.control import DropPartition
from ...protocol.errors import InvalidRequestError
from ...protocol.ids import check_name
from ...protocol.progress import ForgetGroup
from ..partition.partition import HostedPartition
from ..partition.records import DroppedBody, ForgetBody, encode_body
from .group_commit import Entry
from .store import OWN_RECORD_BYTES, Store


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
