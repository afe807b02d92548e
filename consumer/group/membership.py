"""A consumer's session with the metaserver: join, heartbeat by long poll, deadline, leave.

Invariants
    The deadline is the boot time at which the heartbeat is sent, plus the ttl, minus a margin, so
    the lease ends here before it ends at the metaserver. A late reply shortens the remaining time
    and never extends it. Only one heartbeat is in flight at a time, so replies cannot overtake each
    other. A version below the last one means that the database lost its last commits. The grants
    are accepted only when the lower version arrives a second time, after a pause; in the meantime,
    tokens and fences keep partitions safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.backoff import Pauses
from ...protocol.clock import Clock
from ...protocol.control import Grants, GroupView, Heartbeat, Join, Leave, ReleaseGrant, Suspend
from ...protocol.errors import (
    AccessDeniedError,
    InvalidRequestError,
    KeylaneError,
    Reason,
    RetryRule,
    SessionUnknownError,
    StorageError,
    UnauthenticatedError,
    UnreachableError,
)
from ...protocol.groups import FailurePolicy, GroupStart
from ...protocol.http.endpoint import Endpoint
from ...protocol.log_filter import LogFilter
from ...protocol.operations import SubjectHistory
from ...protocol.routing import ConsumeStrategy, OrderStrategy, Partition
from ...rpc.client import MetaClient
from ...rpc.environment import DrawBits
from ...rpc.race import start_task
from ..log_names import consumer_name, partition_name
from ..settings import ConsumerSettings
from .heartbeats import HeartbeatTimeouts

log = logging.getLogger("keylane.consumer")
_REFUSALS = (Reason.TOKEN_INVALID, Reason.SESSION_QUOTA)
"""The reasons, besides access errors, for which a consumer counts as refused."""
_REFUSED = "refused"
"""The key of refusals in the membership's `LogFilter`."""
_LOST = "lost"
"""The key of lost sessions in that `LogFilter`."""
LEAVE_TIMEOUT_MS = 500
"""How long, in milliseconds, a call by a closing consumer waits for each metaserver, once none of
them has replied to an earlier call.
"""
ABANDON_TIMEOUT_S = 1.0
"""The longest time, in seconds, for which a cancelled opening tries to leave the group."""
CONCURRENT_REPORTS_MAX = 32
"""The maximum number of concurrent reports: each needs a connection, and a consumer may hand over a
thousand partitions at once.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """
    Names a consumer.

    Attributes:
        group: "" for a broadcast consumer.
        client: its display name, by which operators know it.
    """

    subject: str
    group: str
    client: str

    @property
    def name(self) -> str:
        """The name of the consumer, for log lines."""
        return consumer_name(self.subject, self.group)


class GrantHolder(Protocol):
    """The interface of a consumer to its membership: it accepts grants, and supplies the contents
    of heartbeats.
    """

    def apply_grants(self, grants: Grants, deadline_ms: int) -> None:
        """Replace the grants; all leases end at `deadline_ms` on the boot clock."""
        ...

    def on_session_lost(self) -> None:
        """Drop all grants: the metaserver no longer knows the session."""
        ...

    def drained(self) -> tuple[int, ...]:
        """Return the ids of sealed partitions that the group has acked to the end."""
        ...

    def parked(self) -> tuple[int, ...]:
        """Return the ids of the drained partitions that have parked messages of the group."""
        ...

    def holding(self, session: str) -> tuple[tuple[int, int], ...]:
        """Return (partition id, token) for each partition that `session` holds, or is handing
        over.
        """
        ...

    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups that the consumer cannot connect to."""
        ...

    def fail(self, error: BaseException) -> None:
        """Close the consumer because of a fatal `error`."""
        ...


class LongPoll:
    """The wait of a heartbeat for a change of the grants, which `nudge` ends."""

    def __init__(self) -> None:
        self.version = -1
        """The version of the last accepted grants; -1 if the next heartbeat asks for all."""
        self._is_nudged = False
        """True if the next heartbeat must not be a long poll, because it carries a report or the
        lease may end soon.
        """
        self._timeout: asyncio.Timeout | None = None
        self._until_s = 0.0
        """The time of the event loop's clock, in seconds, until which the metaserver may delay its
        reply.
        """

    def nudge(self) -> None:
        """Send the next heartbeat at once, and end a wait that is in progress. It is interrupted
        only while the metaserver may be waiting for a change; after that, the reply is due.
        """
        self._is_nudged = True
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            now_s = asyncio.get_running_loop().time()
            if now_s < self._until_s:
                timeout.reschedule(now_s)

    def take_is_immediate(self) -> bool:
        """Return True if the heartbeat that is sent now is no long poll."""
        is_nudged, self._is_nudged = self._is_nudged, False
        return is_nudged or self.version < 0

    def begin(self, timeout: asyncio.Timeout, wait_ms: int) -> None:
        """Begin a wait of up to `wait_ms`; `nudge` makes `timeout` expire."""
        self._until_s = asyncio.get_running_loop().time() + wait_ms / 1000
        self._timeout = timeout

    def end(self) -> None:
        """End the wait: the reply has arrived."""
        self._timeout = None


