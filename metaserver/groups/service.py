"""The consumers' calls: join, heartbeat as a long poll, release, leave.  Shell around the store.

    heartbeat ─▶ renewed at once, many in one transaction ─▶ grants changed? ─▶ answer
                                                                   │ no
                                                                   └─▶ wait for a change, at most a third of the ttl

A change waiters the sessions it concerns and no others: a thousand waiting consumers cost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...protocol.control import (
    Done,
    Grants,
    GroupList,
    GroupView,
    Heartbeat,
    Join,
    Joined,
    Leave,
    ReleaseGrant,
    Suspend,
    SwitchGroup,
)
from ...protocol.errors import InvalidRequestError, KeylaneError, SessionUnknownError
from ...protocol.ids import ConsumerGroup, SessionId
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..wakeups import SingleFlight, Waiter, Wakeups
from .lease_rows import (
    Changes,
    note_drained,
    read_grants,
    release_leases,
    release_unheld,
    settle_group,
)
from .sessions import (
    SessionRow,
    check_session,
    join_group,
    leave_group,
    renew_sessions,
    suspend_session,
)
from .switch import switch_group
from .views import grants_versions, group_versions, list_groups, read_group

log = logging.getLogger("keylane.metaserver")
DRAINED_MAX = 4_096
"""Partitions in one list of a heartbeat."""
SETTLE_REST_MS_MAX = 250
"""A group of a thousand takes tens of milliseconds to settle: while many join, some of them wait for each other."""
RENEWED_AT_ONCE_MAX = 1_000
GRANTS_CACHED_MAX = 20_000


async def _tell_nobody(_group_id: int) -> None:
    """The periodic look tells of the group."""


@dataclass(slots=True)
class _Waiting:
    """A call that waits; its row is as new as this version of its group, None: nobody knows."""

    row: SessionRow
    group_version: int | None


class GroupService:
    """Consumer sessions and what they are granted, over one database."""

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        announce: Callable[[int], Awaitable[None]] = _tell_nobody,
    ) -> None:
        """`announce` makes a new group known to the brokers of its subject."""
        self._announce = announce
        self._database = database
        self._settings = settings
        self._wakeups: Wakeups[SessionId] = Wakeups()
        self._settling: SingleFlight[int, None, None] = SingleFlight(
            self._settle_now, rest_ms_max=SETTLE_REST_MS_MAX
        )
        self._settling_first: SingleFlight[int, None, None] = SingleFlight(
            self._settle_first, rest_ms_max=SETTLE_REST_MS_MAX
        )
        """For heartbeats: they do not wait behind joins, because a late answer costs the session."""
        self._renewing: SingleFlight[None, SessionId, dict[str, SessionRow]] = SingleFlight(
            self._renew_now
        )
        self._releasing: SingleFlight[
            SessionId, ReleaseGrant, Mapping[ReleaseGrant, KeylaneError]
        ] = SingleFlight(self._release_now)
        self._cached: dict[SessionId, Grants] = {}
        self._waiting: dict[Waiter, _Waiting] = {}
        """By call: of two of one session the older may end later."""
        self._group_versions: dict[int, int] = {}
        """As of the last look; another one with each."""

    async def join(self, ask: Join) -> Joined:
        """
        Begin a session.  When this returns, the group's partitions are dealt out anew.

        A group that begins with it is known to every broker that answered: nothing is removed any more that it has not
        read.  It is granted the partitions of the others when these have heard of it.
        """
        row = await self._database.write(join_group, ask, sessions_max=self._settings.sessions_max)
        if row.new_group:
            await self._announce(row.group_id)
        await self.settle(row.group_id)
        longest = self._settings.heartbeat_ms_max
        return Joined(ttl_ms=row.ttl_ms, heartbeat_ms=min(longest, row.ttl_ms // 3))

    async def heartbeat(self, ask: Heartbeat) -> Grants:
        """
        Renew, then answer as soon as the grants differ from `known_version`.

        Raises:
            SessionUnknownError, InvalidRequestError
        """
        check_session(ask.session)
        if max(len(ask.drained), len(ask.holding or ())) > DRAINED_MAX:
            raise InvalidRequestError(f"at most {DRAINED_MAX} partitions at once")
        session = SessionId(ask.session)
        with self._wakeups.listen(session) as waiter:
            versions = self._group_versions  # the row is read after them
            row = await self._renew(session)
            self._waiting[waiter] = _Waiting(row, versions.get(row.group_id))
            try:
                if _suspend_reply_was_lost(ask, row):
                    meant = Suspend(session=session, suspended=bool(ask.suspended))
                    group_id = await self._database.write_first(suspend_session, meant)
                    await self._settling_first.run(group_id, None)
                    self._wakeups.wake([session])
                if ask.drained:
                    drained_by = await self._database.write_first(
                        note_drained, session, ask.drained
                    )
                    if drained_by is not None:
                        await self._settling_first.run(drained_by, None)
                if row.handing_over and ask.holding is not None:
                    held = set(ask.holding)
                    self._tell(await self._database.write_first(release_unheld, ask, held))
                # Never so long that the next renewal comes late.
                wait_ms = min(ask.wait_ms, row.ttl_ms // 3)
                if row.grants_version == ask.known_version and wait_ms:
                    await waiter.wait(wait_ms)
                cached = self._cached.get(session)
                if cached is not None and cached.version == row.grants_version and not waiter.woken:
                    return cached
                return await self._read_grants(session)
            finally:
                del self._waiting[waiter]

    async def release(self, ask: ReleaseGrant) -> Done:
        """
        A hand-over is finished; its next owner is granted at once.

        Raises:
            SessionUnknownError, TokenUnknownError
        """
        check_session(ask.session)
        session = SessionId(ask.session)
        refused = (await self._releasing.run(session, ask)).get(ask)
        if refused is not None:
            raise refused
        return Done()

    async def suspend(self, ask: Suspend) -> Done:
        """Grant a session nothing, or something again.  Raises SessionUnknownError."""
        await self.settle(await self._database.write(suspend_session, ask))
        self._wakeups.wake([SessionId(ask.session)])
        return Done()

    async def leave(self, ask: Leave) -> Done:
        """End a session; again is harmless."""
        group_id = await self._database.write(leave_group, ask.session)
        if group_id is not None:
            await self.settle(group_id)
            self._forget(SessionId(ask.session))
        return Done()

    async def group(self, subject: str, group: str) -> GroupView:
        """Owners.  Raises SubjectUnknownError, GroupUnknownError."""
        return await self._database.read(read_group, subject, ConsumerGroup(group))

    async def groups(self, subject: str) -> GroupList:
        """All groups of a subject.  Raises SubjectUnknownError."""
        return await self._database.read(list_groups, subject)

    async def switch(self, subject: str, group: str, ask: SwitchGroup) -> GroupView:
        """
        Have a group consume in another way; its sessions end and have to join again.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        self._tell(
            await self._database.write(switch_group, subject, group, ask.strategy),
            why="its group was switched",
        )
        return await self.group(subject, group)

    async def settle(self, group_id: int) -> None:
        """Make the group's leases fit its sessions and partitions, as they are at this call or later."""
        await self._settling.run(group_id, None)

    async def check_for_changes(self) -> None:
        """Wake those whose grants were changed by another metaserver."""
        waiting = dict(self._waiting)
        ids = {one.row.group_id for one in waiting.values()}
        versions = await self._database.read(group_versions, ids) if ids else {}
        moved = {
            one.row.group_id
            for one in waiting.values()
            if one.group_version != versions.get(one.row.group_id)
        }
        if moved:
            grants = await self._database.read(grants_versions, moved)
            for waiter, one in waiting.items():
                row = one.row
                if row.group_id in moved and grants.get(row.session) != row.grants_version:
                    waiter.wake()
        for one in waiting.values():
            one.group_version = versions.get(one.row.group_id)
        self._group_versions = versions

    def close(self) -> None:
        """Answer everybody who waits."""
        self._wakeups.wake_all()

    async def _renew(self, session: SessionId) -> SessionRow:
        row = (await self._renewing.run(None, session)).get(session)
        if row is None:
            self._forget(session)
            raise SessionUnknownError(session=session)
        return row

    async def _renew_now(self, _key: None, sessions: Sequence[SessionId]) -> dict[str, SessionRow]:
        """Renew the sessions of all heartbeats that share this run, in one statement."""
        ordered = sorted(set(sessions))
        renewed: dict[str, SessionRow] = {}
        for start in range(0, len(ordered), RENEWED_AT_ONCE_MAX):
            part = ordered[start : start + RENEWED_AT_ONCE_MAX]
            renewed |= await self._database.renew(renew_sessions, part)
        return renewed

    async def _release_now(
        self, _session: SessionId, asks: Sequence[ReleaseGrant]
    ) -> Mapping[ReleaseGrant, KeylaneError]:
        """Release leases of one session in one transaction: a hand-over is often of many partitions."""
        released = await self._database.write(release_leases, asks)
        self._tell(released.changes)
        return released.refused

    async def _settle_now(self, group_id: int, _items: object) -> None:
        self._tell(await self._database.write(settle_group, group_id))

    async def _settle_first(self, group_id: int, _items: object) -> None:
        self._tell(await self._database.write_first(settle_group, group_id))

    async def _read_grants(self, session: SessionId) -> Grants:
        grants = await self._database.read(read_grants, session)
        if any(one.partition.address is None for one in grants.grants):
            self._forget(session)  # of a broker that is silent just now
            return grants
        if len(self._cached) >= GRANTS_CACHED_MAX:
            self._cached.clear()
        self._cached[session] = grants
        return grants

    def _tell(self, changes: Changes, *, why: str = "silent for its ttl") -> None:
        for session in changes.ended:
            log.info("session %s ended: %s", session, why)
            self._forget(session)
        self._wakeups.wake(changes.versions)
        self._wakeups.wake(changes.ended)

    def _forget(self, session: SessionId) -> None:
        self._cached.pop(session, None)


def _suspend_reply_was_lost(ask: Heartbeat, row: SessionRow) -> bool:
    """A Suspend came late, or its answer did not arrive: the session knows of what followed, and wants it otherwise."""
    return ask.suspended not in {None, row.suspended} and ask.known_version == row.grants_version
