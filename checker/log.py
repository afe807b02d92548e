"""Compares the messages that were sent, the outcomes that were reported to their senders, and the
final log. Pure.

All `Sent` events must precede the `Settled` events, which must precede the `Stored` events.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from ..protocol.routing import logical_partition
from .events import Value
from .findings import Findings

Slot = tuple[int, int]
"""A partition id and an offset."""


class _SentMessage(NamedTuple):
    key: bytes
    producer: str
    number: int
    strict: bool


class _SendOutcome(NamedTuple):
    result: str
    partition_id: int
    offset: int
    reordered: bool
    twice: bool


_UNSETTLED = _SendOutcome("", 0, -1, reordered=False, twice=False)


def _is_order_promised(message: _SentMessage, outcome: _SendOutcome, slot: Slot) -> bool:
    """
    Return True if the subject or the receipt promised the order of the message at `slot`.

    If a message may be stored twice, the promise covers only the slot in its receipt.
    """
    if outcome.twice:
        return not outcome.reordered and (outcome.partition_id, outcome.offset) == slot
    return message.strict or (outcome.result == "stored" and not outcome.reordered)


class Log:
    """
    Checks the final log against the messages that were sent.

    Args:
        partitions_fixed: True if no partition was ever split, merged or moved. All messages of a
            key are then in one partition.
    """

    def __init__(self, findings: Findings, *, partitions_fixed: bool = False) -> None:
        self.values: dict[Slot, Value] = {}
        """Maps slots to stored values."""
        self.sent_messages: dict[Value, _SentMessage] = {}
        self._findings = findings
        self._partitions_fixed = partitions_fixed
        self._outcomes: dict[Value, _SendOutcome] = {}
        self._first_slots: dict[Value, Slot] = {}
        self._further_slots: defaultdict[Value, list[Slot]] = defaultdict(list)
        self._newest_numbers: dict[tuple[int, str, bytes], int] = {}
        self._last_slots: dict[tuple[int, bytes], Slot] = {}
        self._first_partitions: dict[bytes, int] = {}
        self._scattered_keys: set[bytes] = set()
        """The keys that have messages in more than one partition."""
        self._previous_in_partition: dict[Slot, Slot] = {}
        self._previous_elsewhere: dict[Slot, Slot] = {}
        self._partition_ranges: dict[int, range] = {}
        self._abandoned_partitions: set[int] = set()
        self._lost_partitions: set[int] = set()
        self._previous_not_lost: dict[Slot, Slot] = {}
        """Maps a slot to the previous slot of its key outside lost partitions, if there is a lost
        slot between the two.
        """

    def on_ranged(self, partition_id: int, range_start: int, range_end: int) -> None:
        """See `events.Ranged`."""
        self._partition_ranges[partition_id] = range(range_start, range_end)

    def is_covered(self, key: bytes, partition_id: int) -> bool:
        """Return True if a partition covers this key, or if the partition's range is unknown."""
        covered = self._partition_ranges.get(partition_id)
        return covered is None or logical_partition(key) in covered

    def on_abandoned(self, partition_id: int) -> None:
        """See `events.Abandoned`."""
        self._abandoned_partitions.add(partition_id)

    def on_lost(self, partition_id: int) -> None:
        """See `events.AcceptedLost`."""
        self._lost_partitions.add(partition_id)

    def on_sent(self, value: Value, key: bytes, producer: str, number: int, strict: bool) -> None:
        """See `events.Sent`."""
        self.sent_messages[value] = _SentMessage(key, producer, number, strict)

    def on_settled(
        self,
        value: Value,
        outcome: str,
        partition_id: int = 0,
        offset: int = -1,
        reordered: bool = False,
        twice: bool = False,
    ) -> None:
        """See `events.Settled`."""
        self._outcomes[value] = _SendOutcome(outcome, partition_id, offset, reordered, twice)
        message = self.sent_messages.get(value)
        if reordered and message is not None and (message.strict or not message.key):
            reason = "its subject is strict" if message.strict else "it has no key"
            self._findings.note(
                "inversion", f"{value!r} was reported as reordered, although {reason}"
            )

    def on_stored(self, partition_id: int, offset: int, key: bytes, value: Value) -> None:
        """See `events.Stored`."""
        slot = (partition_id, offset)
        self.values[slot] = value
        message = self.sent_messages.get(value)
        if message is None or message.key != key:
            self._findings.note(
                "phantom", f"{value!r} at {partition_id}/{offset} was never sent with this key"
            )
            return
        outcome = self._outcomes.get(value, _UNSETTLED)
        is_promised = _is_order_promised(message, outcome, slot)
        first_slot = self._first_slots.setdefault(value, slot)
        if first_slot != slot:
            self._further_slots[value].append(slot)
            if is_promised and not outcome.twice:
                self._findings.note(
                    "duplicate", f"{value!r} at {partition_id}/{offset} and {first_slot}"
                )
        if outcome.result in {"not done", "withdrawn"}:
            self._findings.note("phantom", f"{value!r} at {slot}, reported as {outcome.result}")
        if key:
            self._check_keyed(slot, key, message, is_promised=is_promised)

    def _check_keyed(
        self, slot: Slot, key: bytes, message: _SentMessage, *, is_promised: bool
    ) -> None:
        """Check the order of a keyed message within its partition, and note its predecessor."""
        partition_id = slot[0]
        if is_promised:
            if not self.is_covered(key, partition_id):
                self._findings.note(
                    "inversion", f"{key!r} at {slot}: it left its partition, which was not declared"
                )
            lane = (partition_id, message.producer, key)
            newest = self._newest_numbers.get(lane, -1)
            if message.number < newest:
                self._findings.note(
                    "inversion",
                    f"{key!r}: number {message.number} of {message.producer} at "
                    f"{slot} after {newest}",
                )
            else:
                self._newest_numbers[lane] = message.number
        last_slot = self._last_slots.get((partition_id, key))
        if last_slot is not None:
            self._previous_in_partition[slot] = last_slot
        elif self._first_partitions.setdefault(key, partition_id) != partition_id:
            self._scattered_keys.add(key)
            if self._partitions_fixed:
                self._findings.note(
                    "inversion",
                    f"{key!r} is in partitions {self._first_partitions[key]} and {partition_id}",
                )
        self._last_slots[partition_id, key] = slot

    def close(self, *, drained: bool) -> None:
        """Find messages that are missing once the whole log has been checked."""
        note = self._findings.note
        for value, outcome in self._outcomes.items():
            message = self.sent_messages.get(value)
            if outcome.result in {"not done", "unknown"} and message is not None and message.strict:
                note("lost", f"{value!r} was given up, although its order is strict")
            first_slot = self._first_slots.get(value)
            if outcome.result == "flushed" and first_slot is None:
                note(
                    "silent loss",
                    f"{value!r} is not in the log, though a later flush raised no error",
                )
            if outcome.result != "stored":
                continue
            reported_slot = (outcome.partition_id, outcome.offset)
            if first_slot is None:
                note("lost", f"{value!r} was acked, but is not in the log")
            elif (
                outcome.offset >= 0
                and reported_slot != first_slot
                and reported_slot not in self._further_slots.get(value, ())
            ):
                note("lost", f"{value!r} is not at {reported_slot}")
        if drained:
            for value, message in self.sent_messages.items():
                if message.strict and value not in self._outcomes:
                    note("starvation", f"{value!r} was never settled")
        self._find_order_across_partitions()

    def _find_order_across_partitions(self) -> None:
        """Find the promised order of each key's messages across partitions: the order in which a
        producer sent them.
        """
        lanes: defaultdict[tuple[str, bytes], list[tuple[int, Slot]]] = defaultdict(list)
        for value, slot in self._first_slots.items():
            message = self.sent_messages[value]
            outcome = self._outcomes.get(value, _UNSETTLED)
            if message.key in self._scattered_keys and _is_order_promised(message, outcome, slot):
                lanes[message.producer, message.key].append((message.number, slot))
        for lane in lanes.values():
            lane.sort()
            for (_, earlier), (_, later) in pairwise(lane):
                if earlier[0] != later[0] and earlier[0] not in self._abandoned_partitions:
                    self._previous_elsewhere[later] = earlier
            not_lost = [slot for _, slot in lane if slot[0] not in self._lost_partitions]
            if len(not_lost) == len(lane):
                continue
            for earlier, later in pairwise(not_lost):
                if earlier[0] != later[0] and earlier[0] not in self._abandoned_partitions:
                    self._previous_not_lost[later] = earlier

    def predecessors(self, slot: Slot) -> tuple[Slot, ...]:
        """Return the slots whose messages must be handled before the one at `slot`."""
        candidates = (
            self._previous_in_partition.get(slot),
            self._previous_elsewhere.get(slot),
            self._previous_not_lost.get(slot),
        )
        return tuple(each for each in candidates if each is not None)
