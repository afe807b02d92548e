"""Limits the memory for answers that clients have not received yet, per connection and per server.

    handler ── reserve_bytes(bytes) ──▶ reads ──▶ settle(actual size) ──▶ written to the socket ──▶
               release

An answer that exceeds the budget of its connection only waits for other answers on the same
connection. While the server's budget is exhausted, connections take turns.

Invariants
    A connection prepares at most `reads_max` answers at a time.
    An answer that would exceed the connection's budget waits. A single answer may be larger,
    because a batch is never split.
    Small answers without a reservation, such as acks and offsets, never wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar

CONNECTION_BYTES_MAX = 8 << 20
SERVER_BYTES_MAX = 256 << 20
READS_AT_ONCE = 4
"""The number of answers that a connection prepares concurrently; more would delay other
connections.
"""


class AnswerBudget:
    """A server's memory budget for answers, shared by all its connections."""

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
        """Connections that may have an answer to start, in turn; the first one waits only for the
        server's budget.
        """

    @property
    def is_exhausted(self) -> bool:
        """True if a connection that is within its own budget waits because the server's budget is
        used up.
        """
        return bool(self.waiting_connections)

    def for_connection(self) -> ConnectionBudget:
        """Return the budget for a new connection."""
        return ConnectionBudget(self)

    def has_room_for(self, size: int) -> bool:
        """Return True if `size` bytes fit, or if nothing is reserved, because a single oversized
        answer is always allowed.
        """
        return self.reserved_bytes + size <= self.bytes_max or not self.reserved_bytes

    def start_waiting(self, waiting_connection: ConnectionBudget | None = None) -> None:
        """
        Start waiting answers while the budget allows it, one per connection in turn.

        Args:
            waiting_connection: a connection to add to the queue first.
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
        """Reserve `size` bytes for an answer, and wait until they are available."""
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
        """Reserve `size` bytes for an answer, or return False if it would have to wait."""
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
        """Return the size of the next waiting answer if the connection's own budget allows it."""
        while self._waiters and self._waiters[0][1].done():
            self._waiters.popleft()  # the client has disconnected
        return self._waiters[0][0] if self._waiters and self._fits(self._waiters[0][0]) else None

    def waits_for_server(self) -> bool:
        """Return True if the next answer only waits for the server's budget."""
        size = self._next_bytes()
        return size is not None and not self._server.has_room_for(size)

    def start_next(self) -> bool:
        """Start the next waiting answer if the connection's budget allows it. Return True if more
        answers are waiting.
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
        """Reduce a reservation of `size` bytes to the `actual` size of the finished answer."""
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
        """Reduce the reservation to the answer's size of `count` bytes, which is 0 if the answer
        failed.
        """
        if self._requested:
            self._budget.settle(self._requested, count)
            self._requested = 0
            self._reserved = count

    def release(self) -> None:
        """Release everything, because the client has received the answer or has disconnected."""
        self.settle(0)
        if self._reserved:
            self._budget.release(self._reserved)
            self._reserved = 0


_current: ContextVar[AnswerReservation | None] = ContextVar("answer reservation", default=None)


def begin_answer(budget: ConnectionBudget) -> AnswerReservation:
    """Begin an answer in the current task, so that `reserve_bytes` can reserve bytes for it."""
    reservation = AnswerReservation(budget)
    _current.set(reservation)
    return reservation


async def reserve_bytes(bytes_max: int) -> None:
    """
    Reserve `bytes_max` bytes for the answer in progress, and wait until they are available. A
    second call for the same answer does nothing.

    Outside a data plane, for example in the simulation, this never waits.
    """
    reservation = _current.get()
    if reservation is not None:
        await reservation.reserve(bytes_max)
