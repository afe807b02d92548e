"""Resets a group's cursors while its consumers are alive: they hand everything over first, and
continue at the new cursors. Shell.

    row ─▶ no session is granted anything, leases are withdrawn
        ─▶ all leases are handed over or expired
        ─▶ the reset
        ─▶ partitions are granted again
    After a crash any metaserver continues.

Invariants
    The cursors are set while no session has a lease of the group; a late request of an earlier
    owner has a token below the reset's.
    Once cursors may be set, the group is granted nothing before all are set. Messages that
    retention removes meanwhile do not stop it: the cursors go to the nearest stored messages.

Rows of resets of groups with live consumers: begun, pending, answered.

    planned ─▶ leases withdrawn ─▶ none held ─▶ begun: tokens taken ─▶ cursors set ─▶ answered
                     │ given up, or canceled: nothing was changed

Invariants
    A group has at most one row. While it has no answer, no session of the group is granted a
    partition.
    A row that has begun is never given up or canceled: some metaserver answers it once all cursors
    are set.
    A canceled row stays until the next reset, so that a repeat of the cancellation, and a caller
    that waits for the reset, get the outcome.
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
from ..cluster.heard import mark_unsettled
from ..cluster.subjects import open_subject_row
from ..groups.views import OWNERS, find_group
from ..sql.database import Database
from ..sql.schema import groups, live_resets, subjects
from .service import ResetService

_CANCELED = ""
"""Value of the column `answer` of a canceled reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReset:
    """A reset as it is now."""

    reset_id: int
    group_id: int
    subject: str
    group: str
    ask: ResetGroup
    begun: bool
    """True if cursors may be set."""
    answer: GroupReset | None
    """The new cursors, once all are set."""
    canceled: bool
    owners: tuple[str, ...]
    """Names of consumers that have not handed all their partitions over."""


