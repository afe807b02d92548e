"""The heartbeats of the consumers of one program that wait for a change: one request for all of
them.

    consumer ─ long poll ─┐                     ┌─ news of one ─▶ its grants
    consumer ─ long poll ─┼─▶ request ─ wait ───┤
    consumer ─ long poll ─┘                     ╰─ tick, no news ─▶ all go on with the grants that they have

Waits end at common ticks, and all that was answered begins again in the same turn, so that it
shares the next request. What hurries never comes here: a report, a lease that may end soon, the
first heartbeat after a failure.

Invariants
    A heartbeat shares a request with those of the same metaservers, TLS, token and ttl in the same
    event loop. A request without an answer fails every heartbeat in it; each consumer then asks by
    itself, within its own time-outs, and the metaserver that has not answered last: so each asks
    every metaserver once, as `heartbeat_timeouts` counts them. A heartbeat ends no later than one
    that was sent alone when it began. A heartbeat that is given up leaves the request to the
    others, and nothing that fails for one consumer fails another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..protocol.control import Grants, Heartbeat
from ..protocol.errors import (
    ForeignServerError,
    KeylaneError,
    StorageError,
    UnreachableError,
)
from ..protocol.http.at_once import Heartbeats
from ..protocol.limits import SESSIONS_AT_ONCE_MAX
from ..rpc.client import MetaClient
from ..rpc.connections import Connections
from ..rpc.race import start_task

log = logging.getLogger("keylane.consumer")
GATHER_MS = 10
"""How long a heartbeat that begins at a tick waits for others: their answers come one after
another.
"""
GATHER_FIRST_MS = 50
"""The same for the first one after a join that has brought partitions: consumers are opened one
after another.
"""
APART_MS = 60_000
"""For how long each asks alone after a refusal: the metaserver may not know the call, or a consumer
may have no right.
"""
_FAILURES = (UnreachableError, StorageError, ForeignServerError)
"""Nothing is said of a session by these."""


class _Begun(NamedTuple):
    """A heartbeat that has begun."""

    body: Heartbeat
    beyond_ms: int
    """The time for an answer beyond the wait."""
    meta: MetaClient
    """Of its consumer alone."""
    answer: asyncio.Future[Grants | None]
    begun_ms: int

    def sent_at(self, now_ms: int) -> _Begun:
        """The same, whose wait ends when it would have ended if it had been sent when it began."""
        wait_ms = self.body.wait_ms - (now_ms - self.begun_ms)
        if wait_ms == self.body.wait_ms:
            return self
        return self._replace(body=replace(self.body, wait_ms=max(1, wait_ms)), begun_ms=now_ms)


class SharedHeartbeats:
    """
    Sends the heartbeats that wait, together where they may be.

    Args:
        meta: called when a request has the first heartbeats of two consumers; called again if it
            raised a KeylaneError.
        close: closes what `meta` has made.
        clock: of ticks.
        key: under which consumers find it.
    """

    def __init__(
        self,
        meta: Callable[[], MetaClient],
        close: Callable[[], Awaitable[None]],
        clock: Clock,
        key: Hashable = None,
    ) -> None:
        self._new_meta = meta
        self._close = close
        self._key = key
        self.loop = asyncio.get_running_loop()
        self.users: set[object] = set()
        self._boot_ms = clock.boot_ms
        self._began_ms = clock.boot_ms()
        self._meta: MetaClient | None = None
        self._next: list[_Begun] = []
        self._gathering: asyncio.Handle | None = None
        self._gathered_s = 0.0
        """When `_gathering` ends; the handle of a timer that is due at once does not say it in
        every event loop.
        """
        self._requests: set[asyncio.Task[None]] = set()
        self._apart_until_ms = 0

    @property
    def has_others(self) -> bool:
        """Whether there is more than one consumer to share with."""
        return len(self.users) > 1

    def wait_ms(self, longest_ms: int) -> int:
        """How long a heartbeat waits: until a tick, at least a fifth of `longest_ms` and at most
        all of it.
        """
        period_ms = _period_ms(longest_ms)
        left_ms = period_ms - self._since_tick_ms(period_ms)
        return left_ms if left_ms >= longest_ms - period_ms else left_ms + period_ms

    def _since_tick_ms(self, period_ms: int) -> int:
        return (self._boot_ms() - self._began_ms) % period_ms

    async def ask(
        self, body: Heartbeat, *, longest_ms: int, beyond_ms: int, meta: MetaClient, first: bool
    ) -> Grants | None:
        """
        Send a heartbeat that waits.

        Args:
            longest_ms: what its wait was made of.
            beyond_ms: the time for an answer beyond its wait.
            meta: of the consumer alone.
            first: it is the first one after a join that has brought partitions.

        Returns:
            The grants; None: those that the heartbeat knows.

        Raises:
            KeylaneError: as `MetaClient.heartbeat`.
        """
        if self._boot_ms() < self._apart_until_ms:
            return await meta.call(endpoints.HEARTBEAT, body, timeout_ms=beyond_ms)
        loop = asyncio.get_running_loop()
        waiting = _Begun(body, beyond_ms, meta, loop.create_future(), self._boot_ms())
        self._next.append(waiting)
        since_ms = self._since_tick_ms(_period_ms(longest_ms))
        self._send_at(
            loop.time() + max(0, GATHER_FIRST_MS if first else GATHER_MS - since_ms) / 1000
        )
        return await waiting.answer

    def _send_at(self, at_s: float) -> None:
        """Send what waits at a time of the event loop's clock, if that is not done earlier."""
        if self._gathering is not None:
            if self._gathered_s <= at_s:
                return
            self._gathering.cancel()
        self._gathered_s = at_s
        self._gathering = self.loop.call_at(at_s, self._send)

    def _send(self) -> None:
        now_ms = self._boot_ms()
        waiting = [each.sent_at(now_ms) for each in self._next if not each.answer.done()]
        self._next.clear()
        self._gathering = None
        for start in range(0, len(waiting), SESSIONS_AT_ONCE_MAX):
            part = waiting[start : start + SESSIONS_AT_ONCE_MAX]
            request = start_task(self._request(part), name="heartbeats")
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
            _end_without_takers(request, part)

    async def _request(self, waiting: Sequence[_Begun]) -> None:
        try:
            if len(waiting) == 1:
                await _ask_alone(waiting[0])
            elif not await self._ask_together(waiting):
                now_ms = self._boot_ms()
                self._apart_until_ms = now_ms + APART_MS
                alone = [_ask_alone(each.sent_at(now_ms)) for each in waiting]
                await asyncio.gather(*alone, return_exceptions=True)
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            for each in waiting:
                each.answer.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            for each in waiting:
                _fail(each, error)

    async def _ask_together(self, waiting: Sequence[_Begun]) -> bool:
        """Send one request; False: it was refused or cannot be made, and no heartbeat is
        answered.
        """
        asked = ""
        try:
            if self._meta is None:
                self._meta = self._new_meta()
            asked = self._meta.first
            answers = await self._meta.call(
                endpoints.HEARTBEATS,
                Heartbeats(heartbeats=tuple(each.body for each in waiting)),
                wait_ms=min(each.body.wait_ms for each in waiting),
                timeout_ms=min(each.beyond_ms for each in waiting),
            )
        except _FAILURES as error:
            # Each client has an order of its own: those of the consumers must not ask the same
            # metaserver again.
            for each in waiting:
                each.meta.put_last(asked)
                _fail(each, error.copy())
            return True
        except KeylaneError as error:
            log.info("heartbeats are sent one by one: %s", error.message)
            return False
        news = {told.session: told for told in answers.news}
        for each in waiting:
            told = news.get(each.body.session)
            if told is not None and told.error is not None:
                _fail(each, told.error.error())
            elif not each.answer.done():
                each.answer.set_result(None if told is None else told.grants)
        return True

    async def leave(self, user: object) -> None:
        """Share no more; the last one of all closes the connection."""
        self.users.discard(user)
        if not self.users:
            # Other threads have event loops and consumers of their own, and keys of their own.
            if _shared.get(self._key) is self:
                _shared.pop(self._key, None)
            await self.close()

    async def close(self) -> None:
        """End what is under way, and close the connection."""
        if self._gathering is not None:
            self._gathering.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        if self._meta is not None:
            await self._close()


