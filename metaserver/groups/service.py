"""The consumers' calls: join, heartbeat as a long poll, release, leave. Shell around SQL.

    heartbeat ─▶ renewed at once, many in one statement ─▶ grants changed? ─▶ answer
                                                               │ no
                                                               └─▶ wait for a change,
                                                                   at most a third of the ttl

A change wakes only the heartbeats of the sessions that it concerns.

Heartbeats of one moment share one UPDATE (`SingleFlight`); the queue of writes puts it before
joins. The queue shares transactions between works, not statements. With a thousand sessions on
SQLite, a heartbeat takes 50 µs of processor time, against 700 µs with one UPDATE each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy.engine import Connection

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
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    SessionUnknownError,
    StorageError,
)
from ...protocol.groups import CreateGroup, GroupSettings, SetGroup, SuspendGroup
from ...protocol.ids import ConsumerGroup, SessionId, check_name
from ...protocol.limits import UNREACHED_MAX
from ...rpc.access.guard import CALLER
from ..cluster.heard import Announcement
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..wakeups import SingleFlight, Waiter, Wakeups
from .arrivals import Arrivals, longest_ms
from .group_rows import EARLIEST
from .lease_rows import (
    Changes,
    note_drained,
    note_unreached,
    read_grants,
    read_many_grants,
    release_leases,
    release_unheld,
    settle_group,
)
from .operators import group_settings, set_policy, suspend_members, switch_group
from .renewals import Renewals
from .sessions import (
    JoinAsk,
    SessionRow,
    check_session,
    join_together,
    leave_group,
    suspend_session,
)
from .turns import GroupWrites
from .views import grants_versions, group_versions, list_groups, read_group

log = logging.getLogger("keylane.metaserver")
DRAINED_MAX = 4_096
"""Most partitions in one list of a heartbeat."""
SETTLE_REST_MS_MAX = 250
"""Longest pause, in milliseconds, between two runs that settle a group: settling a group of a
thousand takes tens of milliseconds, and while many sessions join more of them share a run.
"""
JOINS_AT_ONCE_MAX = 200
JOIN_ALONE_MS_MAX = 2_000
"""Time, in milliseconds, after which a failure is blamed on the database, and not on one of the
joins that share a transaction.
"""
REPORT_MS_MAX = 500
"""Longest time, in milliseconds, for which a heartbeat waits until its reports are stored."""
GRANTS_CACHED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class _FirstGrants:
    """The grants of a session that joins, and the changes of settling its new group."""

    changes: Changes
    grants: Grants | None
    """Grants of that session; None: it has ended."""


Announce = Callable[
    [int, Sequence[Announcement], Callable[[Connection, bool], _FirstGrants]],
    Awaitable[_FirstGrants | None],
]
"""The signature of `Announcer.announce`."""


async def _announce_later(
    _group_id: int,
    _unheard: Sequence[Announcement],
    _finish: Callable[[Connection, bool], _FirstGrants],
) -> None:
    """Leave the group to the periodic announcements."""


async def _begin_nothing(_subject: str, _group: str, _ask: CreateGroup) -> None:
    """Make no group."""


@dataclass(slots=True)
class _WaitingHeartbeat:
    """A heartbeat that waits for a change."""

    row: SessionRow
    versions: Mapping[int, int]
    """Group id → version, read before `row` or compared with it."""

    def may_have_news(self, versions: Mapping[int, int]) -> bool:
        """Return whether its group may have changed, given these versions that were read after
        `row`.
        """
        known = self.versions.get(self.row.group_id)
        return known is None or known != versions.get(self.row.group_id)


class GroupService:
    """The sessions of consumer groups and their grants, over one database."""

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        announce: Announce = _announce_later,
        begin: Callable[[str, str, CreateGroup], Awaitable[None]] = _begin_nothing,
        rows_are_locked: bool = False,
    ) -> None:
        """
        Make the service.

        Args:
            announce: announces a new group to the brokers of its subject, and settles it with their
                answers.
            begin: makes a group that does not begin at the earliest message, unless it exists.
            rows_are_locked: True for a database that locks rows, where a transaction that waits for
                one keeps a connection meanwhile.
        """
        self._announce = announce
        self._begin = begin
        self._database = database
        self._settings = settings
        self._wakeups: Wakeups[SessionId] = Wakeups()
        self._settling: SingleFlight[int, None, None] = SingleFlight(
            self._settle_now, rest_ms_max=SETTLE_REST_MS_MAX
        )
        self._settling_first: SingleFlight[int, None, None] = SingleFlight(
            self._settle_first, rest_ms_max=SETTLE_REST_MS_MAX
        )
        """Settling for heartbeats, which do not wait behind joins: a late answer costs the
        session.
        """
        self._writes = GroupWrites(database, in_turns=rows_are_locked)
        self._renewals = Renewals(database)
        self._releasing: SingleFlight[
            Hashable, ReleaseGrant, Mapping[ReleaseGrant, KeylaneError]
        ] = SingleFlight(self._release_now)
        self._joining: SingleFlight[
            tuple[str, str], JoinAsk, Mapping[str, SessionRow | KeylaneError]
        ] = SingleFlight(self._join_now)
        self._releasing_unheld: SingleFlight[int, Heartbeat, None] = SingleFlight(
            self._release_unheld_now
        )
        self._reading: SingleFlight[int, SessionId, Mapping[SessionId, Grants]] = SingleFlight(
            self._read_grants_now
        )
        """Reads of grants by group, because a change often concerns many of its sessions."""
        self._arriving: dict[tuple[str, str], Arrivals] = {}
        """(subject, group) → sessions that are joining."""
        self._arrivals: dict[int, tuple[str, str]] = {}
        """Group id → key in `_arriving`."""
        self._reporting: set[asyncio.Task[None]] = set()
        self._cached: dict[SessionId, Grants] = {}
        self._waiting: dict[Waiter, _WaitingHeartbeat] = {}
        """Waiter → its heartbeat; not by session, because the older of two heartbeats of one
        session may end later.
        """
        self._group_versions: dict[int, int] = {}
        """Group id → version, as the last `check_for_changes` read them; a new object each time."""
        self._all_compared = True
        """True if every waiting heartbeat was compared with these versions, or read its row after
        them.
        """
        self._seen: tuple[int, ...] = ()
        """`seen` of the last `check_for_changes`."""

    async def join(self, ask: Join) -> Joined:
        """
        Begin a session, and allocate the group's partitions again before returning.

        The first session of a group creates it. When this returns, every broker that answers knows
        the group, and removes no message that the group has not read. Partitions of other brokers
        are granted once these know the group.

        Raises:
            SubjectUnknownError, SubjectDeletedError, InvalidRequestError,
            ConflictError, BusyError, GroupDeletedError, FencedError,
            OverloadedError, QuotaExceededError
            NotSentError: a broker does not answer where a new group is to begin; no group was made.
        """
        if ask.start is not None and ask.start != EARLIEST:
            making = CreateGroup(start=ask.start, strategy=ask.strategy)
            await self._begin(ask.subject, ask.group, making)
        row = await self._join(ask)
        self.end_sessions(row.replaced, why="a process with its instance name was started")
        settled = None
        if row.new_group:
            await self._gather(row.group_id)
            finish = partial(_settle_and_read, group_id=row.group_id, session=row.session)
            settled = await self._announce(row.group_id, row.unheard, finish)
        if settled is None:
            grants = await self._first_grants(row)
        else:
            self._notify(settled.changes)
            grants = settled.grants
            if grants is not None:
                self._keep(row.session, grants)
        longest = self._settings.heartbeat_ms_max
        return Joined(
            ttl_ms=row.ttl_ms,
            heartbeat_ms=min(longest, row.ttl_ms // 3),
            group_id=row.group_id,
            start=row.start,
            order_strategy=row.order_strategy,
            grants=grants,
        )

    def _limited_principal(self) -> str:
        """Return the principal whose quota counts the caller's consumers; "": a server, or no
        access control.
        """
        caller = CALLER.get()
        return "" if caller.is_server or not self._settings.is_guarded else caller.principal

    async def _join(self, ask: Join) -> SessionRow:
        name = (ask.subject, ask.group)
        arrivals = self._arriving.setdefault(name, Arrivals())
        arrivals.began()
        ttl_ms = None
        try:
            joined = await self._joining.run(name, JoinAsk(ask, self._limited_principal()))
            row = joined[ask.session]
            if isinstance(row, KeylaneError):
                raise row
            ttl_ms = row.ttl_ms
        finally:
            arrivals.ended(_now_ms(), ttl_ms=ttl_ms)
            if arrivals.is_over:
                self._arriving.pop(name, None)
        self._arrivals[row.group_id] = name
        return row

    async def _join_now(
        self, name: tuple[str, str], asks: Sequence[JoinAsk]
    ) -> Mapping[str, SessionRow | KeylaneError]:
        joined: dict[str, SessionRow | KeylaneError] = {}
        for at in range(0, len(asks), JOINS_AT_ONCE_MAX):
            some = asks[at : at + JOINS_AT_ONCE_MAX]
            joined |= await self._join_some(name, some)
        return joined

    async def _join_some(
        self, name: tuple[str, str], asks: Sequence[JoinAsk]
    ) -> Mapping[str, SessionRow | KeylaneError]:
        joining = partial(join_together, sessions_max=self._settings.sessions_max)
        asked_ms = _now_ms()
        try:
            return await self._writes.write(name, joining, asks)
        except StorageError as error:
            if len(asks) == 1 or _now_ms() - asked_ms >= JOIN_ALONE_MS_MAX:
                return {ask.join.session: error.copy(error.fate) for ask in asks}
        joined: dict[str, SessionRow | KeylaneError] = {}
        for ask in asks:  # one of them may be what the database refuses
            joined |= await self._join_some(name, [ask])
        return joined

    async def _first_grants(self, row: SessionRow) -> Grants | None:
        """
        Settle the group of a new session, and return the session's grants; None: it has ended, or
        settling takes too long.

        Nothing renews a session while its join waits, so that a slow join leaves the grants to its
        first heartbeat.
        """
        try:
            async with asyncio.timeout(2 * longest_ms(row.ttl_ms) / 1000):
                await self.settle(row.group_id)
                return await self._read_grants(row)
        except (SessionUnknownError, TimeoutError):
            return None

    def gathers(self, group_id: int) -> bool:
        """Return whether sessions of a group are joining here; the group is settled after them."""
        arrivals = self._arriving.get(self._arrivals.get(group_id, ("", "")))
        return arrivals is not None and arrivals.wait_ms(_now_ms()) > 0

    async def _gather(self, group_id: int) -> None:
        """Wait for the sessions of a group that are joining."""
        name = self._arrivals.get(group_id)
        arrivals = None if name is None else self._arriving.get(name)
        if name is None or arrivals is None:
            return
        while wait_ms := arrivals.wait_ms(_now_ms()):  # noqa: ASYNC110  more may come meanwhile
            await asyncio.sleep(wait_ms / 1000)
        arrivals.settled()
        if arrivals.is_over and self._arriving.get(name) is arrivals:
            del self._arriving[name]
            self._arrivals.pop(group_id, None)

    async def heartbeat(self, ask: Heartbeat) -> Grants:
        """
        Renew a session, then answer as soon as the version of its grants differs from
        `known_version`.

        Waits at most `wait_ms` and a third of the session's ttl.

        Raises:
            SessionUnknownError: the session has ended.
            InvalidRequestError: a list is too long.
        """
        session = _checked(ask)
        with self._wakeups.listen(session) as waiter:
            versions = self._group_versions  # read before the row
            row = await self._renew(session)
            self._begin_to_wait(waiter, row, versions)
            try:
                await self._take_in_time(ask, row)
                # A longer wait would make the next renewal late.
                wait_ms = min(ask.wait_ms, row.ttl_ms // 3)
                if row.grants_version == ask.known_version and wait_ms:
                    await waiter.wait(wait_ms)
                cached = self._still_granted(row, waiter)
                return await self._read_grants(row) if cached is None else cached
            finally:
                del self._waiting[waiter]

    def _begin_to_wait(self, waiter: Waiter, row: SessionRow, versions: Mapping[int, int]) -> None:
        """Register a waiting heartbeat; `versions` were read before its row."""
        self._waiting[waiter] = _WaitingHeartbeat(row, versions)
        if versions is not self._group_versions:
            self._all_compared = False

    def _still_granted(self, row: SessionRow, waiter: Waiter) -> Grants | None:
        """Return the cached grants of a session if nothing has changed since its row was read."""
        cached = self._cached.get(row.session)
        current = cached is not None and cached.version == row.grants_version and not waiter.woken
        return cached if current else None

    async def _take_in_time(self, ask: Heartbeat, row: SessionRow) -> None:
        """Call `_take_reports`, but leave a slow one to the background, because a late answer costs
        the session.
        """
        if not _reports(ask, row):
            return
        task = asyncio.create_task(self._take_reports(ask, row))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)
        done, _ = await asyncio.wait([task], timeout=min(REPORT_MS_MAX, row.ttl_ms // 10) / 1000)
        if done:
            task.result()
        else:
            task.add_done_callback(_look_at)

    async def _take_reports(self, ask: Heartbeat, row: SessionRow) -> None:
        """Store the reports of a heartbeat. Raises SessionUnknownError."""
        session = row.session
        if _is_of_another_group(ask, row):
            await self.leave(Leave(session=session))  # its partitions are free at once
            raise SessionUnknownError(session=session)
        if _suspend_reply_was_lost(ask, row):
            again = Suspend(session=session, suspended=bool(ask.suspended))
            await self._suspend(again, row.group_id, self._settling_first)
        if _reaches_others(ask, row):
            group_id = await self._writes.write_first(
                row.group_id, note_unreached, session, ask.unreached or ()
            )
            await self._settling_first.run(group_id, None)
        if ask.drained:
            drained_by = await self._writes.write_first(
                row.group_id, note_drained, session, ask.drained, ask.parked, ask.holding
            )
            if drained_by is not None:
                await self._settling_first.run(drained_by, None)
        if row.handing_over and ask.holding is not None:
            await self._releasing_unheld.run(row.group_id, ask)

    async def release(self, ask: ReleaseGrant) -> Done:
        """
        Release a lease after a hand-over, and grant it to its next owner at once.

        Raises:
            SessionUnknownError: the session has ended.
            TokenUnknownError: the session was never granted this token.
        """
        check_session(ask.session)
        group = await self._writes.group_of(ask.session)
        refused = (await self._releasing.run(group, ask)).get(ask)
        if refused is not None:
            raise refused
        return Done()

    async def suspend(self, ask: Suspend) -> Done:
        """Suspend or resume a session. Raises SessionUnknownError."""
        await self._suspend(ask, await self._writes.group_of(ask.session), self._settling)
        return Done()

    async def _suspend(
        self, ask: Suspend, group: Hashable, settling: SingleFlight[int, None, None]
    ) -> None:
        group_id = await self._writes.write_first(group, suspend_session, ask)
        await settling.run(group_id, None)
        self._wakeups.wake([SessionId(ask.session)])

    async def leave(self, ask: Leave) -> Done:
        """End a session; does nothing if it has ended."""
        group_id = await self._writes.write_of(ask.session, leave_group, ask.session)
        if group_id is not None:
            await self.settle(group_id)
            self._forget(SessionId(ask.session))
        return Done()

    async def group(self, subject: str, group: str) -> GroupView:
        """Return a group with the owner of each partition. Raises SubjectUnknownError,
        GroupUnknownError.
        """
        return await self._database.read(read_group, subject, ConsumerGroup(group))

    async def groups(self, subject: str) -> GroupList:
        """Return all groups of a subject. Raises SubjectUnknownError."""
        return await self._database.read(list_groups, subject)

    async def switch(self, subject: str, group: str, ask: SwitchGroup) -> GroupView:
        """
        Change the strategy of a group; its sessions end and have to join again.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        self._notify(
            await self._database.write(switch_group, subject, group, ask.strategy),
            why="its group was switched",
        )
        return await self.group(subject, group)

    async def settings(self, subject: str, group: str) -> GroupSettings:
        """Return the stored settings of a group. Raises SubjectUnknownError, GroupUnknownError."""
        return await self._database.read(group_settings, subject, group)

    async def set_policy(self, subject: str, group: str, ask: SetGroup) -> GroupSettings:
        """
        Change the stored failure policy of a group, and send it to the group's members at once.

        Raises:
            SubjectUnknownError, GroupUnknownError, InvalidRequestError
        """
        _, changes = await self._database.write(set_policy, subject, group, ask)
        self._notify(changes)
        return await self.settings(subject, group)

    async def suspend_members(self, subject: str, group: str, ask: SuspendGroup) -> GroupSettings:
        """
        Suspend or resume a group, or a client of it, for an operator.

        Raises:
            SubjectUnknownError, GroupUnknownError, InvalidRequestError, OverloadedError
        """
        group_id, changes = await self._database.write(suspend_members, subject, group, ask)
        await self.settle(group_id)
        self._notify(changes)
        return await self.settings(subject, group)

    async def settle(self, group_id: int) -> None:
        """Make a group's leases fit its sessions and partitions, as they are at this call or
        later.
        """
        await self._settling.run(group_id, None)

    async def check_for_changes(self, seen: tuple[int, ...] = ()) -> None:
        """
        Wake the heartbeats whose grants were changed by another metaserver.

        Args:
            seen: `DueWork.versions`, read before this call. If it is the same as in the previous
                call, no version has risen since. Heartbeats that began to wait while that call read
                the versions are compared now.

        Raises:
            StorageError
        """
        if seen and seen == self._seen and self._all_compared:
            return
        waiting = dict(self._waiting)
        ids = {heartbeat.row.group_id for heartbeat in waiting.values()}
        versions = await self._database.read(group_versions, ids) if ids else {}
        changed = {
            heartbeat.row.group_id
            for heartbeat in waiting.values()
            if heartbeat.may_have_news(versions)
        }
        if changed:
            grants = await self._database.read(grants_versions, changed)
            for waiter, heartbeat in waiting.items():
                row = heartbeat.row
                if row.group_id in changed and grants.get(row.session) != row.grants_version:
                    waiter.wake()
        for heartbeat in waiting.values():
            heartbeat.versions = versions
        self._group_versions = versions
        self._all_compared = waiting.keys() >= self._waiting.keys()
        self._seen = seen

    def end_sessions(self, ended: Collection[SessionId], *, why: str) -> None:
        """Answer the heartbeats of sessions that have ended in SQL."""
        self._notify(Changes(versions={}, ended=ended), why=why)

    def close(self) -> None:
        """Answer every heartbeat that waits."""
        self._wakeups.wake_all()

    async def _renew(self, session: SessionId) -> SessionRow:
        row = await self._renewals.one(session)
        if row is None:
            self._forget(session)
            raise SessionUnknownError(session=session)
        return row

    async def _release_now(
        self, group: Hashable, asks: Sequence[ReleaseGrant]
    ) -> Mapping[ReleaseGrant, KeylaneError]:
        released = await self._writes.write(group, release_leases, asks)
        self._notify(released.changes)
        return released.refused

    async def _settle_now(self, group_id: int, _items: object) -> None:
        await self._gather(group_id)
        self._notify(await self._writes.write(group_id, settle_group, group_id))

    async def _release_unheld_now(self, group_id: int, asks: Sequence[Heartbeat]) -> None:
        self._notify(await self._writes.write_first(group_id, release_unheld, asks))

    async def _settle_first(self, group_id: int, _items: object) -> None:
        self._notify(await self._writes.write_first(group_id, settle_group, group_id))

    async def _read_grants(self, row: SessionRow) -> Grants:
        """Read and cache the grants of a session. Raises SessionUnknownError."""
        grants = (await self._reading.run(row.group_id, row.session)).get(row.session)
        if grants is None:
            raise SessionUnknownError(session=row.session)
        self._keep(row.session, grants)
        return grants

    async def _read_grants_now(
        self, _group_id: int, ids: Sequence[SessionId]
    ) -> Mapping[SessionId, Grants]:
        return await self._database.read(read_many_grants, set(ids))

    def _keep(self, session: SessionId, grants: Grants) -> None:
        """Cache the grants of a session, for heartbeats that find its version unchanged."""
        if any(grant.partition.address is None for grant in grants.grants):
            self._forget(session)  # its broker is silent: the address comes without a new version
            return
        if len(self._cached) >= GRANTS_CACHED_MAX:
            self._cached.clear()
        self._cached[session] = grants

    def _notify(self, changes: Changes, *, why: str = "silent for its ttl") -> None:
        for session in changes.ended:
            log.info("session %s ended: %s", session, why)
            self._forget(session)
        self._wakeups.wake(changes.versions)
        self._wakeups.wake(changes.ended)

    def _forget(self, session: SessionId) -> None:
        self._cached.pop(session, None)


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, for which nobody waits: the next heartbeat sends the same
    report.
    """
    if not task.cancelled():
        task.exception()


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


def _settle_and_read(
    connection: Connection, anew: bool, *, group_id: int, session: SessionId
) -> _FirstGrants:
    changes = settle_group(connection, group_id, anew=anew)
    try:
        return _FirstGrants(changes, read_grants(connection, session))
    except SessionUnknownError:
        return _FirstGrants(changes, None)


def _checked(ask: Heartbeat) -> SessionId:
    """Check a heartbeat. Raises SessionUnknownError, InvalidRequestError."""
    check_session(ask.session)
    if max(len(ask.drained), len(ask.parked), len(ask.holding or ())) > DRAINED_MAX:
        raise InvalidRequestError(f"at most {DRAINED_MAX} partitions at once")
    if len(ask.unreached or ()) > UNREACHED_MAX:
        raise InvalidRequestError(f"at most {UNREACHED_MAX} broker groups at once")
    for name in ask.unreached or ():
        check_name("broker group", name)
    return SessionId(ask.session)


def _reports(ask: Heartbeat, row: SessionRow) -> bool:
    """Return whether a heartbeat may report more than that its session is alive."""
    handed_over = row.handing_over and ask.holding is not None
    other = _is_of_another_group(ask, row)
    lost = _suspend_reply_was_lost(ask, row)
    return bool(ask.drained) or handed_over or other or lost or _reaches_others(ask, row)


def _reaches_others(ask: Heartbeat, row: SessionRow) -> bool:
    """Return whether the unreached brokers of the session differ from the stored ones."""
    return ask.unreached is not None and set(ask.unreached) != set(row.unreached)


def _is_of_another_group(ask: Heartbeat, row: SessionRow) -> bool:
    """Return whether a late join began the session again after its group or subject was deleted and
    created again.
    """
    return ask.group_id not in {0, row.group_id}


def _suspend_reply_was_lost(ask: Heartbeat, row: SessionRow) -> bool:
    """Return whether the session knows its latest grants and still asks for another state, because
    a Suspend was late or lost.
    """
    return ask.suspended not in {None, row.suspended} and ask.known_version == row.grants_version
