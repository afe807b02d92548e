"""Defines views that combine the metaserver's data with the status reported by brokers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..protocol.control import (
    BrokerView,
    EndedMember,
    GivenUpPartition,
    GroupMember,
    GroupView,
    OwnerView,
    PartitionStatus,
    RefusedBroker,
    Retention,
    SubjectView,
    WaitingProducer,
)
from ..protocol.groups import GroupSettings
from ..protocol.operations import OperationView
from ..protocol.parked import FailingMessage
from ..protocol.progress import GroupStatus, PendingReset
from ..protocol.reprocess.holds import HoldView
from ..protocol.routing import (
    ConsumeStrategy,
    OrderStrategy,
    Partition,
    PartitionState,
    logical_partition,
)
from ..protocol.scheduled.receipt import ScheduledView
from .hot import find_hot


class BrokerList(Struct, frozen=True, kw_only=True):
    """Every broker group that has ever sent a report, and the brokers whose reports are refused."""

    brokers: list[BrokerView]
    refused: list[RefusedBroker]


class PartitionDescription(Struct, frozen=True, kw_only=True):
    """A partition as listed in the route, with its offsets, which are None while its broker does
    not respond.
    """

    partition_id: int
    name: str
    queue: int
    logic_start: int
    """Logic offset of the partition's first message; only meaningful for static subjects."""
    range_start: int
    range_end: int
    """The partition contains the logical partitions in `[range_start, range_end)`."""
    broker_group: str
    state: PartitionState
    parents: tuple[int, ...]
    address: str | None
    """The broker's `host:port`; None while the broker group is unavailable."""
    first_offset: int | None
    """Offset of the oldest stored message."""
    next_offset: int | None
    """Offset of the next message to be stored."""
    problem: str | None
    """The reason why the offsets are unknown."""
    holds: tuple[HoldView, ...] = ()
    """Holds with which jobs protect messages from retention."""
    groups: tuple[GroupStatus, ...] = ()
    """Progress of the consumer groups that the broker knows."""
    stored_bytes: int | None = None
    """About how many bytes the stored messages take; None if unknown."""
    messages_per_s: float | None = None
    """Messages stored in a second, on average over the last 30 to 60 seconds; None if unknown."""
    bytes_per_s: float | None = None
    is_hot: bool = False
    """True if it stores far more than the other open partitions of its subject; see `hot.py`."""


class GroupReport(Struct, frozen=True, kw_only=True):
    """A consumer group's progress on a partition, as its broker reports it."""

    group: str
    lag: int
    """Number of stored messages that have not been acked."""
    parked: int
    """Number of parked messages, including those that are waiting to be retried."""
    failing: FailingMessage | None = None
    """The oldest failing message that has not been handled."""


class PartitionReport(Struct, frozen=True, kw_only=True):
    """A partition, as its broker reports it."""

    partition_id: int
    subject: str
    state: PartitionState
    first_offset: int
    """Offset of the oldest stored message."""
    next_offset: int
    """Offset of the next message to be stored."""
    groups: tuple[GroupReport, ...]


def to_report(status: PartitionStatus) -> PartitionReport:
    """Convert the status of a partition that a broker returned."""
    return PartitionReport(
        partition_id=status.partition_id,
        subject=status.subject,
        state=status.state,
        first_offset=status.first_offset,
        next_offset=status.next_offset,
        groups=tuple(
            GroupReport(group=each.group, lag=each.lag, parked=each.parked, failing=each.failing)
            for each in status.groups
        ),
    )


class SubjectChange(Struct, frozen=True, kw_only=True):
    """A subject's settings by name, before and after a change."""

    subject: str
    before: dict[str, str]
    after: dict[str, str]
    operation: OperationView
    """The operation that makes the change and continues in the background. Its `operation_id` is 0
    if nothing changes or the change is only planned.
    """


class SubjectDescription(Struct, frozen=True, kw_only=True):
    """A subject with its settings and those partitions that have data, sorted by range."""

    subject: str
    order_strategy: OrderStrategy
    static: bool
    retention: Retention
    route_version: int
    partitions: tuple[PartitionDescription, ...]
    message_bytes_max: int
    """Maximum message size in bytes, including key, value and properties."""


