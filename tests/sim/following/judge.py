"""The judge of followers: what each was given, held against what was sent and what the brokers'
disks have at the end. Pure.

It knows no lineage. Of the partitions that have a key's logical partition in their range, one is
open at a time and a later one has a higher id: so a key's messages come in the order of partition
id and offset. And they come in the order in which each producer has numbered them, where that is
promised.

A subject that is cut over has a message at its first place, and later at the place of its row,
which has the same value: it comes once, from whichever place; but a row of a row may come after the
message, where docs/SPARK.md allows that. A subject that is deleted and created anew has several
lives: none of two comes together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keylane.checker.events import Event, Ranged, Sent, Settled, Stored
from keylane.protocol.routing import logical_partition
from sim.following.notes import Given, Kept, Note, Opened, Passed, Told

PROBLEMS_MAX = 8
Place = tuple[int, int]
"""Partition id and offset."""


@dataclass
class Truth:
    """What was sent, and what is stored at the end."""

    stored: dict[Place, tuple[bytes, bytes]] = field(default_factory=dict)
    """Key and value, of messages that retention has removed too."""
    sent: dict[bytes, tuple[int, str, int]] = field(default_factory=dict)
    """Value → the instant, the producer and its number of the message."""
    settled: dict[Hashable, int] = field(default_factory=dict)
    """Identity → the instant at which the producer was told of the message's place."""
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    firsts: Mapping[int, int] = field(default_factory=dict)
    """Partition id → the first offset on the broker's disk at the end."""
    removing: Mapping[int, int] = field(default_factory=dict)
    """Partition id → the end of what was removed, also where the broker died meanwhile, so that
    some is there again.
    """
    lost: Collection[int] = ()
    """Partitions on lost disks."""
    in_order: bool = True
    """Messages of a producer are stored in the order of their numbers."""
    static: bool = False
    """Partitions are in logic queues."""
    members: Collection[int] | None = None
    """The partitions in which readers find messages at the end; None: all that are left."""
    carried: bool = False
    """Rows take the place of messages, with the same values."""
    lives: Sequence[Collection[int]] = ()
    """The partitions of each subject that had the name, where there were several."""

    def identity(self, place: Place, value: bytes) -> Hashable:
        """What tells a message from all others, wherever it is stored."""
        return value if self.carried else place

    def is_in_range(self, place: Place, key: bytes) -> bool:
        """Whether a message lies in a partition that has its key's logical partition: such messages
        of a key have an order.
        """
        start, end = self.ranges.get(place[0], (0, 0))
        return bool(key) and start <= logical_partition(key) < end

    def is_member(self, partition_id: int) -> bool:
        """Whether readers find messages in a partition at the end, or found them before retention
        took them.
        """
        if self.members is not None and partition_id not in self.members:
            return False
        return partition_id not in self.lost


def truth_of(
    history: Iterable[Event | None],
    *,
    partitions: Collection[int],
    firsts: Mapping[int, int],
    lost: Collection[int],
    **more: Any,
) -> Truth:
    """The truth about `partitions`, out of a history with the final logs; `more` are fields of a
    truth.
    """
    truth = Truth(firsts=firsts, lost=lost, **more)
    for instant, event in enumerate(history):
        match event:
            case Sent(value=bytes() as value):
                truth.sent[value] = instant, event.producer, event.number
            case Settled(outcome="stored"):
                place = event.partition_id, event.offset
                truth.settled[truth.identity(place, event.value)] = instant
            case Stored(value=bytes() as value) if event.partition_id in partitions:
                truth.stored[event.partition_id, event.offset] = event.key, value
            case Ranged():
                truth.ranges[event.partition_id] = event.range_start, event.range_end
    return truth


