"""What `send` returns: awaiting it gives the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import msgspec

from ..protocol.errors import OtherLoopError
from ..protocol.message import Receipt
from .parcel import Parcel


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """A message on its way.  `await ticket` waits for its Receipt or raises what became of it."""

    parcel: Parcel
    index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        future = self.parcel.future
        if not future.done():
            if future.get_loop() is not asyncio.get_running_loop():
                raise OtherLoopError("the message was sent in another event loop")
            # Shielded: one waiter that is cancelled must not cancel the whole batch.
            yield from asyncio.shield(future).__await__()
        return self.parcel.receipt(self.index)

    @property
    def done(self) -> bool:
        """True once the answer is here."""
        return self.parcel.future.done()
