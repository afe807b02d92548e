"""Bugs of the rules that keep messages for consumer groups: which broker has heard of which
group.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from msgspec.structs import replace

from keylane.broker import control
from keylane.broker.partition.partition import HostedPartition
from keylane.broker.retention.loop import RetentionLoop
from keylane.metaserver.cluster.announcements import store_announced
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.groups import leases as leases_module
from keylane.metaserver.groups import service as groups_service
from keylane.metaserver.operations import driver as operations_driver
from keylane.metaserver.operations import journal as operations_journal
from keylane.metaserver.retention.announcer import Announcer
from keylane.metaserver.sql.dialect import insert_new
from keylane.metaserver.sql.schema import groups, heard, leases
from sim.mutants.mutant import Breaks, Patches


def retention_passes_the_slowest_group(patches: Patches) -> None:
    """Retention removes messages that a group has not acked."""

    async def floor(self: Any, wanted: int, numbers: Any) -> None:
        return None

    patches.set(RetentionLoop, "_find_floor", floor)


def granted_counts_as_heard(patches: Patches) -> None:
    """A partition is granted before its broker has heard of the group, and the grant counts as
    hearing.
    """

    def readable(partitions: Any, drained: Any) -> Any:
        return real_readable(
            [_replace(partition, is_announced=True) for partition in partitions], drained
        )

    def settle(connection: Any, group_id: int, **how: Any) -> Any:
        changes = real_settle(connection, group_id, **how)
        granted = sa.select(leases.c.group_id, leases.c.partition_id).where(
            leases.c.group_id == group_id, leases.c.token > 0
        )
        insert_new(connection, heard, [dict(row._mapping) for row in connection.execute(granted)])
        return changes

    async def nothing(self: Any, group_id: int, *_more: Any) -> None:
        return None

    real_readable = patches.set(lease_rows, "readable_partitions", readable)
    _replace = leases_module.replace
    real_settle = patches.set(groups_service, "settle_group", settle)
    patches.set(Announcer, "announce", nothing)


def opens_before_groups_are_told(patches: Patches) -> None:
    """Partitions are opened before their brokers are told of groups; the announcer tells them every
    ten seconds.
    """

    async def run_once(self: Any) -> int:
        now = asyncio.get_running_loop().time()
        if now - _looked.get(self, -10.0) < 10:
            return 0
        _looked[self] = now
        told: int = await real_run(self)
        return told

    _looked: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
    real_run = patches.set(Announcer, "run_once", run_once)

    def told_nothing(**facts: Any) -> Any:
        return replace(real_host(**facts), groups=())

    def note(
        connection: Any, operation_id: int, done: Any, problem: str, *, group_ids: Any, **facts: Any
    ) -> Any:
        state = real_note(connection, operation_id, done, problem, **facts)
        here = sa.select(operations_journal.operations.c.subject_id).where(
            operations_journal.operations.c.operation_id == operation_id
        )
        untold = sa.update(groups).where(groups.c.subject_id == here.scalar_subquery())
        connection.execute(untold.values(told=False))
        return state

    real_host = patches.set(operations_driver, "HostPartition", told_nothing)
    real_note = patches.set(operations_driver, "finish_round", note)
    patches.set(
        operations_journal, "unannounced_children", lambda connection, subject_id, children: []
    )
    patches.set(
        lease_rows,
        "readable_partitions",
        lambda partitions, drained, real=leases_module.readable_partitions: real(
            [leases_module.replace(partition, is_announced=True) for partition in partitions],
            drained,
        ),
    )


def heard_before_it_is_told(patches: Patches) -> None:
    """SQL counts a broker as having heard before it was asked; the asking may fail."""

    async def send(self: Any, announcements: Any) -> Any:
        if announcements:
            pairs = {
                announcement.partition_id: [group_id for group_id, _ in announcement.groups]
                for announcement in announcements
            }
            await self._database.write(store_announced, pairs)
        return await real(self, announcements)

    real = patches.set(Announcer, "_send_all", send)


def groups_told_before_durable(patches: Patches) -> None:
    """A broker reports a group before the group is on its disk."""

    def know(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs).add_done_callback(lambda done: done.cancelled() or done.exception())
        answered = asyncio.get_running_loop().create_future()
        answered.set_result(None)
        return answered

    real = patches.set(control, "register_groups_at", know)


def never_told_counts_as_told(patches: Patches) -> None:
    """A broker takes the groups that it knows for complete, and is told of no others."""

    async def nothing(self: Any, *_args: Any) -> int:
        return 0

    def status(self: Any, **kwargs: Any) -> Any:
        return replace(real(self, **kwargs), groups_told=True)

    def needed(self: Any, partition: Any) -> int:
        cursors = (group.acked.cursor for group in partition.groups.values())
        return max(min(cursors, default=partition.readable_offset), partition.first_offset)

    granted_counts_as_heard(patches)
    patches.set(Announcer, "run_once", nothing)
    patches.set(RetentionLoop, "_first_needed_offset", needed)
    real = patches.set(HostedPartition, "status", status)


BREAKS: tuple[Breaks, ...] = (
    retention_passes_the_slowest_group,
    granted_counts_as_heard,
    opens_before_groups_are_told,
    heard_before_it_is_told,
    groups_told_before_durable,
    never_told_counts_as_told,
)
