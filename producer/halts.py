"""Gives up messages that are not acked within their time-out, and halts their keys.

    deadline passed ─▶ the message is given up, and its key is halted
        ─▶ newer messages of the key that were never sent are given up too; `send` refuses the key
        ─▶ the caller calls `resume`, and sends them again in order

A message in flight cannot be removed from its batch. Its future raises an error with the fate
UNKNOWN, but its batch is still sent, even to a newer partition: newer messages of the key may be in
flight behind it, and must not be stored without it.
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
        """Remove `key` from the halted keys."""
        self.keys.discard(key)

    def expire(self, waiting: Iterable[tuple[OutgoingBatch, str]]) -> bool:
        """
        Halt the keys of all overdue messages, and give up the overdue messages that are in flight.

        Args:
            waiting: pairs of a batch and the reason for its wait.

        Returns:
            True if any message is overdue; the caller must then pass every batch that was never
            sent to `withdraw`.
        """
        now_ms = self._clock.boot_ms()
        any_overdue = False
        for batch, wait_reason in waiting:
            overdue = _overdue_indexes(batch, now_ms)
            any_overdue = any_overdue or bool(overdue)
            for index in overdue:
                if batch.keys[index]:
                    self.keys.add(batch.keys[index])
                if batch.send_count:
                    error = self._timeout_error(batch, index, now_ms, wait_reason or NO_ANSWER)
                    self._budget.give_up_message(batch, index, error, doubtful=True)
            if overdue and batch.send_count:
                batch.drop_deadlines(overdue)
        return any_overdue

    def withdraw(self, batch: OutgoingBatch, *, wait_reason: str) -> OutgoingBatch | None:
        """Give up overdue messages and messages of halted keys in a batch that was never sent, and
        return a batch of the others, or None if there are none.
        """
        now_ms = self._clock.boot_ms()
        overdue = set(_overdue_indexes(batch, now_ms))
        keys = self.keys
        if not overdue and keys.isdisjoint(batch.keys):
            return batch
        withdrawn, remaining = batch.split_by(
            lambda index: index in overdue or batch.keys[index] in keys
        )
        self._budget.replaced(batch, withdrawn, remaining)
        if withdrawn is not None:
            timed_out = set(_overdue_indexes(withdrawn, now_ms))
            for index in range(len(withdrawn)):
                if index in timed_out:
                    error = self._timeout_error(withdrawn, index, now_ms, wait_reason or NOT_SENT)
                else:
                    error = self._error(KeyHaltedError, withdrawn, index, KeyHaltedError.summary)
                self._budget.give_up_message(withdrawn, index, error, doubtful=False)
            self._budget.leave(withdrawn)
        return remaining

    def _timeout_error(
        self, batch: OutgoingBatch, index: int, now_ms: int, cause: str
    ) -> KeylaneError:
        assert batch.deadlines is not None
        at_ms, timeout_ms = batch.deadlines[index]
        waited = seconds(now_ms - at_ms + timeout_ms)
        key = key_digest(batch.keys[index])
        text = f"a message of {self._subject!r}, {key}, was not acked in {waited}: {cause}"
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


def _overdue_indexes(batch: OutgoingBatch, now_ms: int) -> list[int]:
    """Return the indexes of unsettled messages that are past their deadlines."""
    if batch.deadlines is None or batch.first_deadline_ms > now_ms:
        return []
    return [
        index
        for index, (at_ms, _timeout_ms) in batch.deadlines.items()
        if at_ms <= now_ms and not batch.settled(index)
    ]