class PartitionProgress(Struct, frozen=True, kw_only=True):
    """A consumer group's owner and progress on a partition. The fields reported by the broker are
    None while it does not respond.
    """

    partition_id: int
    name: str
    state: PartitionState
    """SEALED: it gets no more messages, and those that continue it are read after it."""
    broker_group: str
    owner: str | None
    """The consumer's client name, or its session id if it has no name; None if the partition has no
    owner.
    """
    session: str | None
    token: int
    expires_in_ms: int | None
    """Remaining time of the owner's lease, in milliseconds; None if the partition has no owner."""
    hands_over_to: str | None = None
    """The consumer that gets the partition once the owner has handed it over; None if it need
    not.
    """
    holder: str | None = None
    """The session that has recently read the partition at its broker; None if there is none, or if
    the broker has not said.
    """
    offset: int | None
    """The cursor: the offset of the first unacked message."""
    acked_above: int | None
    """Number of messages acked above the cursor."""
    next_offset: int | None
    lag: int | None
    """Number of stored messages that have not been acked."""
    removed_unread: int | None = None
    """Number of messages that time-based retention removed before the group acked them."""
    problem: str | None = None
    """The reason why the fields reported by the broker are unknown."""
    parked: int | None = None
    """Number of parked messages, including those that are waiting to be retried."""
    retrying: int | None = None
    """Number of messages that are waiting to be retried."""
    failing: FailingMessage | None = None
    """The oldest failing message that has not been handled, with its last error. Later messages
    with the same key wait for it.
    """
    suspects: int = 0
    """Number of messages that two successive owners had pulled when each of them died without a
    handover. The next owner handles them one at a time, for up to 30 s.
    """
    age_ms: int | None = None
    """The time since the partition was opened, in milliseconds; None if unknown."""
    previous_owner: str | None = None
    """The consumer that owned it before; None if there was none, or if unknown."""
    promised_ms: int = 0
    """How long its broker lets nobody in but its last owner, which could not reach a metaserver, in
    milliseconds; 0 if it made no such promise.
    """


class GroupDescription(Struct, frozen=True, kw_only=True):
    """A consumer group on a subject, with its owners, cursors and lag."""

    subject: str
    group: str
    strategy: ConsumeStrategy
    sessions: int
    """Number of live consumers."""
    lag: int | None
    """Sum of the partitions' lags; None if any lag is unknown."""
    partitions: tuple[PartitionProgress, ...]
    """Those that have data, sorted by range; sealed ones come before those that continue them."""
    settings: GroupSettings | None = None
    """Stored settings of the group: its failure policy, its start, and which of its consumers are
    suspended.
    """
    reset: PendingReset | None = None
    """An unfinished reset with live consumers."""
    silent_ms: int | None = None
    """Milliseconds since a metaserver found that the group has no live consumers. None if it has
    some, or if no metaserver has noticed yet.
    """
    revision: str = ""
    """Revision of the cursors. As long as it stays the same and there are no live consumers, the
    cursors have not changed; see `Admin.publish_subject`.
    """
    given_up: tuple[GivenUpPartition, ...] = ()
    """Unread messages, by partition, in partitions whose loss an operator has accepted."""
    members: tuple[GroupMember, ...] = ()
    """Live consumers, in the order in which they joined."""
    ended: EndedMember | None = None
    """The consumer that was the last to leave or die; None if there was none."""
    waiting_producers: tuple[WaitingProducer, ...] = ()
    """Producers of the subject that wait for a broker."""


def sort_by_range(partitions: Iterable[Partition]) -> list[Partition]:
    """Sort partitions by range, parents before children."""
    return sorted(partitions, key=lambda partition: (partition.range_start, partition.partition_id))


def silent_partitions(
    subject: SubjectDescription, *, key: bytes | None = None, partition_id: int | None = None
) -> dict[int, str]:
    """
    Return a dict that maps each partition whose broker has not answered, and that may have messages
    in question, to the reason.

    Args:
        key: only messages of this key; None: of any key.
        partition_id: only messages of this partition; None: of any.
    """
    is_anywhere = subject.order_strategy is OrderStrategy.BEST_TRIED and not subject.static
    number = None if key is None or is_anywhere else logical_partition(key)
    return {
        each.partition_id: each.problem
        for each in subject.partitions
        if each.problem is not None
        and partition_id in {None, each.partition_id}
        and (number is None or each.range_start <= number < each.range_end)
    }


def describe_subject(
    view: SubjectView, statuses: dict[int, PartitionStatus | str]
) -> SubjectDescription:
    """
    Combine a subject with the status reported by its brokers.

    Args:
        statuses: maps each partition id to its status, or to the reason why it is unknown.
    """
    hot_ids = find_hot(
        {
            int(partition.partition_id): (status.messages_per_s or 0, status.bytes_per_s or 0)
            for partition in view.route.open_partitions()
            if isinstance(status := statuses[partition.partition_id], PartitionStatus)
        }
    )
    return SubjectDescription(
        subject=view.subject,
        order_strategy=view.order_strategy,
        static=view.static,
        retention=view.retention,
        route_version=view.route.version,
        partitions=tuple(
            _describe_partition(
                partition,
                statuses[partition.partition_id],
                is_hot=partition.partition_id in hot_ids,
            )
            for partition in sort_by_range(view.route.partitions)
        ),
        message_bytes_max=view.message_bytes_max,
    )


