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
        self.reserved_bytes = 0
        """Bytes reserved for answers in preparation, or held by answers not yet sent."""
        self.waiting_connections: dict[ConnectionBudget, None] = {}
        """Connections that may have an answer to start, in order of their turns; the first one
        waits only for the server's budget.
        """

    @property
    def is_exhausted(self) -> bool:
        """True if a connection within its own budget waits because others use up the server's."""
        return bool(self.waiting_connections)

    def for_connection(self) -> ConnectionBudget:
        """Return the budget of a new connection."""
        return ConnectionBudget(self)

    def has_room_for(self, size: int) -> bool:
        """Return True if `size` bytes fit, or if nothing is reserved: a single oversized answer
        is always allowed.
        """
        return self.reserved_bytes + size <= self.bytes_max or not self.reserved_bytes

    def start_waiting(self, waiting_connection: ConnectionBudget | None = None) -> None:
        """Start waiting answers while the budget allows it, one of each connection in turn;
        `waiting_connection` joins the queue of connections.
        """
        if waiting_connection is not None:
            self.waiting_connections.setdefault(waiting_connection)
        while self.waiting_connections:
            connection = next(iter(self.waiting_connections))
            if connection.waits_for_server():
                return
            del self.waiting_connections[connection]
            if connection.start_next():
                self.waiting_connections[connection] = None


class ConnectionBudget:
    """One connection's memory budget for answers."""

    def __init__(self, server: AnswerBudget) -> None:
        self._server = server
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._preparing_count = 0
        """The number of answers in preparation."""
        self.reserved_bytes = 0

    async def reserve(self, size: int) -> None:
        """Reserve `size` bytes for an answer that is to be prepared; wait until they are free."""
        if self.try_reserve(size):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, future))
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
        server, own_bytes = self._server, self.reserved_bytes
        if (
            self._waiters
            or self._preparing_count >= server.reads_max
            or (own_bytes and own_bytes + size > server.connection_bytes_max)
            or (server.reserved_bytes and server.reserved_bytes + size > server.bytes_max)
        ):
            return False
        self._preparing_count += 1
        self.reserved_bytes = own_bytes + size
        server.reserved_bytes += size
        return True

    def _fits(self, size: int) -> bool:
        server = self._server
        return self._preparing_count < server.reads_max and (
            self.reserved_bytes + size <= server.connection_bytes_max or not self.reserved_bytes
        )

    def _next_bytes(self) -> int | None:
        """Return the bytes of the next waiting answer if the connection's own budget allows it."""
        while self._waiters and self._waiters[0][1].done():
            self._waiters.popleft()  # its client has left
        return self._waiters[0][0] if self._waiters and self._fits(self._waiters[0][0]) else None

    def waits_for_server(self) -> bool:
        """Return True if the next answer waits for nothing but the server's budget."""
        size = self._next_bytes()
        return size is not None and not self._server.has_room_for(size)

    def start_next(self) -> bool:
        """Start the connection's next answer if its own budget allows it; return True if another
        may follow.
        """
        size = self._next_bytes()
        if size is None:
            return False
        _, future = self._waiters.popleft()
        self._preparing_count += 1
        self.reserved_bytes += size
        self._server.reserved_bytes += size
        future.set_result(None)
        return bool(self._waiters)

    def settle(self, size: int, actual: int) -> None:
        """Reduce a reservation of `size` bytes to the `actual` bytes of the finished answer."""
        self._preparing_count -= 1
        server, unused = self._server, size - actual
        self.reserved_bytes -= unused
        server.reserved_bytes -= unused
        if self._waiters or server.waiting_connections:
            server.start_waiting(self if self._waiters else None)

    def release(self, count: int) -> None:
        """Release the bytes of an answer that the client has received."""
        server = self._server
        self.reserved_bytes -= count
        server.reserved_bytes -= count
        if self._waiters or server.waiting_connections:
            server.start_waiting(self if self._waiters else None)


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
