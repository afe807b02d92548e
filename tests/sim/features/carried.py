"""What became of the messages of a subject that is cut over: where they are at the end, and what
the group handled. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keylane.checker.events import Ended, Sent, Settled, Started, Stored

GROUP = "carried"
Place = tuple[int, int]
"""Partition and offset."""


class Row(NamedTuple):
    """A message that was reprocessed."""

    place: Place
    key: bytes
    value: bytes


@dataclass
class Round:
    """One cut-over."""

    hidden: str
    rows: list[Row] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    """Partition → the first message that was there when it was held."""
    cursors: dict[int, int] = field(default_factory=dict)
    """Where the group was in what was replaced."""
    taken: set[int] = field(default_factory=set)
    """Partitions of which retention had taken all."""
    stored: dict[bytes, Place] = field(default_factory=dict)
    """Value → where its row is."""
    partitions: frozenset[int] = frozenset()
    """Of the hidden subject."""
    replaced: frozenset[int] = frozenset()
    short: int = 0
    """The partition of which the job left messages out; 0: none."""
    accepted_at: int | None = None
    """The instant from which on the metaserver had taken the publication."""
    published_at: int | None = None
    """The instant from which on the rows were in the subject."""

    def passed(self) -> list[Row]:
        """The rows of messages that the group was through with when they were published."""
        return [
            row
            for row in self.rows
            if row.value in self.stored and row.place[1] < self.cursors.get(row.place[0], 0)
        ]


class Judged:
    """The history of the subject: what was sent, where it is at the end, and what the group
    handled.
    """

    def __init__(
        self, history: Sequence[Any], senders: Collection[str], members: Collection[int]
    ) -> None:
        """
        Args:
            senders: the names of the subject's producers.
            members: its partitions at the end, and those that have expired otherwise than by a
                publication.
        """
        self.history = history
        self.sent: dict[bytes, Sent] = {}
        self.acked: dict[bytes, Place] = {}
        self.acked_at: dict[bytes, int] = {}
        self.twice: set[bytes] = set()
        """Declared as perhaps stored twice: in a partition that was gone before its broker could
        say whether it had the message.
        """
        self.places: defaultdict[bytes, list[Place]] = defaultdict(list)
        self.handled: dict[bytes, int] = {}
        """Value → when a handler was first done with it."""
        self.begun: defaultdict[bytes, list[int]] = defaultdict(list)
        under_way: dict[tuple[str, int, int], bytes] = {}
        for now, event in enumerate(history):
            match event:
                case Sent() if event.producer.partition(".")[0] in senders:
                    self.sent[event.value] = event
                case Settled() if event.outcome == "stored" and event.value in self.sent:
                    self.acked[event.value] = (event.partition_id, event.offset)
                    self.acked_at[event.value] = now
                    if event.twice:
                        self.twice.add(event.value)
                case Stored() if event.partition_id in members:
                    self.places[event.value].append((event.partition_id, event.offset))
                case Started() if event.group == GROUP:
                    self.begun[event.value].append(now)
                    under_way[event.session, event.partition_id, event.offset] = event.value
                case Ended() if event.group == GROUP:
                    key = (event.session, event.partition_id, event.offset)
                    if key in under_way:
                        self.handled.setdefault(under_way[key], now)

    def lost(self, rounds: Sequence[Round], *, since: int) -> list[str]:
        """
        Acked messages that are not in the subject once, or were not handled; those that retention
        had taken were.

        Args:
            since: the instant from which on retention waits for the group.
        """
        gone = {
            (number, offset)
            for each in rounds
            for number, start in each.starts.items()
            for offset in range(start)
        }
        taken = set[int]().union(*(each.taken for each in rounds))
        problems = []
        for value, place in self.acked.items():
            places = self.places.get(value, [])
            known = {place, *(each.stored[value] for each in rounds if value in each.stored)}
            removed = known & gone or any(number in taken for number, _ in known)
            more = len(places) > 1 and value not in self.twice
            if more or not (places or removed):
                problems.append(f"{value!r}, acked at {place}, is at {places}")
            if value not in self.handled and self.acked_at[value] > since:
                problems.append(f"{value!r}, acked at {place}, was never handled")
        return problems

    def out_of_order(self, lineage: Mapping[int, Sequence[int]]) -> list[str]:
        """Messages of one key and sender that are stored, or were first begun, before an older
        one.
        """
        depth: dict[int, int] = {}
        for number in sorted(lineage):
            depth[number] = max((depth.get(each, -1) + 1 for each in lineage[number]), default=0)
        stored = [
            (depth[place[0]], place[0], place[1], value)
            for value, places in self.places.items()
            if value in self.acked and value not in self.twice
            for place in places
            if place[0] in depth
        ]
        begun = sorted((at[0], value) for value, at in self.begun.items() if value in self.acked)
        problems = []
        for what, values in (
            ("is stored", [each[-1] for each in sorted(stored)]),
            ("was begun", [value for _, value in begun]),
        ):
            last: dict[tuple[str, bytes], int] = {}
            for value in values:
                sent = self.sent[value]
                lane = (sent.producer, sent.key)
                if sent.key and last.get(lane, -1) > sent.number:
                    problems.append(f"{value!r} of {sent.key!r} {what} behind {last[lane]}")
                last[lane] = max(last.get(lane, -1), sent.number)
        return problems

    def again(self, rounds: Sequence[Round]) -> list[str]:
        """Messages that the group was through with before a publication, and that were begun again
        before any it was not.
        """
        problems = []
        values = [{row.value for row in each.passed()} for each in rounds]
        for index, each in enumerate(rounds, 1):
            rows = [row for row in each.rows if row.value in each.stored]
            passed = each.passed()
            left = {row.value for row in rows} - {row.value for row in passed}
            begins: dict[int, int] = {}
            for value in left:
                number, offset = each.stored[value]
                begins[number] = min(offset, begins.get(number, offset))
            for row in passed:
                if row.value in self.twice:
                    continue  # the other one is handled for itself
                number, offset = each.stored[row.value]
                if offset > begins.get(number, offset):
                    # a message of another partition lies before it, as one without a key may
                    continue
                # A later round that found the group through with the row too judges what follows
                # it.
                until = min(
                    (
                        later.published_at
                        for later, through in zip(rounds[index:], values[index:], strict=True)
                        if row.value in through and later.published_at is not None
                    ),
                    default=len(self.history),
                )
                if any(each.published_at <= now < until for now in self.begun.get(row.value, [])):
                    problems.append(f"{row.value!r} of {row.place} was handled, and came again")
        return problems

    def early(self, rounds: Sequence[Round]) -> list[str]:
        """Messages that the group began with after it was fixed where it goes on, and before it
        went on there.
        """
        return [
            f"{event.value!r} of {event.partition_id} was begun while it was being replaced"
            for each in rounds
            if each.accepted_at is not None
            for event in self.history[each.accepted_at : each.published_at]
            if isinstance(event, Started) and event.group == GROUP
            if event.partition_id in each.replaced
        ]


def astray(rounds: Sequence[Round], parents: Mapping[int, Collection[int]]) -> list[str]:
    """Published rows that lie in a partition that does not continue the one with their message. Who
    had all that it continues takes its rows for read.
    """
    ancestors: dict[int, set[int]] = {}
    for number in sorted(parents):  # parents have lower ids
        ancestors[number] = set(parents[number]).union(
            *(ancestors.get(each, ()) for each in parents[number])
        )
    return [
        f"{row.value!r} of {row.place} is at {round_.stored[row.value]}, which does not continue it"
        for round_ in rounds
        for row in round_.rows
        if row.value in round_.stored
        and row.place[0] not in ancestors.get(round_.stored[row.value][0], ())
    ]
