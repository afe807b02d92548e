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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...protocol.clock import Clock, SystemClock
from ...protocol.errors import (
    ConflictError,
    KeylaneError,
    Reason,
    StorageError,
    UnfinishedError,
)
from ...protocol.progress import CanceledReset, GroupReset, ResetGroup
from ...protocol.text import listed
from ..sql.database import Database
from .live_rows import (
    LiveReset,
    cancel_live_reset,
    give_up_live_reset,
    pending_live_resets,
    plan_live_reset,
    read_live_reset,
    same_live_reset,
)
from .service import ResetService

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
