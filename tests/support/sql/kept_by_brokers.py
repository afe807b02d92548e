"""What brokers keep of a subject `s`, as a rebuild of the database is told it."""

from __future__ import annotations

import msgspec

from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.rows import BrokerSource, RebuiltSubject
from keylane.protocol.control import (
    GroupStatus,
    HostPartition,
    PartitionStatus,
    PartitionStatusList,
)
from keylane.protocol.routing import ConsumeStrategy, OrderStrategy, Partition, PartitionState

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED
PLANNED, EXPIRED = PartitionState.PLANNED, PartitionState.EXPIRED


def status(
    number: int,
    start: int,
    end: int,
    *,
    parents: tuple[int, ...] = (),
    sealed: bool = False,
    messages: int = 10,
    token: int = 0,
    cursor: int = 0,
    strategy: OrderStrategy | None = OrderStrategy.STRICT,
    group: str = "g1",
    consumes: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE,
    queue: int | None = None,
    wanted: int = 2,
    static: bool = False,
    name: str = "",
    message_bytes_max: int = 0,
    hidden: str = "",
    cluster_id: str = "",
) -> PartitionStatus:
    """A partition as its broker has it; without a `queue`, it is the first of one of its own."""
    partition = Partition(
        partition_id=number,
        name=name or f"s.p{number - 1}",
        queue=number - 1 if queue is None else queue,
        range_start=start,
        range_end=end,
        broker_group=group,
        state=OPEN,
        parents=parents,
    )
    progress = GroupStatus(
        group="g", token=token, cursor=cursor, acked_above=0, lag=0, strategy=consumes
    )
    return PartitionStatus(
        partition_id=number,
        subject="s",
        name=partition.name,
        state=SEALED if sealed else OPEN,
        first_offset=0,
        next_offset=messages,
        groups=(progress,) if token else (),
        facts=HostPartition(
            subject="s",
            partition=partition,
            order_strategy=strategy,
            partitions_wanted=wanted,
            static=static,
            message_bytes_max=message_bytes_max,
            hidden=hidden,
            cluster_id=cluster_id,
        ),
    )


def heard(status: PartitionStatus) -> PartitionStatus:
    """The same partition, whose broker was told of group `g` before the group came."""
    group = GroupStatus(group="g", token=0, cursor=0, acked_above=0, lag=status.next_offset)
    return msgspec.structs.replace(status, groups=(group,))


def source(*statuses: PartitionStatus, group: str = "g1", broker_id: str = "") -> BrokerSource:
    hosted = PartitionStatusList(
        broker_group=group, partitions=list(statuses), broker_id=broker_id or f"id-{group}"
    )
    return BrokerSource(address=f"{group}:1", hosted=hosted)


def rebuilt(*statuses: PartitionStatus) -> RebuiltSubject:
    (subject,) = plan_rebuild([source(*statuses)]).subjects
    return subject


def states(subject: RebuiltSubject) -> dict[int, PartitionState]:
    return {entry.partition.partition_id: entry.partition.state for entry in subject.partitions}


HALVES = (status(1, 0, 512), status(2, 512, 1024))