def compare_settings(
    view: SubjectView, new_values: Mapping[str, object], operation: OperationView
) -> SubjectChange:
    """
    Compare the settings of a subject before and after a change.

    Args:
        new_values: maps each setting to its new value; None leaves it unchanged.
    """
    before = {
        "order_strategy": view.order_strategy.value,
        "retention": view.retention.value,
        "message_bytes_max": str(view.message_bytes_max),
    }
    changes = {name: str(value) for name, value in new_values.items() if value is not None}
    return SubjectChange(
        subject=view.subject, before=before, after=before | changes, operation=operation
    )


def _describe_partition(
    partition: Partition, status: PartitionStatus | str, *, is_hot: bool
) -> PartitionDescription:
    reported = None if isinstance(status, str) else status
    return PartitionDescription(
        partition_id=partition.partition_id,
        name=partition.name,
        queue=partition.queue,
        logic_start=partition.logic_start,
        range_start=partition.range_start,
        range_end=partition.range_end,
        broker_group=partition.broker_group,
        state=partition.state,
        parents=partition.parents,
        address=partition.address,
        first_offset=None if reported is None else reported.first_offset,
        next_offset=None if reported is None else reported.next_offset,
        problem=status if isinstance(status, str) else None,
        holds=() if reported is None else reported.holds,
        groups=() if reported is None else reported.groups,
        stored_bytes=None if reported is None else reported.stored_bytes,
        messages_per_s=None if reported is None else reported.messages_per_s,
        bytes_per_s=None if reported is None else reported.bytes_per_s,
        is_hot=is_hot,
    )


def describe_group(view: GroupView, statuses: dict[int, PartitionStatus | str]) -> GroupDescription:
    """
    Combine a consumer group with the status reported by the brokers of its partitions.

    Args:
        statuses: maps each partition id to its status, or to the reason why it is unknown.
    """
    owners = {owner.partition.partition_id: owner for owner in view.owners}
    partitions = tuple(
        _describe_progress(
            view.group, owners[partition.partition_id], statuses[partition.partition_id]
        )
        for partition in sort_by_range(owner.partition for owner in view.owners)
    )
    lags = [partition.lag for partition in partitions if partition.lag is not None]
    return GroupDescription(
        subject=view.subject,
        group=view.group,
        strategy=view.strategy,
        sessions=view.sessions,
        lag=sum(lags) if len(lags) == len(partitions) else None,
        partitions=partitions,
        settings=view.settings,
        reset=view.reset,
        silent_ms=view.silent_ms,
        revision=view.revision,
        given_up=view.given_up,
        members=view.members,
        ended=view.ended,
        waiting_producers=view.waiting_producers,
    )


def _describe_progress(
    group: str, owner: OwnerView, status: PartitionStatus | str
) -> PartitionProgress:
    offset = acked_above = next_offset = lag = removed_unread = parked = retrying = failing = None
    suspects, holder, promised_ms = 0, None, 0
    if isinstance(status, PartitionStatus):
        # A broker learns about a group with its first pull, which starts at the first stored
        # message.
        offset, acked_above, next_offset = status.first_offset, 0, status.next_offset
        lag, removed_unread, parked, retrying = next_offset - offset, 0, 0, 0
        for progress in status.groups:
            if progress.group == group:
                offset, acked_above, lag = progress.cursor, progress.acked_above, progress.lag
                removed_unread, parked = progress.removed_unread, progress.parked
                retrying = progress.retrying
                failing, suspects = progress.failing, progress.suspects
                holder, promised_ms = progress.holder, progress.promised_ms
    return PartitionProgress(
        partition_id=owner.partition.partition_id,
        name=owner.partition.name,
        state=owner.partition.state,
        broker_group=owner.partition.broker_group,
        owner=None if owner.session is None else owner.client or owner.session,
        session=owner.session,
        token=owner.token,
        expires_in_ms=owner.expires_in_ms,
        hands_over_to=owner.hands_over_to,
        holder=holder,
        offset=offset,
        acked_above=acked_above,
        next_offset=next_offset,
        lag=lag,
        removed_unread=removed_unread,
        parked=parked,
        retrying=retrying,
        failing=failing,
        suspects=suspects,
        problem=status if isinstance(status, str) else None,
        age_ms=owner.age_ms,
        previous_owner=owner.previous_client,
        promised_ms=promised_ms,
    )


class ScheduledMessages(Struct, frozen=True, kw_only=True):
    """Messages that brokers store for later delivery."""

    count: int
    """Number of scheduled messages on the brokers that responded."""
    messages: list[ScheduledView]
    """The messages due next, in order of delivery time."""
    problems: dict[str, str]
    """Maps each broker group or address to the reason why it was not asked or did not respond."""


def is_scheduled_id(text: str) -> bool:
    """Return True if the text consists of 32 hexadecimal digits."""
    try:
        return len(text) == 32 and len(bytes.fromhex(text)) == 16
    except ValueError:
        return False