class Releases:
    """Calls the metaserver about leases that end. A metaserver that hangs costs a closing consumer
    one full timeout in total, not one per call.
    """

    def __init__(
        self, member: Member, meta: MetaClient, clock: Clock, *, call_timeout_ms: int
    ) -> None:
        self._member = member
        self._meta = meta
        self._clock = clock
        self._call_timeout_ms = call_timeout_ms
        self._slots = asyncio.Semaphore(CONCURRENT_REPORTS_MAX)
        self._failure_log = LogFilter()
        """Limits the lines about reports that failed, by partition."""
        self.is_leaving = False
        self._is_unanswered = False
        """True if the consumer is leaving and no metaserver replied to its last call."""

    @property
    def _timeout_ms(self) -> int:
        """The timeout of a call for each metaserver, in milliseconds."""
        return LEAVE_TIMEOUT_MS if self._is_unanswered else self._call_timeout_ms

    async def call(self, endpoint: Endpoint[Any], body: Any) -> None:
        """Call a metaserver, and record whether any replies. Raises KeylaneError."""
        try:
            await self._meta.call(endpoint, body, timeout_ms=self._timeout_ms)
        except KeylaneError as error:
            self._is_unanswered = self.is_leaving and isinstance(error, UnreachableError)
            raise
        self._is_unanswered = False

    async def report(self, session: str, partition_id: int, token: int, *, fence: int = 0) -> None:
        """Report that a partition is released. If this fails, the next heartbeat reports it
        instead.
        """
        body = ReleaseGrant(session=session, partition_id=partition_id, token=token, fence=fence)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._slots.acquire()
            try:
                await self.call(endpoints.RELEASE, body)
            finally:
                self._slots.release()
        except SessionUnknownError:
            pass  # its leases have ended, which is already logged
        except (TimeoutError, KeylaneError) as error:
            line = self._failure_log.count_failure(
                "cannot report the release", self._clock.boot_ms(), partition_id
            )
            if line:
                name = partition_name(self._member.subject, partition_id, self._member.group)
                cause = getattr(error, "message", "too many reports are waiting")
                log.info("%s: %s: %s", name, line, cause)
        else:
            self._failure_log.end_failures(self._clock.boot_ms(), partition_id)


class HeartbeatPauses(NamedTuple):
    """The pauses of the heartbeat loop."""

    failure: Pauses
    """The pauses after heartbeats that failed."""
    regression: Pauses
    """The pauses after each regression of the version in this session. They grow, because replies
    from two databases may alternate.
    """


