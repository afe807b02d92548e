"""Registers groups at a partition before they read it, so that retention keeps its messages for
them.

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
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.control import Retention
from ...protocol.errors import GroupDeletedError, GroupUnknownError
from ...protocol.offsets import AckedOffsets
from ..partition.partition import Group, HostedPartition
from ..partition.records import encode_told
from .group_commit import Entry
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
