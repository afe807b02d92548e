"""The heartbeats of the consumers of one program that wait for a change: one request for all of them.

    consumer ─ long poll ─┐                     ┌─ news of one ─▶ its grants
    consumer ─ long poll ─┼─▶ request ─ wait ───┤
    consumer ─ long poll ─┘                     ╰─ tick, no news ─▶ all go on with the grants that they have

Waits end at common ticks, and all that was answered begins again in the same turn, so that it shares the next request.
What hurries never comes here: a report, a lease that may end soon, the first heartbeat after a failure.

Invariants
    A heartbeat shares a request with those of the same metaservers, TLS and token in the same event loop.
    A request without an answer fails every heartbeat in it; each consumer then asks by itself, within its own time-outs.
    A heartbeat that is given up leaves the request to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

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

GATHER_MS = 10
"""How long a heartbeat that begins at a tick waits for others: their answers come one after another."""
GATHER_FIRST_MS = 50
"""The same for the first one after a join that has brought partitions: consumers are opened one after another."""
APART_MS = 60_000
"""For how long each asks alone after a refusal: the metaserver may not know the call, or a consumer may have no right."""
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


class SharedHeartbeats:
    """
    Sends the heartbeats that wait, together where they may be.

    Args:
        meta: called when a request has the first heartbeats of two consumers.
        close: closes what `meta` has made.
        clock: of ticks.
    """

    def __init__(
        self, meta: Callable[[], MetaClient], close: Callable[[], Awaitable[None]], clock: Clock
    ) -> None:
        self._new_meta = meta
        self._close = close
        self.loop = asyncio.get_running_loop()
        self.users: set[object] = set()
        self._boot_ms = clock.boot_ms
        self._began_ms = clock.boot_ms()
        self._meta: MetaClient | None = None
        self._next: list[_Begun] = []
        self._gathering: asyncio.Handle | None = None
        self._gathered_s = 0.0
        """When `_gathering` ends; the handle of a timer that is due at once does not say it in every event loop."""
        self._requests: set[asyncio.Task[None]] = set()
        self._apart_until_ms = 0

    @property
    def has_others(self) -> bool:
        """Whether there is more than one consumer to share with."""
        return len(self.users) > 1

    def wait_ms(self, longest_ms: int) -> int:
        """How long a heartbeat waits: until a tick, at least a fifth of `longest_ms` and at most all of it."""
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
            return await meta.heartbeat(body, timeout_ms=beyond_ms)
        loop = asyncio.get_running_loop()
        waiting = _Begun(body, beyond_ms, meta, loop.create_future())
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
        waiting = [each for each in self._next if not each.answer.done()]
        self._next.clear()
        self._gathering = None
        for start in range(0, len(waiting), SESSIONS_AT_ONCE_MAX):
            part = waiting[start : start + SESSIONS_AT_ONCE_MAX]
            request = asyncio.create_task(self._request(part), name="heartbeats")
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
            _end_without_takers(request, part)

    async def _request(self, waiting: Sequence[_Begun]) -> None:
        try:
            if len(waiting) == 1:
                await _ask_alone(waiting[0])
            elif not await self._ask_together(waiting):
                self._apart_until_ms = self._boot_ms() + APART_MS
                await asyncio.gather(*map(_ask_alone, waiting))
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
        """Send one request; False: it was refused, and no heartbeat is answered."""
        if self._meta is None:
            self._meta = self._new_meta()
        try:
            answers = await self._meta.heartbeats(
                Heartbeats(heartbeats=tuple(each.body for each in waiting)),
                wait_ms=min(each.body.wait_ms for each in waiting),
                timeout_ms=min(each.beyond_ms for each in waiting),
            )
        except _FAILURES as error:
            for each in waiting:
                _fail(each, error.copy(error.fate))
            return True
        except KeylaneError:
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
            for key in [key for key, known in _shared.items() if known is self]:
                del _shared[key]
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
    try:
        grants = await waiting.meta.heartbeat(waiting.body, timeout_ms=waiting.beyond_ms)
    except KeylaneError as error:
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
    """The time between two ticks, so that a wait can begin at any time: a short one is added to the next."""
    return max(1, longest_ms * 4 // 5)


_shared: WeakValueDictionary[Hashable, SharedHeartbeats] = WeakValueDictionary()
"""By event loop, metaservers, TLS and token; weak, because what is shared keeps its event loop."""


def heartbeats_for(
    user: object, connections: Connections, addresses: tuple[str, ...], clock: Clock
) -> SharedHeartbeats:
    """The heartbeats that a consumer with these open connections shares, until `SharedHeartbeats.leave`."""
    loop = asyncio.get_running_loop()
    key = (id(loop), addresses, connections.kind)
    known = _shared.get(key)
    if known is None or known.loop is not loop:
        network, close = connections.another()

        def meta() -> MetaClient:
            return MetaClient(network(), addresses)

        known = _shared[key] = SharedHeartbeats(meta, close, clock)
    known.users.add(user)
    return known