async def _ask_alone(waiting: _Begun) -> None:
    if waiting.answer.done():  # given up: its consumer may have closed its connection
        return
    try:
        grants = await waiting.meta.call(
            endpoints.HEARTBEAT, waiting.body, timeout_ms=waiting.beyond_ms
        )
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        _fail(waiting, error)
    else:
        if not waiting.answer.done():
            waiting.answer.set_result(grants)


def _fail(waiting: _Begun, error: BaseException) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)


def _end_without_takers(request: asyncio.Task[None], waiting: Sequence[_Begun]) -> None:
    """Cancel a request when every heartbeat in it was given up."""
    left = len(waiting)

    def ended(answer: asyncio.Future[Grants | None]) -> None:
        nonlocal left
        left -= answer.cancelled()
        if not left:
            request.cancel()

    for each in waiting:
        each.answer.add_done_callback(ended)


def _period_ms(longest_ms: int) -> int:
    """The time between two ticks, so that a wait can begin at any time: a short one is added to the
    next.
    """
    return max(1, longest_ms * 4 // 5)


_shared: WeakValueDictionary[Hashable, SharedHeartbeats] = WeakValueDictionary()
"""By event loop, metaservers, TLS, token and ttl; weak, because what is shared keeps its event
loop.
"""


def heartbeats_for(
    user: object,
    connections: Connections,
    addresses: tuple[str, ...],
    clock: Clock,
    *,
    ttl_ms: int,
) -> SharedHeartbeats:
    """
    The heartbeats that a consumer with these open connections shares, until
    `SharedHeartbeats.leave`.

    Consumers of another `ttl_ms` share others: the shortest wait is that of all in a request.
    """
    loop = asyncio.get_running_loop()
    key = (id(loop), addresses, connections.kind, ttl_ms)
    known = _shared.get(key)
    if known is None or known.loop is not loop:
        network, close = connections.another()

        def meta() -> MetaClient:
            return MetaClient(network(), addresses)

        known = _shared[key] = SharedHeartbeats(meta, close, clock, key)
    known.users.add(user)
    return known