class FollowingLife:
    """What a program has seen since it last began without kept positions."""

    def __init__(self, truth: Truth, name: str, *, in_turn: bool, notes_removals: bool) -> None:
        self._truth = truth
        self._in_turn = in_turn
        self._name = name
        self.given: dict[Hashable, Given] = {}
        """By identity, in the order in which they were given."""
        self.opened: Opened | None = None
        self._kept = 0
        """The number of those in `given` that are behind the positions which were kept last."""
        self._repeats: dict[Hashable, Given] = {}
        """By identity, the row that came last, of those which may come a second time."""
        self._kept_repeats: dict[Hashable, Given] = {}
        self._passed: dict[int, int] = {}
        """Partition id → the reader's position, of one that notes it."""
        self._kept_passed: dict[int, int] = {}
        self._told: dict[int, int] | None = {} if notes_removals else None
        """Partition id → the end of what the program was told to be removed; None: it does not note
        that.
        """
        self.problems: list[str] = []

    def told(self, note: Told) -> None:
        """Note what a program was told to be removed."""
        if self._told is not None:
            self._told[note.partition_id] = max(note.offset, self._told.get(note.partition_id, 0))

    def _is_left(self, place: Place) -> bool:
        """Whether nothing had removed the message when the program could have got it, by brokers
        and by what it was told.
        """
        if not self._truth.is_member(place[0]):
            return False
        end = max(self._truth.firsts.get(place[0], 0), self._truth.removing.get(place[0], 0))
        if self._told is not None:
            end = min(end, self._told.get(place[0], 0))
        return place[1] >= end

    def reopened(self, opened: Opened) -> None:
        """Note that a reader goes on; what was given after the keeping may come again."""
        if self.opened is None:
            self.opened = opened
        for identity in list(self.given)[self._kept :]:
            del self.given[identity]
        self._repeats = dict(self._kept_repeats)
        self._passed = dict(self._kept_passed)

    def keep(self) -> None:
        self._kept = len(self.given)
        self._kept_repeats = dict(self._repeats)
        self._kept_passed = dict(self._passed)

    def passed(self, note: Passed) -> None:
        """Note how far a reader is."""
        self._passed[note.partition_id] = note.offset

    def give(self, message: Given) -> None:
        """Look at a message alone: it is what is stored there, and was not given before."""
        place = message.partition_id, message.offset
        stored = self._truth.stored.get(place)
        if stored != (message.key, message.value):
            self._tell(f"was given {message.value!r} at {place}, where {stored} is stored")
        identity = self._truth.identity(place, message.value)
        before = self._repeats.get(identity) or self.given.get(identity)
        if before is not None and self._may_repeat(before, message):
            self._repeats[identity] = message
            return
        if before is not None:
            of_before = (before.partition_id, before.offset)
            self._tell(
                f"was given {place} again{'' if of_before == place else f', as {of_before}'}"
            )
        self.given[identity] = message

    def _may_repeat(self, before: Given, row: Given) -> bool:
        """
        Whether the row may come after the message: it was made of another row, and the program was
        in the middle of a partition.

        What a row of a row was made of at first is not known once the first row is gone. So a
        reader which had a part of a partition when its rows were replaced too is promised all rows
        of it, some of them a second time.
        """
        if not self._truth.carried:
            return False
        first, last = (before.partition_id, before.offset), (row.partition_id, row.offset)
        between = (
            first[0] < place[0] < last[0] and value == row.value
            for place, (_, value) in self._truth.stored.items()
        )
        return any(between) and not self._had_all(first[0], before.offset)

    def _had_all(self, partition_id: int, offset: int) -> bool:
        """
        Whether the program is through with a partition of which it had the message at `offset`.

        Its position tells: what it was given does not, where it wants the messages of one key
        alone, or has had a row before. A program that notes no positions wants every message.
        """
        last = max(
            (offset for number, offset in self._truth.stored if number == partition_id), default=0
        )
        if self._passed:
            return self._passed.get(partition_id, 0) > last
        had = [each.offset for each in self.given.values() if each.partition_id == partition_id]
        return max(had, default=offset) >= last

    def close(self, key: bytes | None, *, whole: bool) -> list[str]:
        """Look at all that was given; `whole`: it was to be all that is owed."""
        if self.opened is None:
            return self.problems
        self._check_order()
        self._check_numbers()
        self._check_queues()
        self._check_lives()
        if self.opened.latest:
            self._check_begin(self.opened.began)
        self._check_whole(key, self.opened.owed_from, whole=whole)
        return self.problems

    def _tell(self, what: str) -> None:
        self.problems.append(f"{self._name} {what}")

    def _check_order(self) -> None:
        """A key's messages come by partition id and offset, unless they are stored beside their
        range.
        """
        last: dict[bytes, Place] = {}
        ends: dict[int, int] = {}
        for message in self.given.values():
            place = message.partition_id, message.offset
            if self._in_turn and ends.get(place[0], -1) > place[1]:
                self._tell(f"was given {place} behind offset {ends[place[0]]}")
            ends[place[0]] = place[1]
            if not self._truth.is_in_range(place, message.key):
                continue
            if last.get(message.key, (0, 0)) > place:
                self._tell(f"was given {message.key!r} at {place} behind {last[message.key]}")
            last[message.key] = place

    def _check_numbers(self) -> None:
        """A key's messages come in the order in which each producer has numbered them."""
        if not self._truth.in_order:
            return
        last: dict[tuple[str, bytes], tuple[int, Given]] = {}
        for message in self.given.values():
            place = message.partition_id, message.offset
            if not message.key or message.value not in self._truth.sent:
                continue
            _, producer, number = self._truth.sent[message.value]
            before, of_before = last.get((producer, message.key), (-1, message))
            if before < number:
                last[producer, message.key] = number, message
            elif before > number and not self._begins_again(of_before, message):
                said = f"number {number} of {producer} and {message.key!r} at {place}"
                self._tell(f"was given {said} behind number {before}")

    def _begins_again(self, before: Given, row: Given) -> bool:
        """
        Whether the program, which was given a message, is now given all rows of a partition in
        which that message comes later than this row; see `_may_repeat`.

        What its reader began behind is among these rows too.
        """
        if not self._truth.carried:
            return False
        comes_later = any(
            place[0] == row.partition_id and place[1] > row.offset and value == before.value
            for place, (_, value) in self._truth.stored.items()
        )
        return comes_later and not self._had_all(before.partition_id, before.offset)

    def _check_queues(self) -> None:
        """A message has its logic offset for itself, and they rise in each queue as it is read."""
        if not self._truth.static or not self._in_turn:
            return
        ends: dict[int, tuple[int, Place]] = {}
        for message in self.given.values():
            place = message.partition_id, message.offset
            before, whose = ends.get(message.queue, (-1, (0, 0)))
            if message.logic_offset <= before:
                said = f"logic offset {message.logic_offset} of queue {message.queue}"
                self._tell(f"was given {place} at {said}, behind {before} of {whose}")
            ends[message.queue] = message.logic_offset, place

    def _check_begin(self, began: int) -> None:
        """Nothing comes that its producer knew to be stored before the reader was opened."""
        for identity, message in self.given.items():
            if self._truth.settled.get(identity, began) < began:
                if any(self._begins_again(each, message) for each in self.given.values()):
                    continue
                place = message.partition_id, message.offset
                self._tell(f"began at the latest message, and was given the older one at {place}")

    def _check_lives(self) -> None:
        """A reader stays with the subject that it was opened for."""
        met: dict[int, Place] = {}
        for message in self.given.values():
            for life, partitions in enumerate(self._truth.lives):
                if message.partition_id in partitions:
                    met.setdefault(life, (message.partition_id, message.offset))
        if len(met) > 1:
            self._tell(f"was given messages of several subjects of one name: {met}")

    def _check_whole(self, key: bytes | None, owed_from: int, *, whole: bool) -> None:
        """Everything came that is owed and left; of a life that was cut off, what comes before
        something given of its key.
        """
        last: dict[bytes, Place] = {}
        for message in self.given.values():
            place = message.partition_id, message.offset
            if self._truth.is_in_range(place, message.key):
                last[message.key] = max(place, last.get(message.key, (0, 0)))
        for place, (of_key, value) in self._truth.stored.items():
            sent = self._truth.sent.get(value)
            owed = owed_from == 0 or (sent is not None and sent[0] >= owed_from)
            wanted = key is None or key == of_key
            passed = self._truth.is_in_range(place, of_key) and place < last.get(of_key, (0, 0))
            if (
                owed
                and wanted
                and (whole or passed)
                and self._truth.identity(place, value) not in self.given
                and self._is_left(place)
            ):
                self._tell(f"was not given {value!r} at {place}")


def check_follower(
    name: str,
    notes: Sequence[Note],
    truth: Truth,
    *,
    key: bytes | None = None,
    in_turn: bool = True,
    notes_removals: bool = True,
    whole: bool,
) -> list[str]:
    """
    What is wrong with what a follower was given.

    Args:
        key: it wanted the messages of this key alone; None: all.
        in_turn: it was given the messages of a partition one by one; else only those of a key.
        notes_removals: it notes what it was told to be removed; else it may have been told whatever
            brokers removed.
        whole: the run was quiet at the end, and the follower had time to read everything.
    """
    new_life = partial(FollowingLife, truth, name, in_turn=in_turn, notes_removals=notes_removals)
    lives = [new_life()]
    for note in notes:
        match note:
            case Opened():
                if not note.after_keeping and lives[-1].opened is not None:
                    lives.append(new_life())
                lives[-1].reopened(note)
            case Given():
                lives[-1].give(note)
            case Kept():
                lives[-1].keep()
            case Told():
                lives[-1].told(note)
            case Passed():
                lives[-1].passed(note)
    problems = [
        problem for life in lives for problem in life.close(key, whole=whole and life is lives[-1])
    ]
    return problems[:PROBLEMS_MAX]
