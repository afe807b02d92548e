"""The return value of `send`; awaiting it returns the receipt."""

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
    "a sent message cannot be withdrawn, so its future has no cancel(): stop waiting, for example "
    "with asyncio.wait_for, or pass timeout_ms to send()"
)

NO_COPY = "a SendFuture cannot be copied or pickled: await it, and copy or pickle its Receipt"


class SendFuture:
    """
    The future outcome of a `send`: `await future` returns the Receipt, or raises the error of the
    message.

    The outcome is final. Each await raises a new error object, whose `fate` says whether this
    message may be stored. Await a future in the event loop of its producer.

    There is no `cancel`, because a sent message may be stored at any moment and cannot be
    withdrawn. You can stop waiting, for example with `asyncio.wait_for(future, seconds)` or by
    cancelling the waiting task, but the message is still sent. With `send(..., timeout_ms=...)` a
    message that is not stored in time is given up.
    """

    __slots__ = ()
    if TYPE_CHECKING:  # fields of BatchFuture; `help` shows this class
        _batch: OutgoingBatch
        _index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        plain_receipt = self._batch.plain_receipt
        if plain_receipt is not None:
            # Inlined `batch.receipt`, because most messages are stored before they are awaited.
            partition_id, offset, durable, duplicate = plain_receipt
            return Receipt(partition_id, offset + self._index, durable, duplicate)
        return (yield from self._wait())

    def _wait(self) -> Generator[Any, None, Receipt]:
        batch, index = self._batch, self._index
        while type(batch.outcome) is not Receipt and not batch.is_settled(index):
            loop = asyncio.get_running_loop()
            if batch.loop is not loop:
                error = UsageError(Reason.OTHER_LOOP, "the message was sent in another event loop")
                error.fate = Fate.UNKNOWN  # it may be stored: it is sent in the other loop
                raise error
            if batch.settles_separately:
                yield from shield(batch.message_future(index)).__await__()
                continue
            if (send_early := batch.send_early) is not None:
                batch.send_early = None
                send_early()
                continue
            # Each wait has its own future, because a cancelled wait must not cancel the batch.
            waiter: asyncio.Future[None] = loop.create_future()
            batch.waiters[waiter] = None
            try:
                yield from waiter
            except BaseException:
                batch.waiters.pop(waiter, None)
                raise
        return batch.receipt(index)

    def done(self) -> bool:
        """Return True once the message is stored or given up."""
        batch = self._batch
        return batch.plain_receipt is not None or batch.is_settled(self._index)

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
        """Call `callback(future)` in the producer's event loop soon after the message is stored or
        given up.
        """
        listeners = self._batch.listeners
        key = self._index, callback
        listeners[key] = listeners.get(key, 0) + 1

        def call_if_settled(_waiter: object = None) -> None:
            remaining_calls = listeners.get(key, 0)
            if not remaining_calls:
                return  # it was removed
            if self.done():
                if remaining_calls == 1:
                    del listeners[key]
                else:
                    listeners[key] = remaining_calls - 1
                callback(self)
            else:  # the batch's future may be done before this message is settled
                self._batch.message_future(self._index).add_done_callback(call_if_settled)

        if self.done():
            self._batch.loop.call_soon(call_if_settled)
        else:
            call_if_settled()

    def remove_done_callback(self, callback: Callable[[SendFuture], object]) -> int:
        """Remove `callback`, and return how often it had been added."""
        return self._batch.listeners.pop((self._index, callback), 0)

    def exception(self) -> KeylaneError | None:
        """
        Return the error of a message that was given up, or None if it is stored.

        Raises:
            asyncio.InvalidStateError: the future is not `done` yet.
        """
        try:
            self.result()
        except KeylaneError as error:
            return error
        return None

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to be pickled. Always raises InvalidRequestError."""
        raise InvalidRequestError(NO_COPY)

    def __copy__(self) -> NoReturn:
        """Refuse to be copied. Always raises InvalidRequestError."""
        raise InvalidRequestError(NO_COPY)

    @property
    def cancel(self) -> NoReturn:
        """Raise AttributeError with advice, so that `hasattr` returns False."""
        raise AttributeError(NO_CANCEL)

    def cancelled(self) -> bool:
        """Return False: a sent message cannot be withdrawn."""
        return False

    def __repr__(self) -> str:
        return f"<SendFuture {'done' if self.done() else 'pending'}>"


class BatchFuture(SendFuture, msgspec.Struct, frozen=True, gc=False):
    """The future of one message, identified by batch and index; a small object, because each
    message has one.
    """

    _batch: OutgoingBatch
    _index: int


class OverLimitFuture(BatchFuture, frozen=True, gc=True):
    """The future of a message that `task` queued while `budget` was full."""

    budget: SendBudget
    task: object

    def __await__(self) -> Generator[Any, None, Receipt]:
        self.budget.record_awaited(self.task)
        try:
            return (yield from SendFuture.__await__(self))
        finally:
            if not self.done():  # the wait was cancelled
                self.budget.record_unawaited(self.task)
