"""What `send` returns: awaiting it gives the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import msgspec

from ..protocol.errors import Fate, OtherLoopError
from ..protocol.message import Receipt
from .parcel import Parcel


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """A message on its way.  `await ticket` waits for its Receipt or raises what became of it, a new error each time."""

    parcel: Parcel
    index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        parcel, index = self.parcel, self.index
        while type(parcel.outcome) is not Receipt and not parcel.settled(index):
            if parcel.future.get_loop() is not asyncio.get_running_loop():
                error = OtherLoopError("the message was sent in another event loop")
                error.fate = Fate.UNKNOWN  # it is on its way there
                raise error
            # Shielded: one waiter that is cancelled must not cancel the whole batch.
            yield from asyncio.shield(parcel.waited_for(index)).__await__()
        return parcel.receipt(index)

    @property
    def done(self) -> bool:
        """True once the answer is here."""
        return self.parcel.settled(self.index)
