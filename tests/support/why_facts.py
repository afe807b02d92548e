"""Facts about a made-up group, from which `keylane why` names causes."""

from __future__ import annotations

from msgspec.structs import replace

from keylane.admin import GroupDescription, ParkedKeyView, PartitionProgress
from keylane.admin.why.facts import Facts
from keylane.protocol.control import BrokerView, Health, PartitionStatus
from keylane.protocol.parked import FailingMessage, Failure, ParkState
from keylane.protocol.reading.newest import NewestMessage
from keylane.protocol.routing import ConsumeStrategy, Partition, PartitionState


def partition(number: int, start: int, end: int, *parents: int) -> Partition:
    return Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=start,
        range_end=end,
        broker_group="g1",
        state=PartitionState.OPEN if not start or parents else PartitionState.SEALED,
        parents=parents,
        address="h:1",
    )


def progress(number: int, **changes: object) -> PartitionProgress:
    return replace(
        PartitionProgress(
            partition_id=number,
            name=f"p{number}",
            state=PartitionState.OPEN,
            broker_group="g1",
            owner="c1",
            session="s1",
            token=1,
            expires_in_ms=20_000,
            offset=0,
            acked_above=0,
            next_offset=10,
            lag=10,
        ),
        **changes,
    )


def facts(*partitions: Partition, progress_of: tuple[PartitionProgress, ...], **changes) -> Facts:
    group = GroupDescription(
        subject="orders",
        group="billing",
        strategy=ConsumeStrategy.EXCLUSIVE,
        sessions=1,
        lag=10,
        partitions=progress_of,
    )
    return Facts(group=group, partitions=partitions, **changes)


def broker(name: str = "g1", **changes: object) -> BrokerView:
    return replace(
        BrokerView(broker_group=name, address="h:1", available=True, silent_ms=200), **changes
    )


def health(*, ready: bool = True, reason: str = "", **details: object) -> Health:
    return Health(program="broker", ready=ready, reason=reason, details=details)


def status(number: int, **changes: object) -> PartitionStatus:
    known = PartitionStatus(
        partition_id=number,
        subject="orders",
        name=f"p{number}",
        state=PartitionState.OPEN,
        first_offset=0,
        next_offset=10,
    )
    return replace(known, **changes)


def read(number: int, **changes: object) -> PartitionProgress:
    return progress(number, lag=0, offset=10, holder="s1", **changes)


def newest(offset: int | None, *, searched_from: int = 0, **changes: object) -> NewestMessage:
    found = NewestMessage(
        partition_id=1,
        searched_from=searched_from,
        first_offset=0,
        next_offset=10,
        offset=offset,
        age_ms=4_000,
    )
    return replace(found, **changes)


def parked_key(key: bytes, failed_at_ms: int, text: str) -> ParkedKeyView:
    return ParkedKeyView(
        partition_id=1,
        key=key,
        state=ParkState.PARKED,
        messages=2,
        since_ms=1_000,
        failure=Failure("ValueError", text, "c1", failed_at_ms, 5),
        first_source=1,
        first_offset=2,
    )


WHOLE = partition(1, 0, 1024)

FAILING = FailingMessage(
    offset=3,
    key_digest="key digest ab",
    since_ms=1_000,
    attempts=2,
    kind="ValueError",
    text="",
    client="c1",
    at_ms=2_000,
)
