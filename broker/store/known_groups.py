"""Groups that a partition is told of before they come to it: retention waits for them as for those that have.

    POST /v1/partitions             groups            ─▶ PARTITION, then as below
    POST /v1/partitions/{id}/groups groups, complete  ─▶ CURSOR [group, 0, first offset, []]    of each that is not known
                                                      ─▶ TOLD                                   if these are all there are

A group comes to a child only when it is through with the parents, and to any partition only when a consumer of it is
granted that; until then nobody of it has acquired the partition, and what is in it would be removed unread.

Invariants
    A partition counts as told only when TOLD, and every group before it, is on the disk.
    It does not after the metaserver has said that the broker may lack a group, until it is told all again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.offsets import AckedOffsets
from ..partition.partition import Group, HostedPartition
from ..partition.records import encode_told
from .group_commit import Entry
from .store import OWN_RECORD_BYTES, Store


def know_groups(
    store: Store, partition: HostedPartition, names: Sequence[str], *, complete: bool = False
) -> asyncio.Future[None]:
    """
    Keep these groups from now on; those that are kept already stay as they are.  What to wait for.

    Args:
        complete: no other group of the subject is to read the partition.

    Raises:
        InvalidNameError, OverloadedError, BrokerReadOnlyError: nothing was changed, or some of them are kept.
    """
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


def forget_told(store: Store) -> None:
    """The metaserver may know of groups that this broker was never told: no partition counts as told any more."""
    for partition in store.state.partitions.values():
        if partition.groups_told:
            store.state.touch(partition)
            partition.groups_told = False


def _keep(store: Store, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
    store.firsts.grouped.add(partition.partition_id)  # retention may be deciding without it
    group.acked = AckedOffsets(partition.first_offset)
    group.changed()
    partition.groups[group.name] = group
    return store.save_now(partition, group, undo=lambda: partition.groups.pop(group.name, None))


def _mark(store: Store, partition: HostedPartition) -> asyncio.Future[None]:
    """The groups so far are all; retention believes it only when it is on the disk."""
    store.state.touch(partition)

    def settled(_entry: Entry) -> None:
        store.state.touch(partition)
        partition.groups_told = True

    entry = Entry(
        encode_told(partition.partition_id),
        partition_id=partition.partition_id,
        base_offset=partition.next_offset,
        settled=settled,
    )
    return store.commit.submit(entry)
