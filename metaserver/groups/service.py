"""Serves the calls of consumers: join, heartbeat (a long poll), release and leave. Does network I/O
and runs SQL.

    heartbeat ─▶ renewed immediately, many in one statement ─▶ grants changed? ─▶ reply
                                                                   │ no
                                                                   └─▶ wait for a change,
                                                                       at most a third of the ttl

A change wakes only the heartbeats of affected sessions.

Concurrent heartbeats share one UPDATE (`SingleFlight`), which the write queue runs before joins;
the queue itself shares only transactions, not statements. With a thousand sessions on SQLite, a
heartbeat takes 50 µs of CPU time, compared to 700 µs with one UPDATE each.
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
from ...protocol.ids import SessionId, check_name
from ...protocol.limits import UNREACHED_MAX
from ...rpc.access.guard import CALLER
from ..cluster.announcements import Announcement
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..wakeups import SingleFlight, Waiter, Wakeups
from .arrivals import JoinWindow, join_window_ms_max
from .group_rows import EARLIEST
from .keyed_queue import GroupWrites
from .lease_rows import (
    Changes,
    read_grants,
    read_many_grants,
    release_leases,
    release_unreported,
    settle_group,
    store_drained,
    store_unreached,
)
from .operators import group_settings, set_policy, suspend_members, switch_group
from .renewals import SessionRenewer
from .sessions import (
    PendingJoin,
    SessionRow,
    check_session,
    join_batch,
    leave_group,
    suspend_session,
)
from .views import grants_versions, group_versions, read_group

log = logging.getLogger("keylane.metaserver")
DRAINED_MAX = 4_096
"""Maximum number of partitions in each list of a heartbeat."""
SETTLE_PAUSE_MS_MAX = 250
"""Maximum pause, in milliseconds, between two runs that settle a group. Settling a group of a
thousand sessions takes tens of milliseconds; with a pause, more concurrent joins share a run.
"""
JOIN_CHUNK_MAX = 200
JOIN_RETRY_MS_MAX = 2_000
"""Time, in milliseconds, after which the database is blamed for a failed transaction, and its joins
are not retried one by one.
"""
REPORT_MS_MAX = 500
"""Maximum time, in milliseconds, that a heartbeat waits for its reports to be stored."""
GRANTS_CACHED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class _FirstGrants:
    """The first grants of a joining session, and the changes caused by settling its new group."""

    changes: Changes
    grants: Grants | None
    """The grants; None if the session has already ended."""


EXPIRED = "silent for its ttl"
"""The reason why a session ended that has sent no heartbeats."""

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
    """Announce nothing now; the group will be included in the periodic announcements."""


async def _create_nothing(_subject: str, _group: str, _request: CreateGroup) -> None:
    """Do nothing. This is the default for services without group starts."""


@dataclass(slots=True)
class _WaitingHeartbeat:
    """A heartbeat that is waiting for a change of its session's grants."""

    row: SessionRow
    versions: Mapping[int, int]
    """Maps each group id to a version that is no newer than `row` or has already been compared with
    it.
    """

    def may_have_changed(self, versions: Mapping[int, int]) -> bool:
        """Return True if its group may have changed, given newer group versions."""
        version = self.versions.get(self.row.group_id)
        return version is None or version != versions.get(self.row.group_id)


@dataclass(slots=True)
class GroupCounts:
    """What this metaserver has done to groups since its start."""

    expired_sessions: int = 0
    lost_leases: int = 0
    """The number of leases that ended with their sessions, without a release."""
    hand_overs: int = 0
    """The number of partitions that were granted after another session had held them."""


