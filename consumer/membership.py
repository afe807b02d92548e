"""A consumer's session with the metaserver: join, heartbeat by long poll, deadline, leave.

Invariants
    The deadline is the boot clock at the sending of the heartbeat + ttl - margin, so it ends before the
    metaserver's; an answer that comes late has less of it left, never more.
    One heartbeat is under way at a time, so no answer overtakes another.  A version lower than the last is of a database
    that lost its last commits: it counts when it is told again, after a pause, and tokens and fences guard the rest.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from ..protocol.clock import Clock
from ..protocol.control import Grants, Heartbeat, Join, Leave, ReleaseGrant, Suspend
from ..protocol.errors import (
    KeylaneError,
    Retry,
    SessionUnknownError,
    StorageError,
    UnreachableError,
)
from ..rpc.client import MetaClient
from ..rpc.identity import DrawBits
from .patience import Patience
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")
REPORTS_AT_ONCE_MAX = 32
"""Each has a connection of its own to the metaserver; a consumer may hand over a thousand partitions at once."""


class Membership:
    """
    Keeps one session alive and begins another when it was lost.

    `on_grants(grants, deadline_ms)` gets every renewal; `on_lost()` hears that the session is gone and with it
    all grants; `drained()` lists sealed partitions acked to their end, `holding(session)` what it has.
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
        on_grants: Callable[[Grants, int], None],
        on_lost: Callable[[], None],
        drained: Callable[[], tuple[int, ...]],
        holding: Callable[[str], tuple[tuple[int, int], ...]],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.session = ""
        self._suspended = False
        self._subject = subject
        self._group = group
        self._client = client
        self._meta = meta
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._draw_identity = identity
        self._on_grants = on_grants
        self._on_lost = on_lost
        self._drained = drained
        self._holding = holding
        self._on_fatal = on_fatal
        self._version = -1
        self._falls = 0
        """How often the version fell in this session."""
        self._hurry = False
        """The last heartbeat failed: the next is answered at once, as what is left of the lease may be short."""
        self._patience = Patience(
            addresses=meta.address_count,
            ttl_ms=settings.ttl_ms,
            margin_ms=settings.margin_ms,
            timeout_max_ms=settings.call_timeout_ms,
        )
        self._nudge = asyncio.Event()
        self._reports = asyncio.Semaphore(REPORTS_AT_ONCE_MAX)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join; what the metaserver refuses for good is raised here."""
        await self._join()
        self._task = asyncio.create_task(self._beat(), name=f"session {self.session[:8]}")

    async def _join(self) -> None:
        session = f"{self._draw_identity(128):032x}"
        sent_at_ms = self._clock.boot_ms()
        joined = await self._meta.join(
            Join(
                subject=self._subject,
                group=self._group,
                session=session,
                client=self._client,
                ttl_ms=self._settings.ttl_ms,
                suspended=self._suspended,
                strategy=self._settings.strategy,
            )
        )
        self.session = session
        self._version = -1
        self._falls = 0
        self._patience.begin(sent_at_ms, joined.heartbeat_ms)

    def nudge(self) -> None:
        """Send the next heartbeat now: there is something to report, or to ask for again."""
        self._nudge.set()

    async def _beat(self) -> None:
        attempt = 0
        try:
            while True:
                try:
                    if not self.session:
                        await self._join()
                    await self._beat_once()
                    attempt = 0
                except SessionUnknownError as error:
                    log.warning("consumer session lost: %s", error.message)
                    self.session = ""
                    self._on_lost()
                except KeylaneError as error:
                    if error.retry is Retry.NEVER and not self.session:
                        raise
                    self._hurry = True
                    log.info("heartbeat: %s", error.message)
                    everywhere = self._patience.failed()
                    if everywhere or not isinstance(error, UnreachableError | StorageError):
                        attempt += 1
                        await self._pause(attempt)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._on_fatal(error)
            raise

    async def _beat_once(self) -> None:
        sent_at_ms = self._clock.boot_ms()
        # In a hurry it is answered at once: there is something to report, or little of the lease may be left.
        hurry = self._hurry or self._nudge.is_set() or self._version < 0
        self._nudge.clear()
        wait_ms = 0 if hurry else self._patience.wait_ms
        timeout_ms = self._patience.timeout_ms(sent_at_ms, wait_ms=wait_ms)
        call = asyncio.create_task(
            self._meta.heartbeat(
                Heartbeat(
                    session=self.session,
                    known_version=-1 if hurry else self._version,
                    drained=self._drained(),
                    holding=self._holding(self.session),
                    wait_ms=wait_ms,
                    suspended=self._suspended,
                ),
                timeout_ms=timeout_ms - wait_ms,
            )
        )
        nudge = asyncio.create_task(self._nudge.wait())
        try:
            # A long poll is broken off for a report, while the metaserver may be waiting; a late answer is waited for.
            ends = (call,) if hurry else (call, nudge)
            limit_s = None if hurry else wait_ms / 1000
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if nudge.done() and not hurry and not call.done():
                return
            await asyncio.wait((call,))
            grants = call.result()
            self._hurry = False
        finally:
            call.cancel()
            nudge.cancel()
            await asyncio.gather(call, nudge, return_exceptions=True)
        if grants.version < self._version:
            await self._fell(grants.version)
            return
        self._version = grants.version
        deadline_ms = sent_at_ms + grants.ttl_ms - self._settings.margin_ms
        self._patience.granted(deadline_ms)
        self._on_grants(grants, deadline_ms)

    async def _fell(self, version: int) -> None:
        """Of two databases in turn it asks ever more slowly."""
        self._falls += 1
        log.warning(
            "the metaserver's grants went back from version %d to %d: its database has lost its last commits",
            self._version, version,
        )  # fmt: skip
        self._version = -1
        await self._pause(self._falls)

    async def _pause(self, attempt: int) -> None:
        wait_ms = self._settings.backoff.wait_ms(attempt, self._rng)
        await asyncio.sleep(min(wait_ms, self._patience.wait_ms) / 1000)

    async def released(
        self, session: str, partition_id: int, token: int, *, fence: int = 0
    ) -> None:
        """Report a finished hand-over; if that fails, the next heartbeat says the same."""
        try:
            async with asyncio.timeout(self._settings.call_timeout_ms / 1000):
                await self._reports.acquire()
            try:
                await self._meta.release(
                    ReleaseGrant(
                        session=session, partition_id=partition_id, token=token, fence=fence
                    )
                )
            finally:
                self._reports.release()
        except (TimeoutError, KeylaneError) as error:
            log.info("report of partition %d: %s", partition_id, error or "too many before it")

    async def suspend(self, suspended: bool) -> None:
        """Be granted nothing from now on, or take part again; a session that begins meanwhile is told as well."""
        before, self._suspended = self._suspended, suspended
        try:
            if self.session:
                await self._meta.suspend(Suspend(session=self.session, suspended=suspended))
        except SessionUnknownError:
            pass  # the next one begins so
        except KeylaneError:
            self._suspended = before
            raise

    async def part(self) -> None:
        """Say that everything is being handed over, so that each partition goes on as soon as it is released."""
        try:
            await self.suspend(True)
        except KeylaneError as error:
            log.info("parting: %s", error.message)

    async def stop(self) -> None:
        """Leave; what is still held is free at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.session:
            try:
                await self._meta.leave(Leave(session=self.session))
            except KeylaneError as error:
                log.info("leave: %s", error.message)
            self.session = ""
