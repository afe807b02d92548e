"""How much is queued and not yet answered: room for more, and nothing left.  How much was given up untold."""

from __future__ import annotations

import asyncio

from ..protocol.errors import GivenUpError, KeylaneError
from ..protocol.message import Receipt
from .given_up import GivenUp, Untold
from .parcel import Parcel


class Account:
    """Bytes and messages of all closed parcels of a producer, from `enter` until they are answered or leave."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.messages = 0
        self.acked = 0
        self.failed = 0
        self._untold = Untold()
        self._bytes_max = bytes_max
        self._room = asyncio.Event()
        self._drained = asyncio.Event()

    def enter(self, messages: int, size: int) -> None:
        """Messages joined the queue."""
        self.messages += messages
        self.bytes += size

    def leave(self, parcel: Parcel) -> None:
        """A parcel left the queue, because it is settled or because its messages went into others."""
        self.messages -= len(parcel) - parcel.expired
        self.bytes -= parcel.size
        assert self.messages >= 0
        assert self.bytes >= 0
        if self.bytes * 2 < self._bytes_max:
            self._room.set()
        if not self.messages:
            self._drained.set()

    def replaced(self, parcel: Parcel, *rest: Parcel | None) -> None:
        """The messages of a parcel went into others, which stay in the queue."""
        for one in rest:
            if one is not None:
                self.enter(len(one), one.size)
        self.leave(parcel)

    def stored(self, parcel: Parcel, receipt: Receipt) -> None:
        """The messages of a parcel are stored one after another from `receipt.offset` on."""
        self.acked += parcel.settle(receipt)
        self.leave(parcel)

    def give_up(self, parcel: Parcel, error: KeylaneError) -> None:
        """The messages of a parcel are given up."""
        outcome = GivenUp(error, self._untold, doubtful=parcel.doubtful)
        unknown = parcel.unknown_count()
        count = parcel.settle(outcome)
        outcome.count(count, unknown)
        self.failed += count
        self.leave(parcel)

    def give_up_message(
        self, parcel: Parcel, index: int, error: KeylaneError, *, doubtful: bool
    ) -> None:
        """One message of a parcel is given up; the parcel stays where it is."""
        outcome = GivenUp(error, self._untold, doubtful=doubtful)
        if not parcel.settle_message(index, outcome):
            return
        outcome.count(1, doubtful or parcel.may_be_stored(index))
        parcel.expired += 1
        self.failed += 1
        self.messages -= 1
        if not self.messages:
            self._drained.set()

    def untold(self) -> GivenUpError | None:
        """What was given up since the last call and not told by a ticket; told from now on."""
        summary, self._untold = self._untold, Untold()
        return summary.error()

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
