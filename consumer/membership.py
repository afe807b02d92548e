"""A consumer's session with the metaserver: join, heartbeat by long poll, deadline, leave.

Invariants
    The deadline is the boot clock when the heartbeat is sent, + ttl - margin, so the lease ends
    here before it ends at the metaserver; a late answer leaves less of it, never more. One
    heartbeat is under way at a time, so no answer overtakes another. A version below the last one
    means that the database lost its last commits. It counts once it is received a second time,
    after a pause; tokens and fences keep partitions safe meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Protocol

from ..protocol import endpoints
from ..protocol.backoff import Pauses
from ..protocol.clock import Clock
from ..protocol.control import Grants, Heartbeat, Join, Leave, ReleaseGrant, Suspend
from ..protocol.errors import (
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
from ..protocol.groups import FailurePolicy, GroupStart
from ..protocol.log_filter import LogFilter
from ..protocol.operations import SubjectHistory
from ..protocol.routing import ConsumeStrategy, OrderStrategy, Partition
from ..rpc.client import MetaClient
from ..rpc.environment import DrawBits
from ..rpc.race import start_task
from .heartbeat_timeouts import HeartbeatTimeouts
from .log_names import consumer_name, partition_name
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")
_REFUSALS = (Reason.TOKEN_INVALID, Reason.SESSION_QUOTA)
"""Reasons of refusals, beside those of access, during which a consumer gets nothing."""
_REFUSED = "refused"
"""The key of a refusal among the troubles of a membership."""
FAREWELL_MS_MIN = 500
"""The time, in milliseconds, that a call of a closing consumer waits for each metaserver, once no
metaserver answered an earlier call.
"""
LEAVE_S = 1.0
"""The longest time, in seconds, that a cancelled opening takes to leave."""
REPORTS_AT_ONCE_MAX = 32
"""The largest number of reports at once: each needs a connection, and a consumer may hand over a
thousand partitions.
"""


class GrantHolder(Protocol):
    """The consumer as seen by a membership: it takes grants, and knows the contents of
    heartbeats.
    """

    def granted(self, grants: Grants, deadline_ms: int) -> None:
        """Take every partition granted now; the leases end at `deadline_ms` on the boot clock."""
        ...

    def session_lost(self) -> None:
        """Give up every grant: the metaserver no longer knows the session."""
        ...

    def drained(self) -> tuple[int, ...]:
        """Return the ids of sealed partitions that the group has acked to the end."""
        ...

    def parked(self) -> tuple[int, ...]:
        """Return the ids of those drained partitions on which the group has parked messages."""
        ...

    def holding(self, session: str) -> tuple[tuple[int, int], ...]:
        """Return (partition id, token) for each partition that `session` has, or is handing
        over.
        """
        ...

    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups to which the consumer gets no connection."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the consumer: `error` is final."""
        ...


