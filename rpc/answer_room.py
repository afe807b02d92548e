"""Limits the bytes of answers that wait for their clients, for each connection and for the server.

    handler ── take_room(bytes) ──▶ reads ──▶ note_size(its size) ──▶ written to the socket ──▶ free

An answer without room waits only for answers of its own connection. While the server's room is
short, connections take turns.

Invariants
    A connection reads at most `reads_max` answers at once.
    An answer that would exceed the connection's bytes waits; a single answer may be larger, because
    a batch is never cut.
    Answers that were not announced (acks, offsets: small) never wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import ContextVar

CONNECTION_BYTES_MAX = 8 << 20
SERVER_BYTES_MAX = 256 << 20
READS_AT_ONCE = 4
"""Reads of one connection at once; more would delay the reads of other connections."""


class AnswerRoom:
    """The room of a server, shared by its connections."""

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
        """Bytes of answers that are being made or have not been taken by the socket."""
        self.turns: dict[Share, None] = {}
        """Connections that may have an answer to start, in turn; the first one waits only for the
        server's room.
        """

    @property
    def short(self) -> bool:
        """True if a connection within its own limit waits because others fill the server's room."""
        return bool(self.turns)

    def share(self) -> Share:
        """Return the share of a new connection."""
        return Share(self)

    def fits(self, wanted: int) -> bool:
        """Return True if `wanted` bytes fit, or if nothing is reserved, because one oversized
        answer may always be made.
        """
        return self.reserved + wanted <= self.bytes_max or not self.reserved

    def serve(self, asker: Share | None = None) -> None:
        """Start waiting answers while there is room, one of each connection in turn."""
        if asker is not None:
            self.turns.setdefault(asker)
        while self.turns:
            share = next(iter(self.turns))
            if share.waits_for_server():
                return
            del self.turns[share]
            if share.start_next():
                self.turns[share] = None


class Share:
    """The room of one connection."""

    def __init__(self, room: AnswerRoom) -> None:
        self._room = room
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reading = 0
        self.reserved = 0

    async def take(self, wanted: int) -> None:
        """Wait for room for an answer of `wanted` bytes that is about to be made."""
        if self.take_now(wanted):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, future))
        self._room.serve(self)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.note_size(wanted, 0)
            raise

    def take_now(self, wanted: int) -> bool:
        """Take room for an answer of `wanted` bytes that is about to be made; False if it would
        have to wait.
        """
        room, ours = self._room, self.reserved
        if (
            self._waiting
            or self._reading >= room.reads_max
            or (ours and ours + wanted > room.connection_bytes_max)
            or (room.reserved and room.reserved + wanted > room.bytes_max)
        ):
            return False
        self._reading += 1
        self.reserved = ours + wanted
        room.reserved += wanted
        return True

    def _fits(self, wanted: int) -> bool:
        room = self._room
        return self._reading < room.reads_max and (
            self.reserved + wanted <= room.connection_bytes_max or not self.reserved
        )

    def _next(self) -> int | None:
        """Return the bytes of the next answer, if the connection's own room lets it be made."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()  # its client has left
        return self._waiting[0][0] if self._waiting and self._fits(self._waiting[0][0]) else None

    def waits_for_server(self) -> bool:
        """Return True if only the server's room keeps the next answer waiting."""
        wanted = self._next()
        return wanted is not None and not self._room.fits(wanted)

    def start_next(self) -> bool:
        """Start the connection's next answer if its own room allows it; True if another may
        follow.
        """
        wanted = self._next()
        if wanted is None:
            return False
        _, future = self._waiting.popleft()
        self._reading += 1
        self.reserved += wanted
        self._room.reserved += wanted
        future.set_result(None)
        return bool(self._waiting)

    def note_size(self, wanted: int, made_bytes: int) -> None:
        """Note that an answer was made and has `made_bytes` bytes, which are freed when the client
        has taken them.
        """
        self._reading -= 1
        room, left = self._room, wanted - made_bytes
        self.reserved -= left
        room.reserved -= left
        if self._waiting or room.turns:
            room.serve(self if self._waiting else None)

    def free(self, count: int) -> None:
        """Free bytes that the client has taken."""
        room = self._room
        self.reserved -= count
        room.reserved -= count
        if self._waiting or room.turns:
            room.serve(self if self._waiting else None)


class Answering:
    """The room of an answer in progress."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._wanted = 0
        self._reserved = 0

    async def take(self, wanted: int) -> None:
        """See `take_room`."""
        if not self._wanted:
            await self._share.take(wanted)
            self._wanted = wanted

    def made(self, count: int) -> None:
        """Note that the answer has `count` bytes; 0: it failed."""
        if self._wanted:
            self._share.note_size(self._wanted, count)
            self._wanted = 0
            self._reserved = count

    def end(self) -> None:
        """Free the room, because the client has taken the answer, or has left."""
        self.made(0)
        if self._reserved:
            self._share.free(self._reserved)
            self._reserved = 0


_under_way: ContextVar[Answering | None] = ContextVar("answering", default=None)


def begin_answer(share: Share) -> Answering:
    """Begin the answer that the running task makes."""
    answering = Answering(share)
    _under_way.set(answering)
    return answering


async def take_room(bytes_max: int) -> None:
    """
    Wait until the answer in progress may have up to `bytes_max` bytes; an answer that already has
    room keeps it.

    Outside a data plane, for example in the simulation, there is always room.
    """
    answering = _under_way.get()
    if answering is not None:
        await answering.take(bytes_max)
