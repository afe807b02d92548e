"""Gives up messages that are not acked within their time-out, and halts their keys.

    deadline passed ─▶ the message is given up, and its key is halted
        ─▶ newer messages of the key that were never sent are given up too; `send` refuses the key
        ─▶ the caller calls `resume`, and sends them again in order

A message in flight cannot be taken out of its batch. Its future raises UNKNOWN, but its batch is
still sent, even to a newer partition: newer messages of the key may be in flight after it, and they
are not stored without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.clock import Clock
from ..protocol.errors import DeliveryTimeoutError, KeyHaltedError, KeylaneError
from ..protocol.message import unpack_properties
from ..protocol.text import key_digest, seconds
from .outgoing_batch import OutgoingBatch
from .send_budget import SendBudget
from .waiting import NO_ANSWER, NOT_SENT


class Halts:
    """The halted keys of one subject."""

    def __init__(self, subject: str, clock: Clock, budget: SendBudget) -> None:
        self.keys: set[bytes] = set()
        self._subject = subject
        self._clock = clock
        self._budget = budget

    def check(self, key: bytes) -> None:
        """Raise KeyHaltedError if `key` is halted."""
        if key in self.keys:
            text = (
                f"an older message of {key_digest(key)} of {self._subject!r} timed out, and the "
                f"key is halted"
            )
            raise KeyHaltedError(text, subject=self._subject, key=key)

    def resume(self, key: bytes) -> None:
        """Allow messages of this key to be sent again."""
        self.keys.discard(key)

    def expire(self, waiting: Iterable[tuple[OutgoingBatch, str]]) -> bool:
        """
        Halt the keys of all overdue messages, and give up the overdue messages that are in flight.

        Args:
            waiting: pairs of a batch and the reason why its messages wait.

        Returns:
            True if any message is overdue; the caller must then call `withdraw` for all batches
            that were never sent.
        """
        now_ms = self._clock.boot_ms()
        over = False
        for batch, waits_for in waiting:
            overdue = _overdue(batch, now_ms)
            over = over or bool(overdue)
            for index in overdue:
                if batch.keys[index]:
                    self.keys.add(batch.keys[index])
                if batch.sends:
                    error = self._time_out(batch, index, now_ms, waits_for or NO_ANSWER)
                    self._budget.give_up_message(batch, index, error, doubtful=True)
            if overdue and batch.sends:
                batch.drop_deadlines(overdue)
        return over

    def withdraw(self, batch: OutgoingBatch, *, waits_for: str) -> OutgoingBatch | None:
        """Give up the overdue messages and the messages of halted keys in a batch that was never
        sent, and return the batch of the messages that stay.
        """
        now_ms = self._clock.boot_ms()
        overdue = set(_overdue(batch, now_ms))
        keys = self.keys
        if not overdue and keys.isdisjoint(batch.keys):
            return batch
        taken, rest = batch.divided(lambda index: index in overdue or batch.keys[index] in keys)
        self._budget.replaced(batch, taken, rest)
        if taken is not None:
            late = set(_overdue(taken, now_ms))
            for index in range(len(taken)):
                if index in late:
                    error = self._time_out(taken, index, now_ms, waits_for or NOT_SENT)
                else:
                    error = self._error(KeyHaltedError, taken, index, KeyHaltedError.summary)
                self._budget.give_up_message(taken, index, error, doubtful=False)
            self._budget.leave(taken)
        return rest

    def _time_out(self, batch: OutgoingBatch, index: int, now_ms: int, cause: str) -> KeylaneError:
        assert batch.deadlines is not None
        at_ms, timeout_ms = batch.deadlines[index]
        took = seconds(now_ms - at_ms + timeout_ms)
        whose = key_digest(batch.keys[index])
        text = f"a message of {self._subject!r}, {whose}, was not acked in {took}: {cause}"
        return self._error(DeliveryTimeoutError, batch, index, text)

    def _error(
        self, kind: type[KeylaneError], batch: OutgoingBatch, index: int, text: str
    ) -> KeylaneError:
        packed = batch.properties_of(index)
        return kind(
            text,
            subject=self._subject,
            key=batch.keys[index],
            value=batch.values[index],
            properties=dict(unpack_properties(packed)),
        )


def _overdue(batch: OutgoingBatch, now_ms: int) -> list[int]:
    """Return the indexes of messages that are past their deadline and not settled."""
    if batch.deadlines is None or batch.first_deadline_ms > now_ms:
        return []
    return [
        index
        for index, (at_ms, _timeout_ms) in batch.deadlines.items()
        if at_ms <= now_ms and not batch.settled(index)
    ]
