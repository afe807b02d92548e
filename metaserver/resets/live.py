"""Resets a group's cursors while it has live consumers: they first hand over all partitions, and
then continue at the new cursors. Does network I/O and runs SQL.

    row ─▶ no session is granted anything, leases are withdrawn
        ─▶ all leases are handed over or expired
        ─▶ the reset
        ─▶ partitions are granted again
    After a crash any metaserver continues.

Invariants
    Cursors are set while no session of the group has a lease. A late request of an earlier owner
    has a lower token than the reset.
    Once the first cursor may have been set, the group is granted nothing until all are set. If
    retention removes messages in the meantime, the cursors are set to the nearest stored messages.

The rows of these resets:

    planned ─▶ leases withdrawn ─▶ none held ─▶ begun: tokens taken ─▶ cursors set ─▶ answered
                     │ abandoned, or canceled: nothing was changed

Invariants
    A group has at most one row. While it has no answer, no session of the group is granted a
    partition.
    A reset that has begun is never abandoned or canceled: some metaserver stores its answer once
    all cursors are set.
    The row of a canceled reset is kept until the next reset, so that a repeated cancellation, and a
    caller that is waiting for the reset, get the outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.clock import Clock, SystemClock
from ...protocol.errors import (
    BusyError,
    ConflictError,
    GroupUnknownError,
    KeylaneError,
    Reason,
    StorageError,
    UnfinishedError,
)
from ...protocol.progress import CanceledReset, GroupReset, ResetGroup
from ...protocol.text import listed
from ..cluster.announcements import mark_unsettled
from ..groups.views import OWNERS, find_open_group
from ..sql.database import Database
from ..sql.dialect import calendar_ms
from ..sql.schema import groups, live_resets, subjects
from .service import ResetService

_CANCELED = ""
"""The value of the column `answer` for a canceled reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReset:
    """The current state of a live reset."""

    reset_id: int
    group_id: int
    subject: str
    group: str
    request: ResetGroup
    begun: bool
    """True if some cursors may already have been set."""
    answer: GroupReset | None
    """The new cursors, once all have been set."""
    canceled: bool
    owners: tuple[str, ...]
    """Names of the consumers that still hold partitions."""


