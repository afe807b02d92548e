"""How much is queued and not yet answered: room for more, and nothing left."""

from __future__ import annotations

import asyncio

from ..protocol.errors import KeylaneError
from .parcel import Parcel

FAILURES_KEPT = 100


class Account:
    """Bytes and messages of all closed parcels of a producer, from `enter` to `leave` or `settled`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.messages = 0
        self.acked = 0
        self.failed = 0
        self._failures: list[KeylaneError] = []
        self._bytes_max = bytes_max
        self._room = asyncio.Event()
        self._drained = asyncio.Event()

    def enter(self, messages: int, size: int) -> None:
        """Messages joined the queue."""
        self.messages += messages
        self.bytes += size

    def leave(self, parcel: Parcel) -> None:
        """A parcel left the queue, because it is settled or because its messages went into others."""
        self.messages -= len(parcel)
        self.bytes -= parcel.size
        assert self.messages >= 0
        assert self.bytes >= 0
        if self.bytes * 2 < self._bytes_max:
            self._room.set()
        if not self.messages:
            self._drained.set()

    def settled(self, parcel: Parcel, error: KeylaneError | None) -> None:
        """A parcel met its fate."""
        if error is None:
            self.acked += len(parcel)
        else:
            self.failed += len(parcel)
            if len(self._failures) < FAILURES_KEPT:
                self._failures.append(error)
        self.leave(parcel)

    def untold(self) -> KeylaneError | None:
        """The first error since the last call that no ticket has told."""
        failures, self._failures = self._failures, []
        return next((error for error in failures if not error.told), None)

    async def room(self) -> None:
        """Wait while full, until half is free."""
        while self.bytes >= self._bytes_max:
            self._room.clear()
            await self._room.wait()

    async def drained(self) -> None:
        """Wait until nothing is queued."""
        while self.messages:
            self._drained.clear()
            await self._drained.wait()