class Membership:
    """
    Keeps a session alive, and joins again when it is lost.

    Args:
        identity: generates the random bits of session ids.
        start: where the group begins if this consumer creates it; None: at the first message.
        filter_text: the text of the consumer's filter; it must be the same for all members of the
            group.
    """

    def __init__(
        self,
        member: Member,
        *,
        meta: MetaClient,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        identity: DrawBits,
        start: GroupStart | None = None,
        filter_text: str = "",
    ) -> None:
        self.member = member
        self.session = ""
        self.cluster_id = ""
        """The identity of the cluster in the last session."""
        self.suspended = False
        """True if the consumer's own code has suspended it."""
        self.releases = Releases(member, meta, clock, call_timeout_ms=settings.call_timeout_ms)
        self._meta = meta
        self._settings = settings
        self._clock = clock
        self._draw_identity = identity
        self._next_join = Join(
            subject=member.subject,
            group=member.group,
            session="",
            client=member.client,
            ttl_ms=settings.ttl_ms,
            strategy=settings.consume_strategy,
            filter=filter_text,
            start=start,
            instance=settings.instance,
        )
        """What the next join says. Its session is set while a session is requested and not
        confirmed: a retry has the same id, because the session of a join whose reply was lost
        would otherwise hold the instance.
        """
        self._timeouts = HeartbeatTimeouts(
            addresses=meta.address_count,
            ttl_ms=settings.ttl_ms,
            margin_ms=settings.margin_ms,
            timeout_max_ms=settings.call_timeout_ms,
        )
        self._long_poll = LongPoll()
        self._pauses = HeartbeatPauses(settings.backoff.pauses(rng), settings.backoff.pauses(rng))
        self._failure_log = LogFilter()
        self._task: asyncio.Task[None] | None = None

    async def group(self) -> GroupView:
        """Return the group's members and the owners of its partitions."""
        member = self.member
        return await self._meta.call(endpoints.GROUP, subject=member.subject, group=member.group)

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        return await self._meta.call(endpoints.HISTORY, subject=self.member.subject)

    async def partitions_by_broker(self) -> dict[str, Partition]:
        """Return one partition of the subject for each broker group. Its address is None while the
        broker sends no heartbeats to the metaserver.
        """
        route = await self._meta.route(self.member.subject)
        return {str(partition.broker_group): partition for partition in route.partitions}

    async def start(self, holder: GrantHolder) -> None:
        """
        Join, and send heartbeats for `holder` until `stop`.

        Raises:
            KeylaneError: the metaserver refused the join, or none replied.
        """
        await self._join(holder)
        self._task = start_task(self._run_heartbeats(holder), name=f"session {self.session[:8]}")

    async def _join(self, holder: GrantHolder) -> None:
        if not self._next_join.session:
            session = f"{self._draw_identity(128):032x}"
            self._next_join = replace(self._next_join, session=session)
            self._timeouts.requested_ms = self._clock.boot_ms()
        request = self._next_join = replace(self._next_join, suspended=self.suspended)
        joined = await self._meta.call(endpoints.JOIN, request)
        if (
            self._settings.on_failure is FailurePolicy.RETRY
            and request.strategy is ConsumeStrategy.EXCLUSIVE
            and joined.order_strategy is OrderStrategy.STRICT
        ):
            await self._meta.call(endpoints.LEAVE, Leave(session=request.session))
            raise InvalidRequestError(
                Reason.RETRY_POLICY,
                f"subject {request.subject!r} is strict",
                subject=request.subject,
                group=request.group,
            )
        start = request.start
        if start is not None and not request.group_id and joined.start not in {None, start.stored}:
            log.info(
                "%s: the group already exists and began at %s; start=%s applies to new groups only",
                self.member.name,
                joined.start,
                start,
            )
        if not request.again:
            log.info("%s joined as %s", self.member.name, self.member.client)
        self.cluster_id = joined.cluster_id
        self.session = request.session
        self._next_join = replace(request, session="", group_id=joined.group_id, again=True)
        self._long_poll.version = -1
        self._pauses.regression.reset()
        self._timeouts.start_session(joined.heartbeat_ms)
        if joined.grants is not None:
            self._accept_first_grants(joined.grants, holder)

    def _accept_first_grants(self, grants: Grants, holder: GrantHolder) -> None:
        """Accept the grants in the reply to a join. The first heartbeat is a long poll only if the
        lease leaves time for it.
        """
        if self._belong_to_another_group(grants):
            return  # the first heartbeat ends the session
        if self._timeouts.allows_long_poll(self._clock.boot_ms()):
            self._long_poll.version = grants.version
        requested_ms = self._timeouts.requested_ms
        holder.apply_grants(grants, requested_ms + grants.ttl_ms - self._settings.margin_ms)

    def _belong_to_another_group(self, grants: Grants) -> bool:
        """Return True if the subject or the group was deleted and recreated, and the session
        belongs to the new group.
        """
        return grants.group_id != self._next_join.group_id

    def nudge(self) -> None:
        """Send the next heartbeat now, ending a long poll that is in flight."""
        self._long_poll.nudge()

    async def _run_heartbeats(self, holder: GrantHolder) -> None:
        try:
            while True:
                try:
                    if not self.session:
                        await self._join(holder)
                    await self._send_heartbeat(holder)
                    self._pauses.failure.reset()
                except SessionUnknownError as error:
                    # Lost leases are logged as warnings elsewhere; without leases, nothing is lost.
                    level = logging.DEBUG if holder.holding(self.session) else logging.INFO
                    now_ms = self._clock.boot_ms()
                    if text := self._failure_log.count_failure(error.message, now_ms, _LOST):
                        log.log(level, "%s lost its session: %s", self.member.name, text)
                    self.session = ""
                    holder.on_session_lost()
                except KeylaneError as error:
                    # StorageError is not permanent: the metaserver's disk may be repaired.
                    is_permanent = error.retry is RetryRule.NEVER and not isinstance(
                        error, StorageError
                    )
                    if is_permanent and not self.session:
                        raise
                    self._long_poll.nudge()
                    self._log_failure(error)
                    all_failed = self._timeouts.record_failure()
                    if all_failed or not isinstance(error, UnreachableError | StorageError):
                        await self._pause(self._pauses.failure)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            holder.fail(error)
            raise

    def _log_failure(self, error: KeylaneError) -> None:
        """Log why a heartbeat failed. A refusal is a warning, because the consumer receives nothing
        while it lasts.
        """
        refused = isinstance(error, UnauthenticatedError | AccessDeniedError)
        refused = refused or error.reason in _REFUSALS
        text = self._failure_log.count_failure(
            error.message, self._clock.boot_ms(), _REFUSED if refused else None
        )
        if text and refused:
            log.warning("the metaserver refuses %s, which keeps trying: %s", self.member.name, text)
        elif text:
            log.info("%s: a heartbeat failed: %s", self.member.name, text)

    def _log_recovery(self) -> None:
        now_ms = self._clock.boot_ms()
        if failures := self._failure_log.end_failures(now_ms, _REFUSED):
            log.warning("the metaserver accepts %s again, after %s", self.member.name, failures)
        if failures := self._failure_log.end_failures(now_ms):
            log.info("%s: heartbeats succeed again, after %s", self.member.name, failures)

    async def _send_heartbeat(self, holder: GrantHolder) -> None:
        sent_at_ms = self._clock.boot_ms()
        immediate = self._long_poll.take_is_immediate()
        wait_ms = 0 if immediate else self._timeouts.wait_ms
        timeout_ms = self._timeouts.timeout_ms(sent_at_ms, wait_ms=wait_ms)
        body = Heartbeat(
            session=self.session,
            known_version=-1 if immediate else self._long_poll.version,
            drained=holder.drained(),
            parked=holder.parked(),
            holding=holder.holding(self.session),
            wait_ms=wait_ms,
            suspended=self.suspended,
            group_id=self._next_join.group_id,
            unreached=holder.unreached(),
        )
        poll = asyncio.timeout(None)  # expires only when `nudge` reschedules it
        try:
            async with poll:
                if not immediate:
                    self._long_poll.begin(poll, wait_ms)
                grants = await self._meta.call(
                    endpoints.HEARTBEAT, body, timeout_ms=timeout_ms - wait_ms
                )
        except TimeoutError:
            if not poll.expired():
                raise
            return
        finally:
            self._long_poll.end()
        if self._belong_to_another_group(grants):
            raise SessionUnknownError(session=self.session)
        self._log_recovery()
        known_version = self._long_poll.version
        if grants.version < known_version:
            log.warning(
                "%s: the version of its grants fell from %d to %d: the metaserver's database has "
                "lost its last commits",
                self.member.name,
                known_version,
                grants.version,
            )
            self._long_poll.version = -1
            await self._pause(self._pauses.regression)
            return
        self._long_poll.version = grants.version
        deadline_ms = sent_at_ms + grants.ttl_ms - self._settings.margin_ms
        self._timeouts.record_grant(deadline_ms)
        holder.apply_grants(grants, deadline_ms)

    async def _pause(self, pauses: Pauses) -> None:
        """Sleep for the next pause, but no longer than a long poll takes."""
        await asyncio.sleep(min(pauses.next_pause_ms(), self._timeouts.wait_ms) / 1000)

    async def suspend(self, suspended: bool) -> None:
        """
        Stop requesting grants (True), or request them again (False); later sessions do the same.

        Raises:
            KeylaneError: the metaserver could not be notified; nothing has changed.
        """
        previous, self.suspended = self.suspended, suspended
        body = Suspend(session=self.session, suspended=suspended)
        try:
            if self.session:
                await self.releases.call(endpoints.SUSPEND, body)
        except SessionUnknownError:
            pass  # the next join carries the new value
        except KeylaneError:
            self.suspended = previous
            raise

    async def announce_leave(self) -> None:
        """Tell the metaserver that all partitions are being handed over, so that it grants each one
        to another member as soon as it is released.
        """
        self.releases.is_leaving = True
        try:
            await self.suspend(True)
        except KeylaneError as error:
            log.info("%s: cannot send its leave request: %s", self.member.name, error.message)

    async def abandon_join(self, error: BaseException) -> None:
        """Leave the group, within ABANDON_TIMEOUT_S, if the join was cancelled: the metaserver may
        still carry it out.
        """
        if isinstance(error, asyncio.CancelledError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABANDON_TIMEOUT_S):
                    await self.stop()

    async def stop(self) -> None:
        """
        Leave the group, which frees partitions that were not handed over.

        This also ends a session whose join received no reply, because the metaserver may have
        started it.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        session = self.session or self._next_join.session
        if session:
            try:
                await self.releases.call(endpoints.LEAVE, Leave(session=session))
            except KeylaneError as error:
                log.info("%s: cannot leave the group: %s", self.member.name, error.message)
            self.session = ""
            self._next_join = replace(self._next_join, session="")
