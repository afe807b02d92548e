"""What `send` returns: awaiting it gives the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import msgspec

from ..protocol.errors import Fate, OtherLoopError
from ..protocol.message import Receipt
from .outgoing_batch import OutgoingBatch


class SendFuture(msgspec.Struct, frozen=True, gc=False):
    """A message on its way.  `await future` waits for its Receipt or raises what became of it, a new error each time."""

    batch: OutgoingBatch
    index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        batch, index = self.batch, self.index
        while type(batch.outcome) is not Receipt and not batch.settled(index):
            if batch.future.get_loop() is not asyncio.get_running_loop():
                error = OtherLoopError("the message was sent in another event loop")
                error.fate = Fate.UNKNOWN  # it is on its way there
                raise error
            # Shielded: one waiter that is cancelled must not cancel the whole batch.
            yield from asyncio.shield(batch.waited_for(index)).__await__()
        return batch.receipt(index)

    def done(self) -> bool:
        """True once the answer is here."""
        return self.batch.settled(self.index)
