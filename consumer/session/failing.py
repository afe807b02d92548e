"""The messages of a partition that fail or hang, of which the oldest is named to operators. Pure.

    fails, and is tried again in place; hangs in its handler ─▶ known ─▶ each ack names the oldest
        ─▶ handled, set aside, or given to the next owner ─▶ forgotten

Invariant
    A message is named from its first failure on until its ack leaves. A redriven message, which
    blocks nothing but its own key, is named only if there is no other.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import FailingMessage, Failure, failing_message
from ...protocol.text import key_digest
from .offsets import HandledOffsets

FAILING_MAX = 1_000
"""The largest number of messages that are remembered."""
Ref = tuple[int, int]


class LastFailure(NamedTuple):
    """The last failure of a message, and since when it has been failing."""

    key: bytes
    since_ms: int
    failure: Failure
    running_ms: int | None
    """For how long its handler has been hanging; None if it is not."""


class FailingMessages:
    """The failing and hanging messages, by the partition that stores them and their offset."""

    __slots__ = ("_own", "_redriven")

    def __init__(self) -> None:
        self._own: dict[Ref, LastFailure] = {}
        self._redriven: dict[Ref, LastFailure] = {}

    def __bool__(self) -> bool:
        return bool(self._own or self._redriven)

    def record(
        self, message: Message, failure: Failure, *, is_own: bool, running_ms: int | None = None
    ) -> bool:
        """
        Record the last failure of a message.

        Args:
            is_own: False for a redriven message.
            running_ms: for how long it has been hanging; None: it failed.

        Returns:
            True if it was not known to hang before.
        """
        known = self._own if is_own else self._redriven
        ref = message.partition_id, message.offset
        before = known.get(ref)
        if before is None and len(known) >= FAILING_MAX:
            return False
        since_ms = failure.at_ms - (running_ms or 0) if before is None else before.since_ms
        known[ref] = LastFailure(message.key, since_ms, failure, running_ms)
        return before is None or before.running_ms is None

    def forget(self, ref: Ref) -> None:
        """Forget a message that is handled, set aside, or given to the next owner."""
        self._own.pop(ref, None)
        self._redriven.pop(ref, None)

    def forget_acked(self, ranges: tuple[Range, ...]) -> None:
        """Forget messages of this partition whose acks leave."""
        if self._own and ranges:
            acked = IntervalSet(ranges)
            self._own = {ref: last for ref, last in self._own.items() if ref[1] not in acked}

    def oldest(self, handled: HandledOffsets) -> FailingMessage | None:
        """Return the oldest message of this partition that is not among the `handled` offsets; if
        there is none, the oldest redriven one.
        """
        for ref in sorted(self._own):
            if ref[1] not in handled:
                return _report(ref, self._own[ref], source=None)
        if not self._redriven:
            return None
        ref = min(self._redriven)
        return _report(ref, self._redriven[ref], source=ref[0])


def _report(ref: Ref, last: LastFailure, *, source: int | None) -> FailingMessage:
    return failing_message(
        ref[1],
        last.failure,
        key_digest=key_digest(last.key),
        since_ms=last.since_ms,
        source=source,
        running_ms=last.running_ms,
    )
