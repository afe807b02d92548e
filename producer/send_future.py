"""The return value of `send`: awaiting it gives the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ..protocol.errors import Fate, InvalidRequestError, KeylaneError, Reason, UsageError
from ..protocol.message import Receipt
from ..rpc.race import shield
from .outgoing_batch import OutgoingBatch
from .send_budget import SendBudget

NO_CANCEL = (
    "a message that is sent is not withdrawn, so its future has no cancel(): end the wait, as with "
    "a time-out of it, "
    "or give send() a timeout_ms"
)

NO_COPY = (
    "SendFuture objects are neither copied nor pickled: await it, and copy or pickle its Receipt"
)


class SendFuture:
    """
    The future outcome of a `send`: `await future` returns the Receipt, or raises the error of the
    message.

    The outcome is final. Each await raises a new error object, with the `fate` of this message:
    whether it may be stored. A future is awaited in the event loop of its producer.

    It has no `cancel`: a message that was sent may be stored at any moment, and is not withdrawn.
    A wait may be ended, for example by `asyncio.wait_for(future, seconds)` or by cancelling the
    task that awaits it, but the message is still sent. With `send(..., timeout_ms=...)` a message
    that is not stored in time is given up.
    """

    __slots__ = ()
    if TYPE_CHECKING:  # BatchFuture has them; `help` shows what users call
        _batch: OutgoingBatch
        _index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        plain = self._batch.plain
        if plain is not None:
            # This is `batch.receipt`, written out: most receipts are awaited when they are already
            # there.
            partition_id, offset, durable, duplicate = plain
            return Receipt(partition_id, offset + self._index, durable, duplicate)
        return (yield from self._wait())

    def _wait(self) -> Generator[Any, None, Receipt]:
        batch, index = self._batch, self._index
        while type(batch.outcome) is not Receipt and not batch.settled(index):
            loop = asyncio.get_running_loop()
            if batch.loop is not loop:
                error = UsageError(Reason.OTHER_LOOP, "the message was sent in another event loop")
                error.fate = Fate.UNKNOWN  # it may be stored: it is sent in the other loop
                raise error
            if batch.settles_apart:
                yield from shield(batch.waited_for(index)).__await__()
                continue
            if (hurry := batch.hurry) is not None:
                batch.hurry = None
                hurry()
                continue
            # This wait has a future of its own: a cancelled waiter must not cancel the whole batch.
            waiter: asyncio.Future[None] = loop.create_future()
            batch.waiting[waiter] = None
            try:
                yield from waiter
            except BaseException:
                batch.waiting.pop(waiter, None)
                raise
        return batch.receipt(index)

    def done(self) -> bool:
        """Return True once the message is stored or given up."""
        batch = self._batch
        return batch.plain is not None or batch.settled(self._index)

    def result(self) -> Receipt:
        """
        Return the Receipt of a message that is stored.

        Raises:
            asyncio.InvalidStateError: the future is not `done` yet.
            KeylaneError: the message was given up; the same error as from `await`.
        """
        if not self.done():
            raise asyncio.InvalidStateError(
                "the message is not stored yet: await this future first"
            )
        return self._batch.receipt(self._index)

    def add_done_callback(self, callback: Callable[[SendFuture], object]) -> None:
        """Call `callback(future)` in the producer's event loop, soon after the message is stored or
        given up.
        """
        listeners = self._batch.listeners
        key = self._index, callback
        listeners[key] = listeners.get(key, 0) + 1

        def settled(_waiter: object = None) -> None:
            times = listeners.get(key, 0)
            if not times:
                return  # it was removed
            if self.done():
                if times == 1:
                    del listeners[key]
                else:
                    listeners[key] = times - 1
                callback(self)
            else:  # the batch's future is done before the outcome of this message is known
                self._batch.waited_for(self._index).add_done_callback(settled)

        if self.done():
            self._batch.loop.call_soon(settled)
        else:
            settled()

    def remove_done_callback(self, callback: Callable[[SendFuture], object]) -> int:
        """Stop calling `callback`, as `asyncio.wait` does at its end, and return how often it was
        added.
        """
        return self._batch.listeners.pop((self._index, callback), 0)

    def exception(self) -> KeylaneError | None:
        """
        Return the error of a message that was given up; None if it is stored.

        Raises:
            asyncio.InvalidStateError: the future is not `done` yet.
        """
        try:
            self.result()
        except KeylaneError as error:
            return error
        return None

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Raise InvalidRequestError, which names what to pickle instead."""
        raise InvalidRequestError(NO_COPY)

    def __copy__(self) -> NoReturn:
        """Raise InvalidRequestError, as pickling does."""
        raise InvalidRequestError(NO_COPY)

    @property
    def cancel(self) -> NoReturn:
        """Raise AttributeError, which names what to use instead; `hasattr` is False."""
        raise AttributeError(NO_CANCEL)

    def cancelled(self) -> bool:
        """Return False: a message that was sent is not withdrawn."""
        return False

    def __repr__(self) -> str:
        return f"<SendFuture {'done' if self.done() else 'pending'}>"


class BatchFuture(SendFuture, msgspec.Struct, frozen=True, gc=False):
    """The future of the message at an index of a batch. One is made for each message, so it has
    only two fields.
    """

    _batch: OutgoingBatch
    _index: int


class OverLimitFuture(BatchFuture, frozen=True, gc=True):
    """The future of a message that `task` queued over the limit of `budget`."""

    budget: SendBudget
    task: object

    def __await__(self) -> Generator[Any, None, Receipt]:
        self.budget.awaited(self.task)
        try:
            return (yield from SendFuture.__await__(self))
        finally:
            if not self.done():  # the wait was cancelled
                self.budget.exceeded(self.task)