class Membership:
    """
    Keeps one session alive, and begins another when it is lost.

    Args:
        client: name of the consumer, for people.
        identity: draws the bits of a session's id.
        start: where the group begins if this consumer makes it; None: at the first message.
        filter_text: the text of the consumer's filter; it must be the same for all members of the
            group.
    """

    _poll: asyncio.Timeout | None = None
    """The time-out that ends a heartbeat while the metaserver may be delaying its answer."""
    _polls_until_s = 0.0
    """The time, by the event loop's clock, until which the metaserver may delay its answer."""

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
        self._start = start
        self._joining = ""
        """The session that was requested, until an answer confirms that it has begun."""
        self._asked_ms = 0
        """The boot time, in milliseconds, of its first request: the metaserver may have begun it
        then, and a repeat renews nothing.
        """
        self._joined = False
        """True once a session of this opening has begun."""
        self._group_id = 0
        """The id of the group in the last session; a group that is created after a deletion has
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
        self._fall_pauses = settings.backoff.pauses(rng)
        """The pauses after each fall of the version in this session."""
        self._timeouts = HeartbeatTimeouts(
            addresses=meta.address_count,
            ttl_ms=settings.ttl_ms,
            margin_ms=settings.margin_ms,
            timeout_max_ms=settings.call_timeout_ms,
        )
        self._troubles = LogFilter()
        self._nudged = False
        """True if the next heartbeat should be answered at once, for a report or because the lease
        may end soon.
        """
        self._reports = asyncio.Semaphore(REPORTS_AT_ONCE_MAX)
        self._task: asyncio.Task[None] | None = None
        self._leaving = self._unanswered = False
        """`_leaving` is True once the consumer closes; `_unanswered`, if no metaserver has answered
        its last call since.
        """

    async def history(self) -> SubjectHistory:
        """Return every partition that the subject ever had."""
        return await self._meta.call(endpoints.HISTORY, subject=self._subject)

    async def partitions_by_broker(self) -> dict[str, Partition]:
        """Return one of the subject's partitions for each broker group; it has no address while its
        broker does not report itself.
        """
        route = await self._meta.route(self._subject)
        return {str(partition.broker_group): partition for partition in route.partitions}

    async def start(self, holder: GrantHolder) -> None:
        """
        Join, and send heartbeats for `holder` until `stop`.

        Raises:
            KeylaneError: the metaserver refused the join, or none answered.
        """
        await self._join(holder)
        self._task = start_task(self._beat(holder), name=f"session {self.session[:8]}")

    async def _join(self, holder: GrantHolder) -> None:
        # A repeat has the same session: a session whose answer was lost would hold the instance's
        # place.
        if not self._joining:
            self._joining = f"{self._draw_identity(128):032x}"
            self._asked_ms = self._clock.boot_ms()
        session = self._joining
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
        self._group_id = joined.group_id
        self.session = session
        self._joining = ""
        self._joined = True
        self._version = -1
        self._fall_pauses.reset()
        self._timeouts.start_session(self._asked_ms, joined.heartbeat_ms)
        if joined.grants is not None:
            self._take_first(joined.grants, holder)

    def _take_first(self, grants: Grants, holder: GrantHolder) -> None:
        """Take the grants in the answer to a join; the first heartbeat waits for a change only if
        the lease leaves time for it.
        """
        if self._are_of_another_group(grants):
            return  # the first heartbeat ends the session
        if self._timeouts.allows_long_poll(self._clock.boot_ms()):
            self._version = grants.version
        holder.granted(grants, self._asked_ms + grants.ttl_ms - self._settings.margin_ms)

    def _are_of_another_group(self, grants: Grants) -> bool:
        """Return whether the subject or the group was deleted and created again, and a late join
        has begun the session in the new one.
        """
        return grants.group_id != self._group_id

    @property
    def suspended(self) -> bool:
        """Return whether the consumer's own code has suspended it."""
        return self._suspended

    def nudge(self) -> None:
        """Send the next heartbeat now, for a report."""
        self._nudged = True
        poll = self._poll
        self._poll = None
        if poll is not None:
            now_s = asyncio.get_running_loop().time()
            if now_s < self._polls_until_s:
                poll.reschedule(now_s)

    async def _beat(self, holder: GrantHolder) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        try:
            while True:
                try:
                    if not self.session:
                        await self._join(holder)
                    await self._beat_once(holder)
                    pauses.reset()
                except SessionUnknownError as error:
                    # If partitions are leased, the line about their leases is the warning; without
                    # any, nothing is lost.
                    level = logging.DEBUG if holder.holding(self.session) else logging.INFO
                    log.log(level, "%s lost its session: %s", self._name, error.message)
                    self.session = ""
                    holder.session_lost()
                except KeylaneError as error:
                    lasts = error.retry is RetryRule.NEVER and not isinstance(error, StorageError)
                    if lasts and not self.session:
                        raise  # a failing disk of the metaserver is repaired
                    self._nudged = True
                    self._tell_failure(error)
                    all_failed = self._timeouts.record_failure()
                    if all_failed or not isinstance(error, UnreachableError | StorageError):
                        await self._pause(pauses)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            holder.fail(error)
            raise

    def _tell_failure(self, error: KeylaneError) -> None:
        """Log why a heartbeat failed; a refusal is a warning, because the consumer gets nothing
        until it ends.
        """
        refused = isinstance(error, UnauthenticatedError | AccessDeniedError)
        refused = refused or error.reason in _REFUSALS
        line = self._troubles.met(
            error.message, self._clock.boot_ms(), _REFUSED if refused else None
        )
        if line and refused:
            log.warning("the metaserver refuses %s, which keeps trying: %s", self._name, line)
        elif line:
            log.info("%s: a heartbeat failed: %s", self._name, line)

    def _note_answered(self) -> None:
        now_ms = self._clock.boot_ms()
        if failures := self._troubles.over(now_ms, _REFUSED):
            log.warning("%s is taken again, after %s", self._name, failures)
        if failures := self._troubles.over(now_ms):
            log.info("%s: heartbeats are answered again, after %s", self._name, failures)

    async def _beat_once(self, holder: GrantHolder) -> None:
        sent_at_ms = self._clock.boot_ms()
        hurry = self._nudged or self._version < 0
        self._nudged = False
        wait_ms = 0 if hurry else self._timeouts.wait_ms
        timeout_ms = self._timeouts.timeout_ms(sent_at_ms, wait_ms=wait_ms)
        body = Heartbeat(
            session=self.session,
            known_version=-1 if hurry else self._version,
            drained=holder.drained(),
            parked=holder.parked(),
            holding=holder.holding(self.session),
            wait_ms=wait_ms,
            suspended=self._suspended,
            group_id=self._group_id,
            unreached=holder.unreached(),
        )
        poll = asyncio.timeout(None)  # ended by a nudge, not by a timer
        try:
            async with poll:
                if not hurry:
                    # A nudge ends a long poll while the metaserver may be waiting; after that, a
                    # late answer is awaited.
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
        if self._are_of_another_group(grants):
            raise SessionUnknownError(session=self.session)
        self._note_answered()
        if grants.version < self._version:
            await self._version_fell(grants.version)
            return
        self._version = grants.version
        deadline_ms = sent_at_ms + grants.ttl_ms - self._settings.margin_ms
        self._timeouts.record_grant(deadline_ms)
        holder.granted(grants, deadline_ms)

    async def _version_fell(self, version: int) -> None:
        """Ask again after a pause, which grows each time, because two databases may answer in
        turn.
        """
        log.warning(
            "%s: the version of the metaserver's grants fell from %d to %d: its database has lost "
            "its last commits",
            self._name,
            self._version,
            version,
        )
        self._version = -1
        await self._pause(self._fall_pauses)

    async def _pause(self, pauses: Pauses) -> None:
        """Sleep for the next pause, at most as long as a heartbeat may wait."""
        await asyncio.sleep(min(pauses.next_ms(), self._timeouts.wait_ms) / 1000)

    async def report_released(
        self, session: str, partition_id: int, token: int, *, fence: int = 0
    ) -> None:
        """Report a finished hand-over; if that fails, the next heartbeat reports the same."""
        body = ReleaseGrant(session=session, partition_id=partition_id, token=token, fence=fence)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._reports.acquire()
            try:
                with self._noting_silence():
                    await self._meta.call(endpoints.RELEASE, body, timeout_ms=self._timeout_ms)
            finally:
                self._reports.release()
        except SessionUnknownError:
            pass  # its leases have ended, which the log already has
        except (TimeoutError, KeylaneError) as error:
            name = partition_name(self._subject, partition_id, self._group)
            log.info("%s: report: %s", name, getattr(error, "message", "too many before it"))

    @property
    def _timeout_ms(self) -> int:
        """Return the time-out of a call for each metaserver: a metaserver that hangs costs a
        closing consumer one full time-out, not one for each call.
        """
        return FAREWELL_MS_MIN if self._unanswered else self._settings.call_timeout_ms

    @contextlib.contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """Note whether any metaserver has answered a call of a closing consumer."""
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
        Ask for no grants from now on (True), or for grants again (False); a later session joins in
        the same way.

        Raises:
            KeylaneError: the metaserver could not be notified; nothing has changed.
        """
        before = self._suspended
        self._suspended = suspended
        body = Suspend(session=self.session, suspended=suspended)
        try:
            if self.session:
                with self._noting_silence():
                    await self._meta.call(endpoints.SUSPEND, body, timeout_ms=self._timeout_ms)
        except SessionUnknownError:
            pass  # the next session joins as suspended, or not
        except KeylaneError:
            self._suspended = before
            raise

    async def announce_leave(self) -> None:
        """Notify the metaserver that all partitions are being handed over, so that it grants each
        one as soon as it is released.
        """
        self._leaving = True
        try:
            await self.suspend(True)
        except KeylaneError as error:
            log.info("%s: cannot send its leave request: %s", self._name, error.message)

    async def give_up(self, why: BaseException) -> None:
        """Leave a group whose join was cancelled, within LEAVE_S, because the join may still be
        carried out.
        """
        if isinstance(why, asyncio.CancelledError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self.stop()

    async def stop(self) -> None:
        """
        Leave the group; partitions that were not handed over are free at once.

        A session that was requested without an answer is left too, because its join may be carried
        out.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        session = self.session or self._joining
        if session:
            try:
                await self._meta.call(
                    endpoints.LEAVE, Leave(session=session), timeout_ms=self._timeout_ms
                )
            except KeylaneError as error:
                log.info("%s: cannot leave the group: %s", self._name, error.message)
            self.session = self._joining = ""
