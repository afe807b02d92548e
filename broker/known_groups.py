"""Groups that a partition is told of before they come to it: retention waits for them as for those that have.

    POST /v1/partitions/{id}/groups ─▶ CURSOR [group, 0, first offset, []]     for each that is not known yet

A group comes to a child only when it is through with the parents; until then nobody of it has acquired the child, and what
is in it would be removed unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..protocol.offsets import AckedOffsets
from .group_commit import Entry
from .partition import Group, HostedPartition
from .records import encode_body
from .store import OWN_RECORD_BYTES, Store


def know_groups(
    store: Store, partition: HostedPartition, names: Sequence[str]
) -> asyncio.Future[None]:
    """
    Keep these groups from now on; those that are kept already stay as they are.  What to wait for.

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
    return durable


def _keep(store: Store, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
    store.state.touch(partition)
    store.firsts.grouped.add(partition.partition_id)  # retention may be deciding without it
    group.acked = AckedOffsets(partition.first_offset)
    group.version += 1
    version = group.version
    partition.groups[group.name] = group

    def settled(_entry: Entry) -> None:
        group.saved_version = max(group.saved_version, version)

    def undo() -> None:
        partition.groups.pop(group.name, None)

    entry = Entry(
        encode_body(partition.partition_id, group.cursor_body()),
        partition_id=partition.partition_id,
        base_offset=group.acked.cursor,
        settled=settled,
        undo=undo,
        durable=True,
    )
    return store.commit.submit(entry)
