"""Gives up messages that are not acked within their timeout, and halts their keys.

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
from ..protocol.text import format_seconds, key_digest
from .outgoing_batch import OutgoingBatch
from .send_budget import SendBudget
from .waiting import NO_ANSWER, NOT_SENT


class HaltedKeys:
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

    def expire_overdue(self, waiting: Iterable[tuple[OutgoingBatch, str]]) -> bool:
        """
        Halt the keys of all overdue messages, and give up the overdue messages that are in flight.

        Args:
            waiting: pairs of a batch and the reason why it is waiting.

        Returns:
            True if any message is overdue; the caller must then pass every batch that was never
            sent to `withdraw`.
        """
        now_ms = self._clock.boot_ms()
        any_overdue = False
        for batch, wait_reason in waiting:
            overdue_indexes = _overdue_indexes(batch, now_ms)
            any_overdue = any_overdue or bool(overdue_indexes)
            for index in overdue_indexes:
                if batch.keys[index]:
                    self.keys.add(batch.keys[index])
                if batch.send_count:
                    error = self._timeout_error(batch, index, now_ms, wait_reason or NO_ANSWER)
                    self._budget.give_up_message(batch, index, error, doubtful=True)
            if overdue_indexes and batch.send_count:
                batch.drop_deadlines(overdue_indexes)
        return any_overdue

    def withdraw(self, batch: OutgoingBatch, *, wait_reason: str) -> OutgoingBatch | None:
        """From a batch that was never sent, give up overdue messages and messages of halted keys.
        Return a batch of the others, or None if there are none.
        """
        now_ms = self._clock.boot_ms()
        overdue_indexes = set(_overdue_indexes(batch, now_ms))
        halted_keys = self.keys
        if not overdue_indexes and halted_keys.isdisjoint(batch.keys):
            return batch
        withdrawn_batch, remaining_batch = batch.split(
            lambda index: index in overdue_indexes or batch.keys[index] in halted_keys
        )
        self._budget.replace(batch, withdrawn_batch, remaining_batch)
        if withdrawn_batch is not None:
            still_overdue = set(_overdue_indexes(withdrawn_batch, now_ms))
            for index in range(len(withdrawn_batch)):
                if index in still_overdue:
                    error = self._timeout_error(
                        withdrawn_batch, index, now_ms, wait_reason or NOT_SENT
                    )
                else:
                    error = self._build_error(
                        KeyHaltedError, withdrawn_batch, index, KeyHaltedError.summary
                    )
                self._budget.give_up_message(withdrawn_batch, index, error, doubtful=False)
            self._budget.release(withdrawn_batch)
        return remaining_batch

    def _timeout_error(
        self, batch: OutgoingBatch, index: int, now_ms: int, cause: str
    ) -> KeylaneError:
        assert batch.deadlines is not None
        deadline_ms, timeout_ms = batch.deadlines[index]
        waited_text = format_seconds(now_ms - (deadline_ms - timeout_ms))
        key = key_digest(batch.keys[index])
        text = f"a message of {self._subject!r}, {key}, was not acked in {waited_text}: {cause}"
        return self._build_error(DeliveryTimeoutError, batch, index, text)

    def _build_error(
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
        for index, (deadline_ms, _timeout_ms) in batch.deadlines.items()
        if deadline_ms <= now_ms and not batch.is_settled(index)
    ]