class GroupService:
    """Manages the sessions of consumer groups and their grants in one database."""

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        announce: Announce = _announce_later,
        create_group: Callable[[str, str, CreateGroup], Awaitable[None]] = _create_nothing,
        rows_are_locked: bool = False,
    ) -> None:
        """
        Create the service.

        Args:
            announce: announces a new group to the brokers of its subject, then settles it.
            create_group: creates a group that does not start at the earliest message, if it does
                not exist yet.
            rows_are_locked: True if the database locks rows, so that a transaction waiting for a
                row occupies a connection.
        """
        self._announce = announce
        self._create_group = create_group
        self._database = database
        self._settings = settings
        self.counts = GroupCounts()
        self._wakeups: Wakeups[SessionId] = Wakeups()
        self._settle_flight: SingleFlight[int, None, None] = SingleFlight(
            self._settle_now, pause_ms_max=SETTLE_PAUSE_MS_MAX
        )
        self._priority_settle_flight: SingleFlight[int, None, None] = SingleFlight(
            self._settle_with_priority, pause_ms_max=SETTLE_PAUSE_MS_MAX
        )
        """Settles groups for heartbeats, which must not wait behind joins: a late reply would cost
        the session.
        """
        self._writes = GroupWrites(database, serialize=rows_are_locked)
        self._renewer = SessionRenewer(database)
        self._release_flight: SingleFlight[
            Hashable, ReleaseGrant, Mapping[ReleaseGrant, KeylaneError]
        ] = SingleFlight(self._release_now)
        self._join_flight: SingleFlight[
            tuple[str, str], PendingJoin, Mapping[str, SessionRow | KeylaneError]
        ] = SingleFlight(self._join_in_chunks)
        self._unheld_release_flight: SingleFlight[int, Heartbeat, None] = SingleFlight(
            self._release_unheld_now
        )
        self._grants_flight: SingleFlight[int, SessionId, Mapping[SessionId, Grants]] = (
            SingleFlight(self._read_grants_now)
        )
        """Reads grants by group, because a change often affects many sessions of a group."""
        self._join_windows: dict[tuple[str, str], JoinWindow] = {}
        """Maps each (subject, group) to the window in which concurrent joins are gathered."""
        self._window_keys: dict[int, tuple[str, str]] = {}
        """Maps each group id to its key in `_join_windows`."""
        self._report_tasks: set[asyncio.Task[None]] = set()
        self._grants_cache: dict[SessionId, Grants] = {}
        self._waiting: dict[Waiter, _WaitingHeartbeat] = {}
        """Keyed by waiter rather than by session, because the older of two heartbeats of a session
        may end last.
        """
        self._group_versions: dict[int, int] = {}
        """Maps each group id to its version, as read by the last `check_for_changes`; a new object
        each time.
        """
        self._all_compared = True
        """True if every waiting heartbeat has been compared with these versions, or read its row
        after they were read.
        """
        self._last_fingerprint: tuple[int, ...] = ()
        """The fingerprint of the last `check_for_changes`."""

    async def join(self, request: Join) -> Joined:
        """
        Begin a session, and reallocate the group's partitions before returning.

        The first session of a group creates the group. When this returns, every available broker
        knows the group and retains all messages that it has not read. Partitions on other brokers
        are granted once those brokers know the group.

        Raises:
            SubjectUnknownError, SubjectDeletedError, InvalidRequestError,
            ConflictError, BusyError, GroupDeletedError, FencedError,
            OverloadedError, QuotaExceededError
            NotSentError: a broker could not be asked where a new group must start; the group was
                not created.
        """
        if request.start is not None and request.start != EARLIEST:
            creation = CreateGroup(start=request.start, strategy=request.strategy)
            await self._create_group(request.subject, request.group, creation)
        row = await self._join(request)
        self.end_sessions(
            row.replaced_sessions, why="another process with its instance name was started"
        )
        first_grants = None
        if row.new_group:
            await self._wait_for_joins(row.group_id)
            settle = partial(_settle_and_read, group_id=row.group_id, session=row.session)
            first_grants = await self._announce(row.group_id, row.pending_announcements, settle)
        if first_grants is None:
            grants = await self._read_first_grants(row)
        else:
            self._wake_heartbeats(first_grants.changes)
            grants = first_grants.grants
            if grants is not None:
                self._cache_grants(row.session, grants)
        heartbeat_ms_max = self._settings.heartbeat_ms_max
        return Joined(
            ttl_ms=row.ttl_ms,
            heartbeat_ms=min(heartbeat_ms_max, row.ttl_ms // 3),
            group_id=row.group_id,
            start=row.start,
            order_strategy=row.order_strategy,
            cluster_id=row.cluster_id,
            grants=grants,
        )

    def _quota_principal(self) -> str:
        """Return the principal whose quota limits the caller's consumers. Return "" for a server,
        and without access control.
        """
        caller = CALLER.get()
        return "" if caller.is_server or not self._settings.is_guarded else caller.principal

    async def _join(self, request: Join) -> SessionRow:
        """Store a session, in a batch with concurrent joins of the same group."""
        key = (request.subject, request.group)
        window = self._join_windows.setdefault(key, JoinWindow())
        window.begin_join()
        ttl_ms = None
        try:
            results = await self._join_flight.run(
                key, PendingJoin(request, self._quota_principal())
            )
            row = results[request.session]
            if isinstance(row, KeylaneError):
                raise row
            ttl_ms = row.ttl_ms
        finally:
            window.end_join(_now_ms(), ttl_ms=ttl_ms)
            if window.is_idle:
                self._join_windows.pop(key, None)
        self._window_keys[row.group_id] = key
        return row

    async def _join_in_chunks(
        self, name: tuple[str, str], joins: Sequence[PendingJoin]
    ) -> Mapping[str, SessionRow | KeylaneError]:
        """Store joins of one group in transactions of at most JOIN_CHUNK_MAX joins."""
        results: dict[str, SessionRow | KeylaneError] = {}
        for start in range(0, len(joins), JOIN_CHUNK_MAX):
            chunk = joins[start : start + JOIN_CHUNK_MAX]
            results |= await self._join_chunk(name, chunk)
        return results

    async def _join_chunk(
        self, name: tuple[str, str], joins: Sequence[PendingJoin]
    ) -> Mapping[str, SessionRow | KeylaneError]:
        """Store sessions in one transaction. If it fails quickly, retry each join separately."""
        run_joins = partial(join_batch, sessions_max=self._settings.sessions_max)
        start_ms = _now_ms()
        try:
            return await self._writes.write(name, run_joins, joins)
        except StorageError as error:
            if len(joins) == 1 or _now_ms() - start_ms >= JOIN_RETRY_MS_MAX:
                return {join.join.session: error.copy(error.fate) for join in joins}
        results: dict[str, SessionRow | KeylaneError] = {}
        for join in joins:  # the database may have rejected only one of them
            results |= await self._join_chunk(name, [join])
        return results

    async def _read_first_grants(self, row: SessionRow) -> Grants | None:
        """
        Settle the group of a new session and return the session's grants. Return None if it has
        ended or settling takes too long.

        A session is not renewed while its join is waiting, so after a timeout it gets the grants
        with its first heartbeat.
        """
        try:
            async with asyncio.timeout(2 * join_window_ms_max(row.ttl_ms) / 1000):
                await self.settle(row.group_id)
                return await self._read_grants(row)
        except (SessionUnknownError, TimeoutError):
            return None

    def is_gathering_joins(self, group_id: int) -> bool:
        """Return True if the group will be settled soon anyway, after its joins in flight."""
        window = self._join_windows.get(self._window_keys.get(group_id, ("", "")))
        return window is not None and window.wait_ms(_now_ms()) > 0

    async def _wait_for_joins(self, group_id: int) -> None:
        """Wait until all of the group's joins in flight are done or its join window ends."""
        key = self._window_keys.get(group_id)
        window = None if key is None else self._join_windows.get(key)
        if key is None or window is None:
            return
        while wait_ms := window.wait_ms(_now_ms()):  # noqa: ASYNC110  more may come meanwhile
            await asyncio.sleep(wait_ms / 1000)
        window.begin_settling()
        if window.is_idle and self._join_windows.get(key) is window:
            del self._join_windows[key]
            self._window_keys.pop(group_id, None)

    async def heartbeat(self, request: Heartbeat) -> Grants:
        """
        Renew a session, and reply as soon as the version of its grants differs from
        `known_version`.

        Waits for at most `wait_ms`, and at most a third of the session's ttl.

        Raises:
            SessionUnknownError: the session has ended.
            InvalidRequestError: a list is too long, or a name is invalid.
        """
        session = _check_heartbeat(request)
        with self._wakeups.listen(session) as waiter:
            versions = self._group_versions  # read before the row
            row = await self._renew(session)
            self._register_waiting(waiter, row, versions)
            try:
                await self._store_reports_in_time(request, row)
                # A longer wait would delay the next renewal too much.
                wait_ms = min(request.wait_ms, row.ttl_ms // 3)
                if row.grants_version == request.known_version and wait_ms:
                    await waiter.wait(wait_ms)
                cached = self._get_cached(row, waiter)
                return await self._read_grants(row) if cached is None else cached
            finally:
                del self._waiting[waiter]

    def _register_waiting(
        self, waiter: Waiter, row: SessionRow, versions: Mapping[int, int]
    ) -> None:
        """Register a waiting heartbeat. `versions` must have been read before its row."""
        self._waiting[waiter] = _WaitingHeartbeat(row, versions)
        if versions is not self._group_versions:
            self._all_compared = False

    def _get_cached(self, row: SessionRow, waiter: Waiter) -> Grants | None:
        """Return a session's cached grants if they have not changed since its row was read;
        otherwise None.
        """
        cached = self._grants_cache.get(row.session)
        is_current = (
            cached is not None and cached.version == row.grants_version and not waiter.woken
        )
        return cached if is_current else None

    async def _store_reports_in_time(self, request: Heartbeat, row: SessionRow) -> None:
        """Store the reports of a heartbeat. If this takes long, it continues in the background,
        because a late reply would cost the session.
        """
        if not _has_reports(request, row):
            return
        task = asyncio.create_task(self._store_reports(request, row))
        self._report_tasks.add(task)
        task.add_done_callback(self._report_tasks.discard)
        finished, _ = await asyncio.wait(
            [task], timeout=min(REPORT_MS_MAX, row.ttl_ms // 10) / 1000
        )
        if finished:
            task.result()
        else:
            task.add_done_callback(_retrieve_error)

    async def _store_reports(self, request: Heartbeat, row: SessionRow) -> None:
        """Store the reports of a heartbeat. Raises SessionUnknownError."""
        session = row.session
        if _joined_another_group(request, row):
            await self.leave(Leave(session=session))  # frees its partitions immediately
            raise SessionUnknownError(session=session)
        if _suspend_reply_was_lost(request, row):
            suspend_request = Suspend(session=session, suspended=bool(request.suspended))
            await self._suspend(suspend_request, row.group_id, self._priority_settle_flight)
        if _unreached_changed(request, row):
            group_id = await self._writes.write_urgent(
                row.group_id, store_unreached, session, request.unreached or ()
            )
            await self._priority_settle_flight.run(group_id, None)
        if request.drained:
            drained_group_id = await self._writes.write_urgent(
                row.group_id,
                store_drained,
                session,
                request.drained,
                request.parked,
                request.holding,
            )
            if drained_group_id is not None:
                await self._priority_settle_flight.run(drained_group_id, None)
        if row.handing_over and request.holding is not None:
            await self._unheld_release_flight.run(row.group_id, request)

    async def release(self, request: ReleaseGrant) -> Done:
        """
        Release a lease after a hand-over and immediately grant it to its next owner.

        Raises:
            SessionUnknownError: the session has ended.
            TokenUnknownError: the session was never granted this token.
        """
        check_session(request.session)
        queue_key = await self._writes.find_group_id(request.session)
        error = (await self._release_flight.run(queue_key, request)).get(request)
        if error is not None:
            raise error
        return Done()

    async def suspend(self, request: Suspend) -> Done:
        """Suspend or resume a session. Raises SessionUnknownError."""
        await self._suspend(
            request, await self._writes.find_group_id(request.session), self._settle_flight
        )
        return Done()

    async def _suspend(
        self, request: Suspend, group: Hashable, settling: SingleFlight[int, None, None]
    ) -> None:
        """Store a suspension, settle the group with `settling`, and wake the session."""
        group_id = await self._writes.write_urgent(group, suspend_session, request)
        await settling.run(group_id, None)
        self._wakeups.wake([SessionId(request.session)])

    async def leave(self, request: Leave) -> Done:
        """End a session. Does nothing if it has already ended."""
        queue_key = await self._writes.find_group_id(request.session)
        group_id = await self._writes.write(queue_key, leave_group, request.session)
        if group_id is not None:
            await self.settle(group_id)
            self._evict_grants(SessionId(request.session))
        return Done()

    async def switch_strategy(self, subject: str, group: str, request: SwitchGroup) -> GroupView:
        """
        Change the strategy of a group. This ends its sessions, which must join again.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        self._wake_heartbeats(
            await self._database.write(switch_group, subject, group, request.strategy),
            why="the strategy of its group was changed",
        )
        return await self._database.read(read_group, subject, group)

    async def set_policy(self, subject: str, group: str, request: SetGroup) -> GroupSettings:
        """
        Change the stored failure policy of a group and send it to the group's members immediately.

        Raises:
            SubjectUnknownError, GroupUnknownError, InvalidRequestError
        """
        _, changes = await self._database.write(set_policy, subject, group, request)
        self._wake_heartbeats(changes)
        return await self._database.read(group_settings, subject, group)

    async def suspend_members(
        self, subject: str, group: str, request: SuspendGroup
    ) -> GroupSettings:
        """
        Suspend or resume a group, or one of its clients, on behalf of an operator.

        Raises:
            SubjectUnknownError, GroupUnknownError, InvalidRequestError, OverloadedError
        """
        group_id, changes = await self._database.write(suspend_members, subject, group, request)
        await self.settle(group_id)
        self._wake_heartbeats(changes)
        return await self._database.read(group_settings, subject, group)

    async def settle(self, group_id: int) -> None:
        """Adjust a group's leases to its sessions and partitions. Concurrent calls share a run that
        starts after them.
        """
        await self._settle_flight.run(group_id, None)

    async def check_for_changes(self, fingerprint: tuple[int, ...] = ()) -> None:
        """
        Wake the heartbeats whose grants have been changed by another metaserver.

        Args:
            fingerprint: `DueWork.versions`, read before this call. If it equals that of the
                previous call, no group has changed since, and only heartbeats that the previous
                call missed are compared.

        Raises:
            StorageError
        """
        if fingerprint and fingerprint == self._last_fingerprint and self._all_compared:
            return
        waiting_heartbeats = dict(self._waiting)
        ids = {heartbeat.row.group_id for heartbeat in waiting_heartbeats.values()}
        versions = await self._database.read(group_versions, ids) if ids else {}
        changed_groups = {
            heartbeat.row.group_id
            for heartbeat in waiting_heartbeats.values()
            if heartbeat.may_have_changed(versions)
        }
        if changed_groups:
            grants_versions_by_session = await self._database.read(grants_versions, changed_groups)
            for waiter, heartbeat in waiting_heartbeats.items():
                row = heartbeat.row
                if (
                    row.group_id in changed_groups
                    and grants_versions_by_session.get(row.session) != row.grants_version
                ):
                    waiter.wake()
        for heartbeat in waiting_heartbeats.values():
            heartbeat.versions = versions
        self._group_versions = versions
        self._all_compared = waiting_heartbeats.keys() >= self._waiting.keys()
        self._last_fingerprint = fingerprint

    def end_sessions(self, ended: Collection[SessionId], *, why: str) -> None:
        """Reply to the heartbeats of sessions that were ended in the database, and log the
        reason.
        """
        self._wake_heartbeats(Changes(versions={}, ended_sessions=ended), why=why)

    def close(self) -> None:
        """Reply to all waiting heartbeats."""
        self._wakeups.wake_all()

    async def _renew(self, session: SessionId) -> SessionRow:
        """Renew a session and return its row. Raises SessionUnknownError."""
        row = await self._renewer.renew(session)
        if row is None:
            self._evict_grants(session)
            raise SessionUnknownError(session=session)
        return row

    async def _release_now(
        self, group: Hashable, requests: Sequence[ReleaseGrant]
    ) -> Mapping[ReleaseGrant, KeylaneError]:
        """Release a batch of leases. Return the error of each refused release."""
        outcome = await self._writes.write(group, release_leases, requests)
        self._wake_heartbeats(outcome.changes)
        return outcome.errors

    async def _settle_now(self, group_id: int, _items: object) -> None:
        """Settle a group after its joins in flight, on behalf of all calls that share the run."""
        await self._wait_for_joins(group_id)
        self._wake_heartbeats(await self._writes.write(group_id, settle_group, group_id))

    async def _release_unheld_now(self, group_id: int, heartbeats: Sequence[Heartbeat]) -> None:
        """Release the withdrawn leases that a batch of heartbeats does not report as held."""
        self._wake_heartbeats(
            await self._writes.write_urgent(group_id, release_unreported, heartbeats)
        )

    async def _settle_with_priority(self, group_id: int, _items: object) -> None:
        """Settle a group for heartbeats, without waiting for joins."""
        self._wake_heartbeats(await self._writes.write_urgent(group_id, settle_group, group_id))

    async def _read_grants(self, row: SessionRow) -> Grants:
        """Read and cache the grants of a session. Raises SessionUnknownError."""
        grants = (await self._grants_flight.run(row.group_id, row.session)).get(row.session)
        if grants is None:
            raise SessionUnknownError(session=row.session)
        self._cache_grants(row.session, grants)
        return grants

    async def _read_grants_now(
        self, _group_id: int, ids: Sequence[SessionId]
    ) -> Mapping[SessionId, Grants]:
        """Read the grants of all sessions that share the run."""
        return await self._database.read(read_many_grants, set(ids))

    def _cache_grants(self, session: SessionId, grants: Grants) -> None:
        """Cache a session's grants for heartbeats that find its version unchanged."""
        if any(grant.partition.address is None for grant in grants.grants):
            self._evict_grants(
                session
            )  # the address of a silent broker becomes known later, without a new version
            return
        if len(self._grants_cache) >= GRANTS_CACHED_MAX:
            self._grants_cache.clear()
        self._grants_cache[session] = grants

    def _wake_heartbeats(self, changes: Changes, *, why: str = EXPIRED) -> None:
        """Wake the heartbeats of sessions that have ended or have new grants."""
        counts = self.counts
        counts.lost_leases += changes.lost_leases
        counts.hand_overs += changes.hand_overs
        if why == EXPIRED:
            counts.expired_sessions += len(changes.ended_sessions)
        if changes.rebalance:
            log.info("%s", changes.rebalance)
        for session in changes.ended_sessions:
            log.info("session %s ended: %s", session, why)
            self._evict_grants(session)
        self._wakeups.wake(changes.versions)
        self._wakeups.wake(changes.ended_sessions)

    def _evict_grants(self, session: SessionId) -> None:
        """Remove a session's grants from the cache."""
        self._grants_cache.pop(session, None)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a task that nobody awaits. The next heartbeat repeats the report."""
    if not task.cancelled():
        task.exception()


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


def _settle_and_read(
    connection: Connection, force: bool, *, group_id: int, session: SessionId
) -> _FirstGrants:
    """Settle a group and read the grants of a session in the same transaction."""
    changes = settle_group(connection, group_id, force=force)
    try:
        return _FirstGrants(changes, read_grants(connection, session))
    except SessionUnknownError:
        return _FirstGrants(changes, None)


def _check_heartbeat(request: Heartbeat) -> SessionId:
    """Validate a heartbeat. Raises SessionUnknownError or InvalidRequestError."""
    check_session(request.session)
    if max(len(request.drained), len(request.parked), len(request.holding or ())) > DRAINED_MAX:
        raise InvalidRequestError(f"at most {DRAINED_MAX} partitions at once")
    if len(request.unreached or ()) > UNREACHED_MAX:
        raise InvalidRequestError(f"at most {UNREACHED_MAX} broker groups at once")
    for name in request.unreached or ():
        check_name("broker group", name)
    return SessionId(request.session)


def _has_reports(request: Heartbeat, row: SessionRow) -> bool:
    """Return True if there is anything to store for a heartbeat besides the renewal."""
    may_have_released = row.handing_over and request.holding is not None
    joined_elsewhere = _joined_another_group(request, row)
    suspend_lost = _suspend_reply_was_lost(request, row)
    return (
        bool(request.drained)
        or may_have_released
        or joined_elsewhere
        or suspend_lost
        or _unreached_changed(request, row)
    )


def _unreached_changed(request: Heartbeat, row: SessionRow) -> bool:
    """Return True if the unreachable brokers that the session reports differ from those stored."""
    return request.unreached is not None and set(request.unreached) != set(row.unreached)


def _joined_another_group(request: Heartbeat, row: SessionRow) -> bool:
    """Return True if a late join has restarted the session in a group that was deleted and
    recreated in the meantime.
    """
    return request.group_id not in {0, row.group_id}


def _suspend_reply_was_lost(request: Heartbeat, row: SessionRow) -> bool:
    """Return True if the session has its latest grants but reports a different suspension state
    than the one stored, because its Suspend was late or lost.
    """
    return (
        request.suspended not in {None, row.suspended}
        and request.known_version == row.grants_version
    )
