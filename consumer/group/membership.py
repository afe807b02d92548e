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
from collections.abc import Iterator
from typing import Protocol

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


class Membership:
    """
    Keeps a session alive, and joins again when it is lost.

    Args:
        client: the consumer's display name.
        identity: generates the random bits of session ids.
        start: where the group begins if this consumer creates it; None: at the first message.
        filter_text: the text of the consumer's filter; it must be the same for all members of the
            group.
    """

    _poll: asyncio.Timeout | None = None
    """The timeout by which `nudge` ends a long poll."""
    _polls_until_s = 0.0
    """The time of the event loop's clock, in seconds, until which the metaserver may delay its
    reply to the long poll.
    """

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        client: str,
        meta: MetaClient,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        identity: DrawBits,
        start: GroupStart | None = None,
        filter_text: str = "",
    ) -> None:
        self.session = ""
        self.cluster_id = ""
        """The identity of the cluster in the last session."""
        self._start = start
        self._pending_session = ""
        """The id of a session that was requested but is not confirmed yet."""
        self._requested_ms = 0
        """The boot time, in milliseconds, of its first request. The lease counts from that time,
        because the metaserver may already have started the session, and a repeated join does not
        renew it.
        """
        self._joined = False
        """True once a session of this opening has been confirmed."""
        self._group_id = 0
        """The id of the group in the last session; a group that is deleted and recreated has
        another id.
        """
        self._suspended = False
        self._subject = subject
        self._group = group
        self._name = consumer_name(subject, group)
        self.client = client
        self._meta = meta
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._draw_identity = identity
        self._filter_text = filter_text
        self._version = -1
        self._regression_pauses = settings.backoff.pauses(rng)
        """The pauses after each regression of the version in this session."""
        self._timeouts = HeartbeatTimeouts(
            addresses=meta.address_count,
            ttl_ms=settings.ttl_ms,
            margin_ms=settings.margin_ms,
            timeout_max_ms=settings.call_timeout_ms,
        )
        self._failure_log = LogFilter()
        self._release_log = LogFilter()
        """Limits the lines about reports that failed, by partition."""
        self._nudged = False
        """True if the next heartbeat must not be a long poll, because it carries a report or the
        lease may end soon.
        """
        self._reports = asyncio.Semaphore(CONCURRENT_REPORTS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self._unanswered = False
        """True if the consumer is leaving and no metaserver replied to its last call."""

    async def group(self) -> GroupView:
        """Return the group's members and the owners of its partitions."""
        return await self._meta.call(endpoints.GROUP, subject=self._subject, group=self._group)

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        return await self._meta.call(endpoints.HISTORY, subject=self._subject)

    async def partitions_by_broker(self) -> dict[str, Partition]:
        """Return one partition of the subject for each broker group. Its address is None while the
        broker sends no heartbeats to the metaserver.
        """
        route = await self._meta.route(self._subject)
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
        # A retry uses the same session id: the session of a join whose reply was lost would
        # otherwise hold the instance.
        if not self._pending_session:
            self._pending_session = f"{self._draw_identity(128):032x}"
            self._requested_ms = self._clock.boot_ms()
        session = self._pending_session
        joined = await self._meta.call(
            endpoints.JOIN,
            Join(
                subject=self._subject,
                group=self._group,
                session=session,
                client=self.client,
                ttl_ms=self._settings.ttl_ms,
                suspended=self._suspended,
                strategy=self._settings.consume_strategy,
                filter=self._filter_text,
                group_id=self._group_id,
                start=self._start,
                instance=self._settings.instance,
                again=self._joined,
            ),
        )
        if (
            self._settings.on_failure is FailurePolicy.RETRY
            and self._settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
            and joined.order_strategy is OrderStrategy.STRICT
        ):
            await self._meta.call(endpoints.LEAVE, Leave(session=session))
            raise InvalidRequestError(
                Reason.RETRY_POLICY,
                f"subject {self._subject!r} is strict",
                subject=self._subject,
                group=self._group,
            )
        if (
            self._start is not None
            and not self._group_id
            and joined.start not in {None, self._start.stored}
        ):
            log.info(
                "%s: the group already exists and began at %s; start=%s applies to new groups only",
                self._name,
                joined.start,
                self._start,
            )
        if not self._joined:
            log.info("%s joined as %s", self._name, self.client)
        self._group_id = joined.group_id
        self.cluster_id = joined.cluster_id
        self.session = session
        self._pending_session = ""
        self._joined = True
        self._version = -1
        self._regression_pauses.reset()
        self._timeouts.start_session(self._requested_ms, joined.heartbeat_ms)
        if joined.grants is not None:
            self._accept_first_grants(joined.grants, holder)

    def _accept_first_grants(self, grants: Grants, holder: GrantHolder) -> None:
        """Accept the grants in the reply to a join. The first heartbeat is a long poll only if the
        lease leaves time for it.
        """
        if self._belong_to_another_group(grants):
            return  # the first heartbeat ends the session
        if self._timeouts.allows_long_poll(self._clock.boot_ms()):
            self._version = grants.version
        holder.apply_grants(grants, self._requested_ms + grants.ttl_ms - self._settings.margin_ms)

    def _belong_to_another_group(self, grants: Grants) -> bool:
        """Return True if the subject or the group was deleted and recreated, and the session
        belongs to the new group.
        """
        return grants.group_id != self._group_id

    @property
    def suspended(self) -> bool:
        """True if the consumer's own code has suspended it."""
        return self._suspended

    def nudge(self) -> None:
        """Send the next heartbeat now, ending a long poll that is in flight."""
        self._nudged = True
        poll = self._poll
        self._poll = None
        if poll is not None:
            now_s = asyncio.get_running_loop().time()
            if now_s < self._polls_until_s:
                poll.reschedule(now_s)

    async def _run_heartbeats(self, holder: GrantHolder) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        try:
            while True:
                try:
                    if not self.session:
                        await self._join(holder)
                    await self._send_heartbeat(holder)
                    pauses.reset()
                except SessionUnknownError as error:
                    # Lost leases are logged as warnings elsewhere; without leases, nothing is lost.
                    level = logging.DEBUG if holder.holding(self.session) else logging.INFO
                    now_ms = self._clock.boot_ms()
                    if text := self._failure_log.count_failure(error.message, now_ms, _LOST):
                        log.log(level, "%s lost its session: %s", self._name, text)
                    self.session = ""
                    holder.on_session_lost()
                except KeylaneError as error:
                    # StorageError is not permanent: the metaserver's disk may be repaired.
                    is_permanent = error.retry is RetryRule.NEVER and not isinstance(
                        error, StorageError
                    )
                    if is_permanent and not self.session:
                        raise
                    self._nudged = True
                    self._log_failure(error)
                    all_failed = self._timeouts.record_failure()
                    if all_failed or not isinstance(error, UnreachableError | StorageError):
                        await self._pause(pauses)
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
            log.warning("the metaserver refuses %s, which keeps trying: %s", self._name, text)
        elif text:
            log.info("%s: a heartbeat failed: %s", self._name, text)

    def _log_recovery(self) -> None:
        now_ms = self._clock.boot_ms()
        if failures := self._failure_log.end_failures(now_ms, _REFUSED):
            log.warning("the metaserver accepts %s again, after %s", self._name, failures)
        if failures := self._failure_log.end_failures(now_ms):
            log.info("%s: heartbeats succeed again, after %s", self._name, failures)

    async def _send_heartbeat(self, holder: GrantHolder) -> None:
        sent_at_ms = self._clock.boot_ms()
        immediate = self._nudged or self._version < 0
        self._nudged = False
        wait_ms = 0 if immediate else self._timeouts.wait_ms
        timeout_ms = self._timeouts.timeout_ms(sent_at_ms, wait_ms=wait_ms)
        body = Heartbeat(
            session=self.session,
            known_version=-1 if immediate else self._version,
            drained=holder.drained(),
            parked=holder.parked(),
            holding=holder.holding(self.session),
            wait_ms=wait_ms,
            suspended=self._suspended,
            group_id=self._group_id,
            unreached=holder.unreached(),
        )
        poll = asyncio.timeout(None)  # expires only when `nudge` reschedules it
        try:
            async with poll:
                if not immediate:
                    # `nudge` interrupts a long poll only while the metaserver may be waiting for a
                    # change; after that, the reply is due.
                    self._polls_until_s = asyncio.get_running_loop().time() + wait_ms / 1000
                    self._poll = poll
                grants = await self._meta.call(
                    endpoints.HEARTBEAT, body, timeout_ms=timeout_ms - wait_ms
                )
        except TimeoutError:
            if not poll.expired():
                raise
            return
        finally:
            self._poll = None
        if self._belong_to_another_group(grants):
            raise SessionUnknownError(session=self.session)
        self._log_recovery()
        if grants.version < self._version:
            await self._handle_version_regression(grants.version)
            return
        self._version = grants.version
        deadline_ms = sent_at_ms + grants.ttl_ms - self._settings.margin_ms
        self._timeouts.record_grant(deadline_ms)
        holder.apply_grants(grants, deadline_ms)

    async def _handle_version_regression(self, version: int) -> None:
        """Forget the known version, and wait before the next heartbeat. The pause grows each time,
        because replies from two databases may alternate.
        """
        log.warning(
            "%s: the version of its grants fell from %d to %d: the metaserver's database has lost "
            "its last commits",
            self._name,
            self._version,
            version,
        )
        self._version = -1
        await self._pause(self._regression_pauses)

    async def _pause(self, pauses: Pauses) -> None:
        """Sleep for the next pause, but no longer than a long poll takes."""
        await asyncio.sleep(min(pauses.next_pause_ms(), self._timeouts.wait_ms) / 1000)

    async def report_release(
        self, session: str, partition_id: int, token: int, *, fence: int = 0
    ) -> None:
        """Report that a partition is released. If this fails, the next heartbeat reports it
        instead.
        """
        body = ReleaseGrant(session=session, partition_id=partition_id, token=token, fence=fence)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._reports.acquire()
            try:
                with self._tracking_replies():
                    await self._meta.call(endpoints.RELEASE, body, timeout_ms=self._timeout_ms)
            finally:
                self._reports.release()
        except SessionUnknownError:
            pass  # its leases have ended, which is already logged
        except (TimeoutError, KeylaneError) as error:
            line = self._release_log.count_failure(
                "cannot report the release", self._clock.boot_ms(), partition_id
            )
            if line:
                name = partition_name(self._subject, partition_id, self._group)
                cause = getattr(error, "message", "too many reports are waiting")
                log.info("%s: %s: %s", name, line, cause)
        else:
            self._release_log.end_failures(self._clock.boot_ms(), partition_id)

    @property
    def _timeout_ms(self) -> int:
        """The timeout of a call for each metaserver, in milliseconds. A hanging metaserver costs a
        closing consumer one full timeout in total, not one per call.
        """
        return LEAVE_TIMEOUT_MS if self._unanswered else self._settings.call_timeout_ms

    @contextlib.contextmanager
    def _tracking_replies(self) -> Iterator[None]:
        """Record whether any metaserver replies to a call of a closing consumer."""
        try:
            yield
        except UnreachableError:
            self._unanswered = self._leaving
            raise
        except KeylaneError:
            self._unanswered = False
            raise
        self._unanswered = False

    async def suspend(self, suspended: bool) -> None:
        """
        Stop requesting grants (True), or request them again (False); later sessions do the same.

        Raises:
            KeylaneError: the metaserver could not be notified; nothing has changed.
        """
        previous = self._suspended
        self._suspended = suspended
        body = Suspend(session=self.session, suspended=suspended)
        try:
            if self.session:
                with self._tracking_replies():
                    await self._meta.call(endpoints.SUSPEND, body, timeout_ms=self._timeout_ms)
        except SessionUnknownError:
            pass  # the next join carries the new value
        except KeylaneError:
            self._suspended = previous
            raise

    async def announce_leave(self) -> None:
        """Tell the metaserver that all partitions are being handed over, so that it grants each one
        to another member as soon as it is released.
        """
        self._leaving = True
        try:
            await self.suspend(True)
        except KeylaneError as error:
            log.info("%s: cannot send its leave request: %s", self._name, error.message)

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
        session = self.session or self._pending_session
        if session:
            try:
                await self._meta.call(
                    endpoints.LEAVE, Leave(session=session), timeout_ms=self._timeout_ms
                )
            except KeylaneError as error:
                log.info("%s: cannot leave the group: %s", self._name, error.message)
            self.session = self._pending_session = ""
