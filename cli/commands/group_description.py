"""`keylane group describe`: the owners, cursors and lag of a consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from ...admin import GroupDescription
from ...consumer import QueueProgress, QueueReader
from ...protocol.errors import ConflictError, KeylaneError, Reason
from ...protocol.groups import FailurePolicy, GroupPolicy, GroupSettings
from ...protocol.routing import ConsumeStrategy, PartitionState
from ...protocol.text import counted, format_seconds, listed
from ..connection import open_admin
from ..failing import failing_lines
from ..options import WAIT_S, OutputFormat
from ..screen import make_table, show_data, show_line, show_omitted, show_table
from ..status import showing
from .operations import max_loss_text

if TYPE_CHECKING:
    from rich.table import Table

    from ...admin import EndedMember, PartitionProgress
    from ...protocol.progress import PendingReset

OWNER_CHARS_MAX = 22
ENDED_SHOWN_MS = 3_600_000
"""How long, in milliseconds, the death of a member is shown while other members are running."""


class DescribedGroup(GroupDescription, frozen=True, kw_only=True):
    """A consumer group with its progress on the logic queues of a static subject."""

    queues: list[QueueProgress]


async def describe_group(
    meta: str, output: OutputFormat, *, subject: str, group: str, all_partitions: bool = False
) -> None:
    """
    Show a group's owners, cursors and lag and, for a static subject, its logic queues.

    A table omits sealed partitions that the group has drained, unless `all_partitions` is set.
    """
    async with open_admin(meta) as admin:
        with showing(f"asking the brokers of {subject}"):
            description = await admin.describe_group(subject, group)
    queues = await _queue_progress(meta, subject, group)
    if output is not OutputFormat.TABLE:
        show_data(output, DescribedGroup(**asdict(description), queues=queues))
        return
    visible = [
        partition
        for partition in description.partitions
        if all_partitions or not _is_drained(partition)
    ]
    show_table(_partition_table(description, visible))
    show_omitted(len(description.partitions) - len(visible))
    for line in member_lines(description):
        show_line(line)
    if queues:
        show_table(_queue_table(queues))
    if description.settings is not None:
        for line in settings_lines(description.settings)[1:]:
            show_line(line)
    if description.reset is not None:
        show_line(_reset_line(description.reset, subject=subject, group=group))
    _show_given_up(description, all_partitions=all_partitions)
    for partition in description.partitions:
        if partition.removed_unread:
            show_line(
                f"partition {partition.partition_id}: retention has removed "
                f"{counted(partition.removed_unread, 'message')} "
                "that the group had not read"
            )
        if partition.problem:
            show_line(f"partition {partition.partition_id}: {partition.problem}")
        if partition.suspects:
            show_line(
                f"partition {partition.partition_id}: two consumers ended without handing over; "
                f"{counted(partition.suspects, 'message')} that both had may have ended them, and "
                "the next consumer handles them one at a time, for up to 30 s"
            )
        if partition.failing:
            for line in failing_lines(
                subject,
                group,
                partition.partition_id,
                partition.failing,
                policy=None if description.settings is None else description.settings.policy,
                owned=partition.owner is not None,
            ):
                show_line(line)


def _show_given_up(group: GroupDescription, *, all_partitions: bool) -> None:
    """Show what the group lost because operators declared disks lost: in total and, with
    `all_partitions`, by partition.
    """
    losses = group.given_up
    if not losses:
        return
    total = max_loss_text(*(each.messages_max for each in losses))
    show_line(
        f"an operator accepted the loss of {counted(len(losses), 'partition')} that the group had "
        f"not read to the end: {total}" + ("" if all_partitions else "; --all shows each")
    )
    for each in losses if all_partitions else ():
        show_line(
            f"partition {each.partition_id} ({each.name}) was lost with broker group "
            f"{each.broker_group}: {max_loss_text(each.messages_max)} unread"
        )


def member_lines(group: GroupDescription) -> list[str]:
    """Return lines that say which consumers are waiting, which have not been heard from, and how
    the last one ended.
    """
    if not group.sessions:
        return [_silence_line(group)]
    lines = [
        f"{member.client} was last heard {format_seconds(member.heard_ms)} ago: its leases end in "
        f"{format_seconds(member.expires_in_ms)}, unless it is heard again"
        for member in group.members
        if member.heard_ms > member.expires_in_ms
    ]
    idle = [each.client for each in group.members if not each.partitions and not each.suspended]
    if idle and group.strategy is ConsumeStrategy.EXCLUSIVE:
        members = counted(group.sessions, "member")
        partitions = counted(len(group.partitions), "partition")
        wait = "waits" if len(idle) == 1 else "wait"
        lines.append(f"{members} for {partitions}: {listed(idle)} {wait}")
    ended = group.ended
    joined_again = ended is not None and ended.client in {each.client for each in group.members}
    if ended is None or ended.left or joined_again:
        return lines
    if (ended.ended_ms or 0) < ENDED_SHOWN_MS:
        lines.append(_ended_text(ended, ended.client))
    return lines


def _ended_text(ended: EndedMember, subject: str) -> str:
    since = "" if ended.ended_ms is None else f" {format_seconds(ended.ended_ms)} ago"
    if ended.left:
        return f"{subject} left{since}"
    return f"{subject} is dead: it sent no heartbeat until its leases ended{since}"


def _last_text(ended: EndedMember) -> str:
    return _ended_text(ended, f"the last one, {ended.client},")


def _silence_line(group: GroupDescription) -> str:
    """Return a line that explains why the group has no live consumers."""
    if group.ended is not None and group.ended.left:
        return f"no consumer is running: {_last_text(group.ended)}"
    since = ""
    if group.silent_ms is not None:
        since = f" for at least {group.silent_ms // 1000} s"
    expired = sum(1 for partition in group.partitions if partition.token)
    died = "" if group.ended is None else f"; {_last_text(group.ended)}"
    leases = f"; the leases on {counted(expired, 'partition')} have ended" if expired else ""
    return (
        f"no consumer has sent a heartbeat{since}{died}{leases}: none is running, or a handler "
        "blocks the event loop of each one that is"
    )


def _reset_line(reset: PendingReset, *, subject: str, group: str) -> str:
    """Return a line that says what a pending reset is waiting for and how to cancel it."""
    status = f"a reset to {reset.to.value} is under way, and no partition is granted meanwhile"
    if reset.begun:
        return f"{status}: its cursors are being set"
    waits_for = ", ".join(reset.waits_for) or "the metaserver's next check"
    return (
        f"{status}: it waits for {waits_for}; "
        f"keylane group reset {subject} {group} --cancel ends it"
    )


async def _queue_progress(meta: str, subject: str, group: str) -> list[QueueProgress]:
    """Return a group's progress on the logic queues of a static subject, omitting queues whose
    brokers do not respond.
    """
    async with QueueReader(meta, subject=subject, wait_s=WAIT_S.get()) as reader:
        try:
            views = await reader.queues()
        except ConflictError as error:
            if error.reason is not Reason.SUBJECT_NOT_STATIC:
                raise
            return []
        results = await asyncio.gather(
            *(reader.progress(view.queue, group) for view in views), return_exceptions=True
        )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, KeylaneError):
            raise result
    return [result for result in results if isinstance(result, QueueProgress)]


def _is_drained(partition: PartitionProgress) -> bool:
    """Return True if the partition is sealed and the group has acked all of its messages."""
    return (
        partition.state is PartitionState.SEALED
        and partition.lag == 0
        and partition.owner is None
        and not (partition.parked or partition.retrying or partition.failing or partition.suspects)
    )


def _partition_table(group: GroupDescription, visible: Sequence[PartitionProgress]) -> Table:
    sealed = any(partition.state is PartitionState.SEALED for partition in visible)
    columns: tuple[str, ...] = (
        "id#",
        "partition",
        *(("state",) if sealed else ()),
        "owner",
        "token#",
        "ttl#",
        "offset#",
        "next#",
        "lag#",
    )
    parked = any(partition.parked for partition in visible)
    columns += ("parked#",) if parked else ()
    retrying = any(partition.retrying for partition in visible)
    columns += ("retry#",) if retrying else ()
    rows = [
        (
            partition.partition_id,
            partition.name,
            *((partition.state,) if sealed else ()),
            _shorten_owner(partition.owner),
            partition.token,
            None if partition.expires_in_ms is None else f"{partition.expires_in_ms / 1000:.1f} s",
            partition.offset,
            partition.next_offset,
            partition.lag,
            *((_parked_without_retries(partition),) if parked else ()),
            *((partition.retrying,) if retrying else ()),
        )
        for partition in visible
    ]
    lag = "unknown" if group.lag is None else group.lag
    summary = f"{group.strategy}, {counted(group.sessions, 'consumer')}"
    return make_table(f"{group.group} on {group.subject}: {summary}, lag {lag}", columns, rows)


def _parked_without_retries(partition: PartitionProgress) -> int | None:
    """Return the number of parked messages, excluding those that are waiting to be retried."""
    return None if partition.parked is None else partition.parked - (partition.retrying or 0)


def _queue_table(queues: Sequence[QueueProgress]) -> Table:
    rows = [
        (queue.queue, queue.cursor, queue.min_offset, queue.max_offset, queue.lag)
        for queue in queues
    ]
    return make_table("in logic offsets", ("queue#", "logic offset#", "min#", "max#", "lag#"), rows)


def _shorten_owner(owner: str | None) -> str | None:
    """Shorten a name to OWNER_CHARS_MAX characters, keeping its end, which contains the process
    id.
    """
    if owner is None or len(owner) <= OWNER_CHARS_MAX:
        return owner
    half = OWNER_CHARS_MAX // 2
    return f"{owner[: half - 1]}…{owner[-half:]}"


def policy_notes(policy: GroupPolicy) -> list[str]:
    """Return a line for each stored setting that has no effect, or only for some consumers."""
    unused = [
        *(["tries max"] if policy.tries_max is not None else []),
        *(["when full"] if policy.on_full is not None else []),
    ]
    if not unused or policy.on_failure not in {None, FailurePolicy.BLOCK}:
        return []
    verb = "has" if len(unused) == 1 else "have"
    names = " and ".join(unused)
    if policy.on_failure is FailurePolicy.BLOCK:
        return [f"{names} {verb} no effect: block retries a failing message for ever"]
    line = f"{names} {verb} no effect on consumers that block, the default of a strict subject"
    return [f"{line}: store --on-failure park or dead too, unless their code says so"]


def settings_lines(settings: GroupSettings) -> list[str]:
    """Format a group's stored settings as lines of text."""
    policy = settings.policy
    stored_fields = {
        "on failure": policy.on_failure,
        "when full": policy.on_full,
        "tries max": policy.tries_max,
        "back-off": None
        if policy.backoff_max_ms is None
        else f"{policy.backoff_first_ms} to {policy.backoff_max_ms} ms",
    }
    fields = [f"{name} {value}" for name, value in stored_fields.items() if value is not None]
    lines = [
        f"{settings.group} on {settings.subject}: {settings.strategy}, began at {settings.start}",
        f"stored policy: {', '.join(fields) or 'none; each consumer uses its own settings'}",
    ]
    lines += policy_notes(policy)
    if settings.unstarted:
        ids = ", ".join(map(str, settings.unstarted))
        lines.append(
            f"not every broker knows it and has stored its start yet (partition ids: {ids})"
        )
    if settings.suspended:
        lines.append("suspended by an operator")
    if settings.suspended_clients:
        lines.append(f"clients suspended by an operator: {', '.join(settings.suspended_clients)}")
    return lines