_lock = (
    sa.select(groups.c.group_id)
    .where(groups.c.group_id == sa.bindparam("of_group"), sa.not_(groups.c.deleting))
    .with_for_update()
)
_of_group = sa.select(live_resets).where(live_resets.c.group_id == sa.bindparam("of_group"))
_known = (
    sa.select(live_resets, groups.c.name.label("group"), subjects.c.name.label("subject"))
    .join(groups, groups.c.group_id == live_resets.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(live_resets.c.reset_id == sa.bindparam("of_reset"))
)
_pending = (
    sa.select(live_resets.c.reset_id)
    .where(live_resets.c.answer.is_(None))
    .order_by(live_resets.c.reset_id)
)


def plan_live_reset(connection: Connection, group_id: int, ask: ResetGroup) -> int:
    """
    Begin to withdraw the partitions of a group from its sessions; returns the id of the reset.

    A repeat of a pending request returns the same reset.

    Raises:
        GroupUnknownError: the group was deleted.
        BusyError: another reset of the group is pending.
    """
    if connection.execute(_lock, {"of_group": group_id}).one_or_none() is None:
        raise GroupUnknownError(f"consumer group {group_id} was deleted")
    text = msgspec.json.encode(ask).decode()
    known = connection.execute(_of_group, {"of_group": group_id}).one_or_none()
    if known is not None and known.answer is None:
        if known.ask != text:
            raise BusyError(Reason.GROUP_BUSY, "another reset of this consumer group is running")
        return int(known.reset_id)
    connection.execute(sa.delete(live_resets).where(live_resets.c.group_id == group_id))
    row = {"group_id": group_id, "ask": text}
    made = connection.execute(sa.insert(live_resets).values(row).returning(live_resets.c.reset_id))
    reset_id: int = made.scalar_one()
    mark_unsettled(connection, group_id)
    return reset_id


_same = (
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


def same_live_reset(connection: Connection, subject: str, group: str, ask: ResetGroup) -> int:
    """Return the id of the pending reset that this request has begun; else 0."""
    text = msgspec.json.encode(ask).decode()
    which = {"of_subject": subject, "of_name": group, "of_ask": text}
    return connection.execute(_same, which).scalar_one_or_none() or 0


def read_live_reset(connection: Connection, reset_id: int) -> LiveReset | None:
    """Return a reset; None if it was given up, if another reset followed its cancellation, or if
    its group was deleted.
    """
    row = connection.execute(_known, {"of_reset": reset_id}).one_or_none()
    if row is None:
        return None
    owners = connection.execute(OWNERS, {"of_group": row.group_id}).scalars()
    return LiveReset(
        reset_id=row.reset_id,
        group_id=row.group_id,
        subject=row.subject,
        group=row.group,
        ask=msgspec.json.decode(row.ask, type=ResetGroup),
        begun=row.begun,
        answer=msgspec.json.decode(row.answer, type=GroupReset) if row.answer else None,
        canceled=row.answer == _CANCELED,
        owners=tuple(owners),
    )


def pending_live_resets(connection: Connection) -> list[int]:
    """Return the ids of the resets without an answer."""
    return list(connection.execute(_pending).scalars())


def give_up_live_reset(connection: Connection, reset_id: int, group_id: int) -> bool:
    """Delete a reset, so that the group's sessions are granted partitions again; returns False if
    it has begun or is answered.
    """
    connection.execute(_lock, {"of_group": group_id})
    here = sa.and_(
        live_resets.c.reset_id == reset_id,
        sa.not_(live_resets.c.begun),
        live_resets.c.answer.is_(None),
    )
    given_up = connection.execute(sa.delete(live_resets).where(here)).rowcount == 1
    mark_unsettled(connection, group_id)
    return given_up


def cancel_live_reset(connection: Connection, subject: str, group: str) -> tuple[int, ResetGroup]:
    """
    Cancel the reset that waits for a group's sessions, which are granted partitions again.

    Returns:
        The id of the group, and the request of the reset.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
        ConflictError: some or all cursors may be set, or the group has no reset.
    """
    subject_id = open_subject_row(connection, subject).subject_id
    group_id, _ = find_group(connection, subject_id, subject, group)
    connection.execute(_lock, {"of_group": group_id})
    row = connection.execute(_of_group, {"of_group": group_id}).one_or_none()
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
            "It continues by itself, and the group is granted nothing before it is done; then "
            "reset the group to where it was."
        )
        raise error
    canceled = sa.update(live_resets).where(live_resets.c.reset_id == row.reset_id)
    connection.execute(canceled.values(answer=_CANCELED))
    mark_unsettled(connection, group_id)
    return group_id, msgspec.json.decode(row.ask, type=ResetGroup)


log = logging.getLogger("keylane.metaserver")
_LATER = (Reason.GROUP_BUSY, Reason.RESET_UNFINISHED)
"""Reasons for which a live reset is tried again."""
ANSWER_MS = 20_000
"""Time, in milliseconds, after which a call is answered; a reset that takes longer continues
without it.
"""
LOOK_MS = 50
"""Pause, in milliseconds, between two checks of a waiting reset."""


class LiveResets:
    """
    Resets groups with and without live consumers.

    Args:
        resets: sets cursors.
        settle: withdraws and grants the leases of a group, given by its id, as it is allowed now.
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
        self._driven: set[int] = set()
        """Ids of resets that a call of this process drives."""
        self._logged: dict[int, str] = {}
        """The reset of which the log last said what it waits for, and the text."""

    async def reset(self, subject: str, group: str, ask: ResetGroup) -> GroupReset:
        """
        Set the cursors of a group.

        Raises:
            The errors of `ResetService.reset`; and for `ask.live`:
            UnfinishedError: a consumer has not handed its partitions over in time; the reset
                continues by itself.
            ConflictError: an operator has canceled it.
        """
        if not ask.live or ask.dry_run:
            return await self._resets.reset(subject, group, ask)
        # A repeat of the request that began the pending reset is that reset, even if its plan would
        # fail by now: another metaserver may be setting the cursors, and "nothing was done" would
        # be wrong.
        reset_id = await self._database.read(same_live_reset, subject, group, ask)
        if not reset_id:
            try:
                plan, group_id = await self._resets.plan(subject, group, ask)
            except KeylaneError:
                reset_id = await self._database.read(same_live_reset, subject, group, ask)
                if not reset_id:
                    raise
            else:
                if not plan.cursors:
                    return plan
                reset_id = await self._database.write(plan_live_reset, group_id, ask)
        self._driven.add(reset_id)
        try:
            return await self._drive(reset_id)
        finally:
            self._driven.discard(reset_id)

    async def _drive(self, reset_id: int) -> GroupReset:
        """Check a reset until it is done. Raises its error, and UnfinishedError after
        ANSWER_MS.
        """
        until_ms = self._boot_ms() + ANSWER_MS
        while True:
            live = await self._read(reset_id)
            if live.answer is not None:
                return live.answer
            problem = await self._step(live)
            if problem is None:
                continue
            if self._boot_ms() >= until_ms:
                raise UnfinishedError(Reason.RESET_UNFINISHED, f"{problem}; it continues by itself")
            await asyncio.sleep(LOOK_MS / 1000)

    async def _read(self, reset_id: int) -> LiveReset:
        live = await self._database.read(read_live_reset, reset_id)
        if live is None:
            raise UnfinishedError(
                Reason.RESET_UNFINISHED,
                "another metaserver gave the reset up, or it was canceled, or the group was "
                "deleted",
            )
        if live.canceled:
            raise ConflictError(Reason.RESET_CANCELED, subject=live.subject, group=live.group)
        return live

    async def cancel(self, subject: str, group: str) -> CanceledReset:
        """
        Cancel the reset that waits for a group's consumers, which continue where they were.

        Raises:
            InvalidRequestError, SubjectUnknownError, GroupUnknownError
            ConflictError: some or all cursors may be set, or the group has no reset.
        """
        group_id, asked = await self._database.write(cancel_live_reset, subject, group)
        await self._settle(group_id)
        log.info("reset of group %s of %s is canceled", group, subject)
        return CanceledReset(subject=subject, group=group, asked=asked)

    async def _step(self, live: LiveReset) -> str | None:
        """
        Advance a reset as far as possible now; returns the reason why it waits, or None if it may
        be done.

        Raises:
            KeylaneError: the reset was given up, and nothing was changed.
        """
        await self._settle(live.group_id)
        if live.owners:
            return f"the reset waits until these consumers hand over: {listed(live.owners)}"
        try:
            await self._resets.run(
                live.subject, live.group, live.ask, reset_id=live.reset_id, begun=live.begun
            )
        except KeylaneError as error:
            if isinstance(error, StorageError) or error.reason in _LATER:
                return error.message
            if await self._database.write(give_up_live_reset, live.reset_id, live.group_id):
                await self._settle(live.group_id)
                log.warning(
                    "the reset of group %s of %s was given up, and changed nothing: %s",
                    live.group,
                    live.subject,
                    error.message,
                )
                raise
            return error.message
        await self._settle(live.group_id)
        return None

    async def resume(self) -> None:
        """Continue resets whose metaserver has ended, or whose caller no longer waits."""
        for reset_id in await self._database.read(pending_live_resets):
            live = await self._database.read(read_live_reset, reset_id)
            done = live is None or live.canceled or live.answer is not None
            if live is None or done or reset_id in self._driven:
                continue
            try:
                problem = await self._step(live)
            except KeylaneError:
                continue  # it is logged, and given up
            if problem is not None and self._logged.get(reset_id) != problem:
                self._logged = {reset_id: problem}
                log.info("reset of group %s of %s: %s", live.group, live.subject, problem)