_lock_query = (
    sa.select(groups.c.group_id)
    .where(groups.c.group_id == sa.bindparam("of_group"), sa.not_(groups.c.deleting))
    .with_for_update()
)
_group_reset_query = sa.select(live_resets).where(
    live_resets.c.group_id == sa.bindparam("of_group")
)
_reset_query = (
    sa.select(live_resets, groups.c.name.label("group"), subjects.c.name.label("subject"))
    .join(groups, groups.c.group_id == live_resets.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(live_resets.c.reset_id == sa.bindparam("of_reset"))
)
_pending_query = (
    sa.select(live_resets.c.reset_id)
    .where(live_resets.c.answer.is_(None))
    .order_by(live_resets.c.reset_id)
)


def plan_live_reset(connection: Connection, group_id: int, request: ResetGroup) -> int:
    """
    Begin to withdraw a group's partitions from its sessions. Return the id of the reset.

    If the same request is already pending, its id is returned.

    Raises:
        GroupUnknownError: the group was deleted.
        BusyError: another reset of the group is pending.
    """
    if connection.execute(_lock_query, {"of_group": group_id}).one_or_none() is None:
        raise GroupUnknownError(f"consumer group {group_id} was deleted")
    text = msgspec.json.encode(request).decode()
    pending_row = connection.execute(_group_reset_query, {"of_group": group_id}).one_or_none()
    if pending_row is not None and pending_row.answer is None:
        if pending_row.ask != text:
            raise BusyError(Reason.GROUP_BUSY, "another reset of this consumer group is running")
        return int(pending_row.reset_id)
    connection.execute(sa.delete(live_resets).where(live_resets.c.group_id == group_id))
    row = {"group_id": group_id, "ask": text, "asked_at": calendar_ms()}
    inserted_row = connection.execute(
        sa.insert(live_resets).values(row).returning(live_resets.c.reset_id)
    )
    reset_id: int = inserted_row.scalar_one()
    mark_unsettled(connection, group_id)
    return reset_id


_same_reset_query = (
    sa.select(live_resets.c.reset_id)
    .join(groups, groups.c.group_id == live_resets.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        subjects.c.name == sa.bindparam("of_subject"),
        groups.c.name == sa.bindparam("of_name"),
        live_resets.c.ask == sa.bindparam("of_ask"),
        live_resets.c.answer.is_(None),
    )
)


def find_same_reset(connection: Connection, subject: str, group: str, request: ResetGroup) -> int:
    """Return the id of the pending reset that an identical request has begun; 0 if there is
    none.
    """
    text = msgspec.json.encode(request).decode()
    parameters = {"of_subject": subject, "of_name": group, "of_ask": text}
    return connection.execute(_same_reset_query, parameters).scalar_one_or_none() or 0


def read_live_reset(connection: Connection, reset_id: int) -> LiveReset | None:
    """Return a reset. Return None if it was abandoned, if its cancellation was followed by another
    reset, or if its group was deleted.
    """
    row = connection.execute(_reset_query, {"of_reset": reset_id}).one_or_none()
    if row is None:
        return None
    owners = connection.execute(OWNERS, {"of_group": row.group_id}).scalars()
    return LiveReset(
        reset_id=row.reset_id,
        group_id=row.group_id,
        subject=row.subject,
        group=row.group,
        request=msgspec.json.decode(row.ask, type=ResetGroup),
        begun=row.begun,
        answer=msgspec.json.decode(row.answer, type=GroupReset) if row.answer else None,
        canceled=row.answer == _CANCELED,
        owners=tuple(owners),
    )


def pending_live_resets(connection: Connection) -> list[int]:
    """Return the ids of the resets that have no answer yet."""
    return list(connection.execute(_pending_query).scalars())


def abandon_live_reset(connection: Connection, reset_id: int, group_id: int) -> bool:
    """Delete a reset, so that the group's sessions can be granted partitions again. Return False if
    it has begun or has an answer.
    """
    connection.execute(_lock_query, {"of_group": group_id})
    is_not_begun = sa.and_(
        live_resets.c.reset_id == reset_id,
        sa.not_(live_resets.c.begun),
        live_resets.c.answer.is_(None),
    )
    is_abandoned = connection.execute(sa.delete(live_resets).where(is_not_begun)).rowcount == 1
    mark_unsettled(connection, group_id)
    return is_abandoned


def cancel_live_reset(connection: Connection, subject: str, group: str) -> tuple[int, ResetGroup]:
    """
    Cancel a reset that is still waiting for the group's sessions, which can then be granted
    partitions again.

    Returns:
        The id of the group, and the request that began the reset.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
        ConflictError: some cursors may already have been set, or the group has no reset.
    """
    group_id, _ = find_open_group(connection, subject, group)
    connection.execute(_lock_query, {"of_group": group_id})
    row = connection.execute(_group_reset_query, {"of_group": group_id}).one_or_none()
    if row is None:
        raise ConflictError(
            Reason.RESET_FORWARD, f"group {group!r} has no reset", subject=subject, group=group
        )
    if row.answer:
        raise ConflictError(
            Reason.RESET_FORWARD,
            f"the reset of group {group!r} is done",
            subject=subject,
            group=group,
        )
    if row.begun:
        error = ConflictError(
            Reason.RESET_FORWARD,
            f"the reset of group {group!r} has begun to set cursors",
            subject=subject,
            group=group,
            begun=True,
        )
        error.hint = (
            "It continues automatically, and no partition is granted before it is done; then "
            "reset the group to where it was."
        )
        raise error
    this_reset = sa.update(live_resets).where(live_resets.c.reset_id == row.reset_id)
    connection.execute(this_reset.values(answer=_CANCELED))
    mark_unsettled(connection, group_id)
    return group_id, msgspec.json.decode(row.ask, type=ResetGroup)


log = logging.getLogger("keylane.metaserver")
_RETRIED_REASONS = (Reason.GROUP_BUSY, Reason.RESET_UNFINISHED)
"""Reasons for which a live reset is retried."""
CALL_TIMEOUT_MS = 20_000
"""How long, in milliseconds, a call waits for its reset, which continues after that."""
POLL_MS = 50
"""Pause, in milliseconds, between two checks of a waiting reset."""


class LiveResets:
    """
    Resets groups with and without live consumers.

    Args:
        resets: sets cursors.
        settle: settles the leases of the group with the given id: withdraws and grants them
            according to the current rules.
    """

    def __init__(
        self,
        database: Database,
        resets: ResetService,
        settle: Callable[[int], Awaitable[None]],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._resets = resets
        self._settle = settle
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._driven_ids: set[int] = set()
        """Ids of the resets that are being driven by a call in this process."""
        self._logged_problems: dict[int, str] = {}
        """Maps a reset id to the reason for waiting that was last logged; has at most one entry."""

    async def reset(self, subject: str, group: str, request: ResetGroup) -> GroupReset:
        """
        Set the cursors of a group.

        Raises:
            KeylaneError: any error of `ResetService.reset`.
            UnfinishedError: a consumer did not hand over its partitions in time; the live reset
                continues in the background.
            ConflictError: an operator has canceled the live reset.
        """
        if not request.live or request.dry_run:
            return await self._resets.reset(subject, group, request)
        # A repeated request joins the pending reset, even if its plan would fail by now, because
        # another metaserver may be setting the cursors, so "nothing was done" would be wrong.
        reset_id = await self._database.read(find_same_reset, subject, group, request)
        if not reset_id:
            try:
                plan, group_id = await self._resets.plan(subject, group, request)
            except KeylaneError:
                reset_id = await self._database.read(find_same_reset, subject, group, request)
                if not reset_id:
                    raise
            else:
                if not plan.cursors:
                    return plan
                reset_id = await self._database.write(plan_live_reset, group_id, request)
        self._driven_ids.add(reset_id)
        try:
            return await self._drive(reset_id)
        finally:
            self._driven_ids.discard(reset_id)

    async def _drive(self, reset_id: int) -> GroupReset:
        """Advance a reset until it is done. Raises any error of the reset, or UnfinishedError after
        CALL_TIMEOUT_MS.
        """
        deadline_ms = self._boot_ms() + CALL_TIMEOUT_MS
        while True:
            reset = await self._read(reset_id)
            if reset.answer is not None:
                return reset.answer
            problem = await self._step(reset)
            if problem is None:
                continue
            if self._boot_ms() >= deadline_ms:
                raise UnfinishedError(
                    Reason.RESET_UNFINISHED, f"{problem}; it continues automatically"
                )
            await asyncio.sleep(POLL_MS / 1000)

    async def _read(self, reset_id: int) -> LiveReset:
        """Return a reset. Raises UnfinishedError if it no longer exists, and ConflictError if it
        was canceled.
        """
        reset = await self._database.read(read_live_reset, reset_id)
        if reset is None:
            raise UnfinishedError(
                Reason.RESET_UNFINISHED,
                "another metaserver abandoned the reset, or it was canceled, or the group was "
                "deleted",
            )
        if reset.canceled:
            raise ConflictError(Reason.RESET_CANCELED, subject=reset.subject, group=reset.group)
        return reset

    async def cancel(self, subject: str, group: str) -> CanceledReset:
        """
        Cancel a reset that is still waiting for the group's consumers, which continue where they
        were.

        Raises:
            InvalidRequestError, SubjectUnknownError, GroupUnknownError
            ConflictError: some cursors may already have been set, or the group has no reset.
        """
        group_id, request = await self._database.write(cancel_live_reset, subject, group)
        await self._settle(group_id)
        log.info("reset of group %s of %s is canceled", group, subject)
        return CanceledReset(subject=subject, group=group, asked=request)

    async def _step(self, reset: LiveReset) -> str | None:
        """
        Advance a reset as far as currently possible. Return the reason why it is waiting, or None
        if it may be done.

        Raises:
            KeylaneError: the reset was abandoned; nothing was changed.
        """
        await self._settle(reset.group_id)
        if reset.owners:
            return f"the reset waits until these consumers hand over: {listed(reset.owners)}"
        try:
            await self._resets.run(
                reset.subject,
                reset.group,
                reset.request,
                reset_id=reset.reset_id,
                begun=reset.begun,
            )
        except KeylaneError as error:
            if isinstance(error, StorageError) or error.reason in _RETRIED_REASONS:
                return error.message
            if await self._database.write(abandon_live_reset, reset.reset_id, reset.group_id):
                await self._settle(reset.group_id)
                log.warning(
                    "the reset of group %s of %s was abandoned, and changed nothing: %s",
                    reset.group,
                    reset.subject,
                    error.message,
                )
                raise
            return error.message
        await self._settle(reset.group_id)
        return None

    async def resume(self) -> None:
        """Continue resets whose metaserver has stopped or whose caller is no longer waiting."""
        for reset_id in await self._database.read(pending_live_resets):
            reset = await self._database.read(read_live_reset, reset_id)
            is_done = reset is None or reset.canceled or reset.answer is not None
            if reset is None or is_done or reset_id in self._driven_ids:
                continue
            try:
                problem = await self._step(reset)
            except KeylaneError:
                continue  # logged and abandoned by `_step`
            if problem is not None and self._logged_problems.get(reset_id) != problem:
                self._logged_problems = {reset_id: problem}
                log.info("reset of group %s of %s: %s", reset.group, reset.subject, problem)
