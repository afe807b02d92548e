"""The messages that were sent, the outcomes that were reported to their senders, and the places
where they are stored at the end. Pure.

The events of sending come before those of settling, and these before what is stored.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from ..protocol.routing import logical_partition
from .events import Value
from .findings import Findings

Slot = tuple[int, int]
"""Partition id and offset."""


class _Sending(NamedTuple):
    key: bytes
    producer: str
    number: int
    strict: bool


class _Fate(NamedTuple):
    outcome: str
    partition_id: int
    offset: int
    reordered: bool
    twice: bool


_UNSETTLED = _Fate("", 0, -1, reordered=False, twice=False)


def _promised(sending: _Sending, fate: _Fate, slot: Slot) -> bool:
    """
    Return whether the order of a message at `slot` was promised, by its subject or its receipt.

    For a message that may be stored twice, only the slot in its receipt is promised.
    """
    if fate.twice:
        return not fate.reordered and (fate.partition_id, fate.offset) == slot
    return sending.strict or (fate.outcome == "stored" and not fate.reordered)


class Log:
    """
    Compares the log with the messages that were sent.

    Args:
        partitions_fixed: True if no partition was ever split, merged or moved, so that all messages
            of a key are in one.
    """

    def __init__(self, findings: Findings, *, partitions_fixed: bool = False) -> None:
        self.values: dict[Slot, Value] = {}
        """Stored value by slot."""
        self.sendings: dict[Value, _Sending] = {}
        self._findings = findings
        self._partitions_fixed = partitions_fixed
        self._fates: dict[Value, _Fate] = {}
        self._first_slot: dict[Value, Slot] = {}
        self._more_slots: defaultdict[Value, list[Slot]] = defaultdict(list)
        self._newest: dict[tuple[int, str, bytes], int] = {}
        self._last: dict[tuple[int, bytes], Slot] = {}
        self._home: dict[bytes, int] = {}
        self._strays: set[bytes] = set()
        """Keys with messages in more than one partition."""
        self._before: dict[Slot, Slot] = {}
        self._elsewhere: dict[Slot, Slot] = {}
        self._ranges: dict[int, range] = {}
        self._abandoned: set[int] = set()
        self._lost: set[int] = set()
        self._around: dict[Slot, Slot] = {}
        """Previous slot outside lost partitions, by slot, if a lost one is between them."""

    def ranged(self, partition_id: int, range_start: int, range_end: int) -> None:
        """See `events.Ranged`."""
        self._ranges[partition_id] = range(range_start, range_end)

    def belongs(self, key: bytes, partition_id: int) -> bool:
        """Return whether a partition takes messages of this key, as far as its range is known."""
        taken = self._ranges.get(partition_id)
        return taken is None or logical_partition(key) in taken

    def abandoned(self, partition_id: int) -> None:
        """See `events.Abandoned`."""
        self._abandoned.add(partition_id)

    def lost(self, partition_id: int) -> None:
        """See `events.AcceptedLost`."""
        self._lost.add(partition_id)

    def sent(self, value: Value, key: bytes, producer: str, number: int, strict: bool) -> None:
        """See `events.Sent`."""
        self.sendings[value] = _Sending(key, producer, number, strict)

    def settled(
        self,
        value: Value,
        outcome: str,
        partition_id: int = 0,
        offset: int = -1,
        reordered: bool = False,
        twice: bool = False,
    ) -> None:
        """See `events.Settled`."""
        self._fates[value] = _Fate(outcome, partition_id, offset, reordered, twice)
        sending = self.sendings.get(value)
        if reordered and sending is not None and (sending.strict or not sending.key):
            why = "its subject is strict" if sending.strict else "it has no key"
            self._findings.note("inversion", f"{value!r} was reported as reordered, although {why}")

    def stored(self, partition_id: int, offset: int, key: bytes, value: Value) -> None:
        """See `events.Stored`."""
        slot = (partition_id, offset)
        self.values[slot] = value
        sending = self.sendings.get(value)
        if sending is None or sending.key != key:
            self._findings.note(
                "phantom", f"{value!r} at {partition_id}/{offset}, which was not sent so"
            )
            return
        fate = self._fates.get(value, _UNSETTLED)
        promised = _promised(sending, fate, slot)
        first = self._first_slot.setdefault(value, slot)
        if first != slot:
            self._more_slots[value].append(slot)
            if promised and not fate.twice:
                self._findings.note(
                    "duplicate", f"{value!r} at {partition_id}/{offset} and {first}"
                )
        if fate.outcome in {"not done", "withdrawn"}:
            self._findings.note("phantom", f"{value!r} at {slot}, reported as {fate.outcome}")
        if key:
            self._keyed(slot, key, sending, promised=promised)

    def _keyed(self, slot: Slot, key: bytes, sending: _Sending, *, promised: bool) -> None:
        partition_id = slot[0]
        if promised:
            taken = self._ranges.get(partition_id)
            if taken is not None and logical_partition(key) not in taken:
                self._findings.note(
                    "inversion", f"{key!r} at {slot}: its partition is another, undeclared"
                )
            lane = (partition_id, sending.producer, key)
            before = self._newest.get(lane, -1)
            if sending.number < before:
                self._findings.note(
                    "inversion",
                    f"{key!r}: number {sending.number} of {sending.producer} at "
                    f"{slot} after {before}",
                )
            else:
                self._newest[lane] = sending.number
        last = self._last.get((partition_id, key))
        if last is not None:
            self._before[slot] = last
        elif self._home.setdefault(key, partition_id) != partition_id:
            self._strays.add(key)
            if self._partitions_fixed:
                self._findings.note(
                    "inversion", f"{key!r} is in partitions {self._home[key]} and {partition_id}"
                )
        self._last[partition_id, key] = slot

    def close(self, *, drained: bool) -> None:
        """Find what is missing in the whole log."""
        note = self._findings.note
        for value, fate in self._fates.items():
            sending = self.sendings.get(value)
            if fate.outcome in {"not done", "unknown"} and sending is not None and sending.strict:
                note("lost", f"{value!r} was given up, although its order is strict")
            first = self._first_slot.get(value)
            if fate.outcome == "flushed" and first is None:
                note(
                    "silent loss", f"{value!r} is nowhere, though a flush after it reported nothing"
                )
            if fate.outcome != "stored":
                continue
            reported = (fate.partition_id, fate.offset)
            if first is None:
                note("lost", f"{value!r} was acked and is nowhere")
            elif (
                fate.offset >= 0
                and reported != first
                and reported not in self._more_slots.get(value, ())
            ):
                note("lost", f"{value!r} is not at {reported}")
        if drained:
            for value, sending in self.sendings.items():
                if sending.strict and value not in self._fates:
                    note("starvation", f"{value!r} was never settled")
        self._join_partitions()

    def _join_partitions(self) -> None:
        """Find the promised order of each key across partitions, which is that of its producer."""
        lanes: defaultdict[tuple[str, bytes], list[tuple[int, Slot]]] = defaultdict(list)
        for value, slot in self._first_slot.items():
            sending = self.sendings[value]
            fate = self._fates.get(value, _UNSETTLED)
            if sending.key in self._strays and _promised(sending, fate, slot):
                lanes[sending.producer, sending.key].append((sending.number, slot))
        for lane in lanes.values():
            lane.sort()
            for (_, earlier), (_, later) in pairwise(lane):
                if earlier[0] != later[0] and earlier[0] not in self._abandoned:
                    self._elsewhere[later] = earlier
            left = [slot for _, slot in lane if slot[0] not in self._lost]
            for earlier, later in pairwise(left) if len(left) < len(lane) else ():
                if earlier[0] != later[0] and earlier[0] not in self._abandoned:
                    self._around[later] = earlier

    def before(self, slot: Slot) -> tuple[Slot, ...]:
        """Return the slots whose messages must be handled before the one at `slot`."""
        here, there = self._before.get(slot), self._elsewhere.get(slot)
        if self._around and slot in self._around:
            near = tuple(slot for slot in (here, there) if slot is not None)
            return (*near, self._around[slot])
        if there is None:
            return () if here is None else (here,)
        return (there,) if here is None else (here, there)
