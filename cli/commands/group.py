"""`keylane group`: describe (who handles which partition, how far, how far behind), list, switch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from ...consumer import QueueProgress, QueueReader
from ...protocol.control import OwnerView, PartitionStatus, SwitchGroup
from ...protocol.errors import KeylaneError
from ...protocol.ids import check_name
from ...protocol.routing import ConsumeStrategy
from ...protocol.text import counted
from ..connection import connect, partition_status
from ..options import OutputFormat
from ..screen import make_table, show_json, show_line, show_table

if TYPE_CHECKING:
    from rich.table import Table

OWNER_CHARS_MAX = 22


class PartitionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A group on one partition.  What its broker says is None while the broker cannot be asked."""

    partition_id: int
    name: str
    broker_group: str
    owner: str | None
    """The name the consumer gave itself; None without an owner."""
    session: str | None
    token: int
    expires_in_ms: int | None
    offset: int | None
    """The cursor: the first message not yet acked."""
    acked_above: int | None
    next_offset: int | None
    lag: int | None
    removed_unread: int | None = None
    """Messages that retention by time removed before the group had acked them."""
    problem: str | None = None


class GroupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A group on a subject; `lag` adds up the partitions, None if one of them is not known."""

    subject: str
    group: str
    strategy: ConsumeStrategy
    sessions: int
    lag: int | None
    partitions: tuple[PartitionProgress, ...]
    queues: tuple[QueueProgress, ...] = ()
    """Of a static subject: the same in logic offsets; those of which a broker cannot be asked are left out."""


async def group_progress(meta: str, *, subject: str, group: str) -> GroupProgress:
    """
    A group's owners from the metaserver and its progress from the brokers.

    Raises:
        SubjectUnknownError, GroupUnknownError, InvalidNameError, UnreachableError.
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    async with connect(meta) as (client, network):
        view = await client.group(subject, group)
        found = await asyncio.gather(
            *(partition_status(network, owner.partition) for owner in view.owners)
        )
        static = (await client.subject(subject)).static
    partitions = tuple(
        _progress(group, owner, status) for owner, status in zip(view.owners, found, strict=True)
    )
    queues = await _queues(meta, subject, group) if static else ()
    lags = [one.lag for one in partitions]
    known = [lag for lag in lags if lag is not None]
    return GroupProgress(
        subject=subject,
        group=group,
        strategy=view.strategy,
        sessions=view.sessions,
        lag=sum(known) if len(known) == len(lags) else None,
        partitions=partitions,
        queues=queues,
    )


async def _queues(meta: str, subject: str, group: str) -> tuple[QueueProgress, ...]:
    async with QueueReader(meta, subject=subject) as reader:
        views = await reader.queues()
        found = await asyncio.gather(
            *(reader.progress(one.queue, group) for one in views), return_exceptions=True
        )
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, KeylaneError):
            raise one
    return tuple(one for one in found if isinstance(one, QueueProgress))


def _progress(group: str, owner: OwnerView, status: PartitionStatus | str) -> PartitionProgress:
    partition = owner.partition
    offset = above = following = lag = removed = None
    if isinstance(status, PartitionStatus):
        # A group that has not pulled yet is unknown to the broker: it will begin at the first message.
        offset, above, following = status.first_offset, 0, status.next_offset
        lag, removed = following - offset, 0
        for one in status.groups:
            if one.group == group:
                offset, above, lag = one.cursor, one.acked_above, one.lag
                removed = one.removed_unread
    return PartitionProgress(
        partition_id=partition.partition_id,
        name=partition.name,
        broker_group=partition.broker_group,
        owner=None if owner.session is None else owner.client or owner.session,
        session=owner.session,
        token=owner.token,
        expires_in_ms=owner.expires_in_ms,
        offset=offset,
        acked_above=above,
        next_offset=following,
        lag=lag,
        removed_unread=removed,
        problem=status if isinstance(status, str) else None,
    )


async def describe_group(meta: str, form: OutputFormat, *, subject: str, group: str) -> None:
    """Show a group's owners and lag."""
    progress = await group_progress(meta, subject=subject, group=group)
    if form is OutputFormat.JSON:
        show_json(progress)
        return
    columns = ("id#", "partition", "owner", "token#", "ttl#", "offset#", "next#", "lag#")
    rows = [
        (
            one.partition_id,
            one.name,
            _shortened(one.owner),
            one.token,
            None if one.expires_in_ms is None else f"{one.expires_in_ms / 1000:.1f} s",
            one.offset,
            one.next_offset,
            one.lag,
        )
        for one in progress.partitions
    ]
    lag = "unknown" if progress.lag is None else progress.lag
    who = f"{progress.strategy}, {counted(progress.sessions, 'consumer')}"
    title = f"{group} on {subject}: {who}, lag {lag}"
    show_table(make_table(title, columns, rows))
    if progress.queues:
        show_table(_queue_table(progress.queues))
    for one in progress.partitions:
        if one.removed_unread:
            show_line(
                f"partition {one.partition_id}: retention has removed "
                f"{counted(one.removed_unread, 'message')} "
                "that the group had not read"
            )
        if one.problem:
            show_line(f"partition {one.partition_id}: {one.problem}")


def _queue_table(queues: tuple[QueueProgress, ...]) -> Table:
    rows = [(one.queue, one.cursor, one.min_offset, one.max_offset, one.lag) for one in queues]
    return make_table("in logic offsets", ("queue#", "logic offset#", "min#", "max#", "lag#"), rows)


async def list_groups(meta: str, form: OutputFormat, *, subject: str) -> None:
    """Show the consumer groups of a subject."""
    check_name("subject", subject)
    async with connect(meta) as (client, _network):
        found = (await client.groups(subject)).summaries
    if form is OutputFormat.JSON:
        show_json(found)
        return
    rows = [(one.group, one.strategy, one.sessions) for one in found]
    title = f"groups of {subject}" if rows else f"no groups on {subject} yet"
    show_table(make_table(title, ("group", "strategy", "consumers#"), rows))


async def switch_group(
    meta: str, form: OutputFormat, *, subject: str, group: str, strategy: ConsumeStrategy
) -> None:
    """Have a group consume in another way, and say so."""
    check_name("subject", subject)
    check_name("consumer group", group)
    async with connect(meta) as (client, _network):
        view = await client.switch_group(subject, group, SwitchGroup(strategy=strategy))
    if form is OutputFormat.JSON:
        show_json(view)
        return
    show_line(f"{group} on {subject} is {view.strategy}")


def _shortened(owner: str | None) -> str | None:
    """A name of any length in so many columns that the table fits a terminal; its end tells processes apart."""
    if owner is None or len(owner) <= OWNER_CHARS_MAX:
        return owner
    half = OWNER_CHARS_MAX // 2
    return f"{owner[: half - 1]}…{owner[-half:]}"
