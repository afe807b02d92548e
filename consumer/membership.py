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
from ..protocol.errors import KeylaneError, Retry, SessionUnknownError
from ..rpc.client import MetaClient
from ..rpc.identity import DrawBits
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")


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
        dice: random.Random,
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
        self._dice = dice
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
        self._heartbeat_ms = settings.ttl_ms // 3
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join; what the metaserver refuses for good is raised here."""
        await self._join()
        self._task = asyncio.create_task(self._beat(), name=f"session {self.session[:8]}")

    async def _join(self) -> None:
        session = f"{self._draw_identity(128):032x}"
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
        self._heartbeat_ms = joined.heartbeat_ms

    def nudge(self) -> None:
        """Send the next heartbeat now: there is something to report, or to ask for again."""
        self._version = -1
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
                    attempt += 1
                    self._hurry = True
                    log.info("heartbeat: %s", error.message)
                    wait_ms = self._settings.backoff.wait_ms(attempt, self._dice)
                    await asyncio.sleep(min(wait_ms, self._heartbeat_ms) / 1000)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._on_fatal(error)
            raise

    async def _beat_once(self) -> None:
        sent_at_ms = self._clock.boot_ms()
        self._nudge.clear()
        call = asyncio.create_task(
            self._meta.heartbeat(
                Heartbeat(
                    session=self.session,
                    known_version=-1 if self._hurry else self._version,
                    drained=self._drained(),
                    holding=self._holding(self.session),
                    wait_ms=self._heartbeat_ms,
                    suspended=self._suspended,
                ),
                timeout_ms=self._heartbeat_ms // 2,
            )
        )
        nudge = asyncio.create_task(self._nudge.wait())
        try:
            await asyncio.wait((call, nudge), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return
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
        self._on_grants(grants, sent_at_ms + grants.ttl_ms - self._settings.margin_ms)

    async def _fell(self, version: int) -> None:
        """Of two databases in turn it asks ever more slowly."""
        self._falls += 1
        log.warning(
            "the metaserver's grants went back from version %d to %d: its database has lost its last commits",
            self._version, version,
        )  # fmt: skip
        self._version = -1
        wait_ms = self._settings.backoff.wait_ms(self._falls, self._dice)
        await asyncio.sleep(min(wait_ms, self._heartbeat_ms) / 1000)

    async def released(
        self, session: str, partition_id: int, token: int, *, fence: int = 0
    ) -> None:
        """Report a finished hand-over; if that fails, the next heartbeat says the same."""
        try:
            await self._meta.release(
                ReleaseGrant(session=session, partition_id=partition_id, token=token, fence=fence)
            )
        except KeylaneError as error:
            log.info("report of partition %d: %s", partition_id, error.message)

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
