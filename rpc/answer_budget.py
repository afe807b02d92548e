"""Memory budgets for answers until their clients have received them: per connection and per server.

    handler ── reserve_bytes(bytes) ──▶ reads ──▶ settle(actual size) ──▶ written to the socket ──▶
               release

An answer that exceeds its connection's budget waits for answers of the same connection only. While
the server's budget is exhausted, connections take turns.

Invariants
    A connection prepares at most `reads_max` answers at a time.
    An answer that would exceed the connection's budget waits; a single answer may be larger,
    because a batch is never split.
    Answers without a reservation (acks, offsets: small) never wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar

CONNECTION_BYTES_MAX = 8 << 20
SERVER_BYTES_MAX = 256 << 20
READS_AT_ONCE = 4
"""The number of answers that a connection prepares at a time; more would delay other
connections.
"""


class AnswerBudget:
    """A server's memory budget for answers, shared by its connections."""

    def __init__(
        self,
        *,
        bytes_max: int = SERVER_BYTES_MAX,
        connection_bytes_max: int = CONNECTION_BYTES_MAX,
        reads_max: int = READS_AT_ONCE,
    ) -> None:
        self.bytes_max = bytes_max
        self.connection_bytes_max = connection_bytes_max
        self.reads_max = reads_max
        self.reserved = 0
        """Bytes reserved for answers in preparation, or held by answers not yet sent."""
        self.turns: dict[ConnectionBudget, None] = {}
        """Connections that may have an answer to start, in order of their turns; the first one
        waits only for the server's budget.
        """

    @property
    def is_exhausted(self) -> bool:
        """True if a connection within its own budget waits because others use up the server's."""
        return bool(self.turns)

    def for_connection(self) -> ConnectionBudget:
        """Return the budget of a new connection."""
        return ConnectionBudget(self)

    def fits(self, size: int) -> bool:
        """Return True if `size` bytes fit, or if nothing is reserved: a single oversized answer
        is always allowed.
        """
        return self.reserved + size <= self.bytes_max or not self.reserved

    def start_waiting(self, added: ConnectionBudget | None = None) -> None:
        """Start waiting answers while the budget allows it, one of each connection in turn; `added`
        joins the queue of connections.
        """
        if added is not None:
            self.turns.setdefault(added)
        while self.turns:
            connection = next(iter(self.turns))
            if connection.waits_for_server():
                return
            del self.turns[connection]
            if connection.start_next():
                self.turns[connection] = None


class ConnectionBudget:
    """One connection's memory budget for answers."""

    def __init__(self, server: AnswerBudget) -> None:
        self._server = server
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._preparing = 0
        """The number of answers in preparation."""
        self.reserved = 0

    async def reserve(self, size: int) -> None:
        """Reserve `size` bytes for an answer that is to be prepared; wait until they are free."""
        if self.try_reserve(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        self._server.start_waiting(self)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.settle(size, 0)
            raise

    def try_reserve(self, size: int) -> bool:
        """Reserve `size` bytes for an answer that is to be prepared; return False if that needs a
        wait.
        """
        server, own = self._server, self.reserved
        if (
            self._waiting
            or self._preparing >= server.reads_max
            or (own and own + size > server.connection_bytes_max)
            or (server.reserved and server.reserved + size > server.bytes_max)
        ):
            return False
        self._preparing += 1
        self.reserved = own + size
        server.reserved += size
        return True

    def _fits(self, size: int) -> bool:
        server = self._server
        return self._preparing < server.reads_max and (
            self.reserved + size <= server.connection_bytes_max or not self.reserved
        )

    def _next(self) -> int | None:
        """Return the bytes of the next waiting answer if the connection's own budget allows it."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()  # its client has left
        return self._waiting[0][0] if self._waiting and self._fits(self._waiting[0][0]) else None

    def waits_for_server(self) -> bool:
        """Return True if the next answer waits for nothing but the server's budget."""
        size = self._next()
        return size is not None and not self._server.fits(size)

    def start_next(self) -> bool:
        """Start the connection's next answer if its own budget allows it; return True if another
        may follow.
        """
        size = self._next()
        if size is None:
            return False
        _, future = self._waiting.popleft()
        self._preparing += 1
        self.reserved += size
        self._server.reserved += size
        future.set_result(None)
        return bool(self._waiting)

    def settle(self, size: int, actual: int) -> None:
        """Reduce a reservation of `size` bytes to the `actual` bytes of the finished answer."""
        self._preparing -= 1
        server, unused = self._server, size - actual
        self.reserved -= unused
        server.reserved -= unused
        if self._waiting or server.turns:
            server.start_waiting(self if self._waiting else None)

    def release(self, count: int) -> None:
        """Release the bytes of an answer that the client has received."""
        server = self._server
        self.reserved -= count
        server.reserved -= count
        if self._waiting or server.turns:
            server.start_waiting(self if self._waiting else None)


class AnswerReservation:
    """The reservation of one answer in progress."""

    def __init__(self, budget: ConnectionBudget) -> None:
        self._budget = budget
        self._requested = 0
        self._reserved = 0

    async def reserve(self, size: int) -> None:
        """See `reserve_bytes`."""
        if not self._requested:
            await self._budget.reserve(size)
            self._requested = size

    def settle(self, count: int) -> None:
        """Reduce the reservation to the answer's `count` bytes; 0 if the answer failed."""
        if self._requested:
            self._budget.settle(self._requested, count)
            self._requested = 0
            self._reserved = count

    def release(self) -> None:
        """Release everything: the client has received the answer, or has left."""
        self.settle(0)
        if self._reserved:
            self._budget.release(self._reserved)
            self._reserved = 0


_current: ContextVar[AnswerReservation | None] = ContextVar("answer reservation", default=None)


def begin_answer(budget: ConnectionBudget) -> AnswerReservation:
    """Begin an answer that the running task prepares; `reserve_bytes` reserves bytes for it."""
    reservation = AnswerReservation(budget)
    _current.set(reservation)
    return reservation


async def reserve_bytes(bytes_max: int) -> None:
    """
    Reserve `bytes_max` bytes for the answer in progress, and wait until they are free; a second
    call for the same answer does nothing.

    Outside a data plane, for example in the simulation, this never waits.
    """
    reservation = _current.get()
    if reservation is not None:
        await reservation.reserve(bytes_max)
