"""Judges a history of one run, event by event.  Pure.

    lost            acked and not stored where the receipt says, or acked for a group that never handled it
    phantom         stored or handled and never sent so, or stored although the sender was told it was not
    duplicate       stored twice, though no reordering was declared
    inversion       two messages of one key and producer stored in another order than they were sent
    skip            a handler began before the message before it of its key was handled, or a cursor passed one
    nonmonotonic    an owner went back over what it had handled; a cursor or an ack that was durable is forgotten
    stale effect    a broker served a token below one that it had served before
    late start      a handler began at or after its lease's end, by its own clock
    duplicate token a token granted, or used, twice on a partition, or one below an earlier one
    two grants      a lease given away that was neither let go nor expired; a handler of an older grant that
                    began after a newer one; a lease let go while its handler still runs
    starvation      after everything is healed, something sent is not settled, or something stored not handled

Source: the names follow Jepsen's Kafka workload; the rules of stale effects are those of linearizable registers:
an accepted call counts against the fence only if it was asked after the higher one was served.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from history.events import (
    Dropped,
    Ended,
    Event,
    Granted,
    Holds,
    LetGo,
    Sent,
    Served,
    Settled,
    Started,
    Stored,
)

ANOMALIES = (
    "lost", "phantom", "duplicate", "inversion", "skip", "nonmonotonic", "stale effect",
    "late start", "duplicate token", "two grants", "starvation",
)  # fmt: skip
EXAMPLES_MAX = 5


@dataclass(slots=True)
class Findings:
    """How often each anomaly was found, and a few examples."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANOMALIES, 0))
    examples: list[str] = field(default_factory=list)
    overlaps: int = 0
    """Handlers that still ran when a newer owner began: no fault of ours, and told."""

    def note(self, anomaly: str, example: str) -> None:
        if self.counts[anomaly] < EXAMPLES_MAX:
            self.examples.append(f"{anomaly}: {example}")
        self.counts[anomaly] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class _Progress:
    """One group on one partition."""

    __slots__ = (
        "acked", "cursor", "cursors", "done", "ended", "fences", "grants", "instants", "passed",
        "reached",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ended: set[int] = set()
        """Offsets handled, by whomever."""
        self.done: set[tuple[int, int]] = set()
        """(token, offset) handled."""
        self.instants: list[int] = []
        """When each of `fences` was served."""
        self.fences: list[int] = []
        """Tokens acquired, rising."""
        self.cursors: list[tuple[int, int]] = []
        """(instant, cursor), each higher than the one before."""
        self.acked: dict[int, int] = {}
        """Offset → instant at which its ack was answered, while above the cursor."""
        self.cursor = 0
        self.passed = 0
        """Offsets below are known to be handled."""
        self.grants: dict[int, str] = {}
        """Token → session that used it."""
        self.reached: dict[tuple[int, bytes], int] = {}
        """(token, key) → the highest offset begun."""


def check_history(events: Sequence[Event], *, drained: bool = True) -> Findings:
    """
    Judge the events of one run, in the order of true time, the final log (`Stored`) among them.

    Args:
        drained: the run was healed and given time, so everything must be settled and handled.
    """
    found = Findings()
    sent = {event.value: event for event in events if type(event) is Sent}
    settled = {event.value: event for event in events if type(event) is Settled}
    log = [event for event in events if type(event) is Stored]
    _check_log(sent, settled, log, found)
    if drained:
        for value, one in sent.items():
            if value not in settled and one.strict:
                found.note("starvation", f"{value!r} was never settled")
    groups = _Scan(sent, log, found).run(events)
    for group, partitions in groups.items():
        _check_end(group, partitions, log, found, drained=drained)
    return found


def _free(settled: Settled | None) -> bool:
    """True if no promise was made about this message's place."""
    return settled is None or settled.outcome != "stored" or settled.reordered


def _check_log(
    sent: dict[bytes, Sent], settled: dict[bytes, Settled], log: list[Stored], found: Findings
) -> None:
    places: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    newest: dict[tuple[int, str, bytes], int] = {}
    for partition_id, offset, key, value in log:
        where = f"{value!r} at {partition_id}/{offset}"
        one = sent.get(value)
        if one is None or one.key != key:
            found.note("phantom", f"{where} was not sent so")
            continue
        places[value].append((partition_id, offset))
        outcome = settled.get(value)
        if len(places[value]) > 1 and (one.strict or not _free(outcome)):
            found.note("duplicate", f"{where} and {places[value][0]}")
        if outcome is not None and outcome.outcome == "not done":
            found.note("phantom", f"{where}, told as not done")
        if key and (one.strict or not _free(outcome)):
            before = newest.get((partition_id, one.producer, key), -1)
            if one.number < before:
                found.note("inversion", f"{where} after number {before} of {one.producer}")
            newest[partition_id, one.producer, key] = max(before, one.number)
    for value, outcome in settled.items():
        if outcome.outcome in {"not done", "unknown"} and value in sent and sent[value].strict:
            found.note("lost", f"{value!r} was given up, although its order is strict")
        if outcome.outcome != "stored":
            continue
        if value not in places:
            found.note("lost", f"{value!r} was acked and is nowhere")
        elif outcome.offset >= 0 and (outcome.partition_id, outcome.offset) not in places[value]:
            found.note("lost", f"{value!r} is not at {outcome.partition_id}/{outcome.offset}")


def _check_end(
    group: str,
    partitions: dict[int, _Progress],
    log: list[Stored],
    found: Findings,
    *,
    drained: bool,
) -> None:
    for partition_id, offset, _key, value in log:
        progress = partitions.get(partition_id)
        if progress is not None and offset in progress.ended:
            continue
        if progress is not None and offset < progress.cursor:
            found.note("lost", f"{value!r} was acked for {group!r} and never handled")
        elif drained:
            found.note("starvation", f"{value!r} at {partition_id}/{offset} for {group!r}")


class _Scan:
    """One pass over the events."""

    def __init__(self, sent: dict[bytes, Sent], log: list[Stored], found: Findings) -> None:
        self._found = found
        self._places = {(one.partition_id, one.offset): one.value for one in log}
        self._keys = {value: one.key for value, one in sent.items()}
        self._before = _predecessors(sent, log)
        self._groups: defaultdict[str, defaultdict[int, _Progress]] = defaultdict(
            lambda: defaultdict(_Progress)
        )
        self._group_of: dict[str, int] = {}
        self._granted: dict[tuple[int, int], int] = {}
        self._sessions: dict[tuple[int, int, int], str] = {}
        self._let_go: set[tuple[str, int, int]] = set()
        self._running: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        """By session, (partition, offset) of its handlers."""
        self._holding: dict[str, tuple[tuple[int, int], ...]] = {}

    def run(self, events: Sequence[Event]) -> dict[str, dict[int, _Progress]]:
        for instant, event in enumerate(events):
            kind = type(event)
            if kind is Started:
                self._started(event)  # type: ignore[arg-type]
            elif kind is Ended:
                progress = self._groups[event.group][event.partition_id]  # type: ignore[union-attr]
                progress.ended.add(event.offset)  # type: ignore[union-attr]
                progress.done.add((event.token, event.offset))  # type: ignore[union-attr]
                self._running[event.session].discard((event.partition_id, event.offset))  # type: ignore[union-attr]
            elif kind is Dropped:
                self._running[event.session].discard((event.partition_id, event.offset))  # type: ignore[union-attr]
            elif kind is Served:
                self._served(event, instant)  # type: ignore[arg-type]
            elif kind is Granted:
                self._grant(event)  # type: ignore[arg-type]
            elif kind is LetGo:
                self._letting_go(event)  # type: ignore[arg-type]
            elif kind is Holds:
                self._holding[event.session] = event.holding  # type: ignore[union-attr]
        return {group: dict(partitions) for group, partitions in self._groups.items()}

    # ── the metaserver ────────────────────────────────────────────────────────────────────────────────
    def _grant(self, event: Granted) -> None:
        group_id, partition_id, token, session, holder, left_ms = event
        note = self._found.note
        self._group_of[session] = group_id
        where = f"partition {partition_id}, token {token} for {session[:8]}"
        if token <= self._granted.get((group_id, partition_id), 0):
            note("duplicate token", f"{where}, not above an earlier one")
        if self._sessions.setdefault((group_id, partition_id, token), session) != session:
            note("duplicate token", f"{where} and another session")
        if left_ms > 0 and holder != session and not self._is_let_go(holder, partition_id):
            note("two grants", f"{where}, while {holder[:8]} has {left_ms} ms left")
        self._granted[group_id, partition_id] = max(
            token, self._granted.get((group_id, partition_id), 0)
        )

    def _letting_go(self, event: LetGo) -> None:
        session, partition_id, token = event
        self._let_go.add(event)
        for running_id, offset in sorted(self._running[session]):
            if partition_id in {0, running_id}:
                where = f"{running_id}/{offset}"
                self._found.note(
                    "two grants", f"{session[:8]} lets go of {where} while it is handled ({token})"
                )

    def _is_let_go(self, holder: str, partition_id: int) -> bool:
        if (holder, 0, 0) in self._let_go:
            return True
        group_id = self._group_of.get(holder, 0)
        token = self._granted.get((group_id, partition_id), 0)
        if (holder, partition_id, token) in self._let_go:
            return True
        said = self._holding.get(holder)
        return said is not None and (partition_id, token) not in said

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────
    def _started(self, event: Started) -> None:
        group, session, partition_id, offset, value, token, clock_ns, deadline_ns, ours = event
        note = self._found.note
        if self._places.get((partition_id, offset)) != value:
            note("phantom", f"{value!r} handled at {partition_id}/{offset}, where it is not")
            return
        if clock_ns >= deadline_ns:
            late_ms = (clock_ns - deadline_ns) / 1e6
            note("late start", f"{value!r} under token {token}, {late_ms:.1f} ms late")
        granted = self._granted.get((self._group_of.get(session, 0), partition_id), 0)
        if token < granted:
            note("two grants", f"{value!r} begun under token {token} after {granted} was granted")
        if ours:
            self._running[session].add((partition_id, offset))
        progress = self._groups[group][partition_id]
        if progress.grants.setdefault(token, session) != session:
            note("duplicate token", f"token {token} of partition {partition_id} used twice")
        key = self._keys[value]
        if not key:
            return
        reached = progress.reached.get((token, key), -1)
        if offset < reached or (offset == reached and (token, offset) in progress.done):
            note("nonmonotonic", f"token {token} went back from {reached} to {offset} of {key!r}")
        progress.reached[token, key] = max(offset, reached)
        for before_partition, before_offset in self._before.get((partition_id, offset), ()):
            if before_offset not in self._groups[group][before_partition].ended:
                note(
                    "skip",
                    f"{partition_id}/{offset} of {key!r} begun before "
                    f"{before_partition}/{before_offset} was handled, under token {token}",
                )

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────────
    def _served(self, event: Served, instant: int) -> None:
        kind, group, partition_id, token, began, cursor, ranges = event
        note = self._found.note
        progress = self._groups[group][partition_id]
        index = bisect_left(progress.instants, began) - 1
        if index >= 0 and token < progress.fences[index]:
            note(
                "stale effect",
                f"{kind} of token {token} on partition {partition_id} after {progress.fences[index]}",
            )
        if kind == "acquire" and token > (progress.fences[-1] if progress.fences else 0):
            progress.instants.append(instant)
            progress.fences.append(token)
        if cursor < 0:
            return
        for offset in range(progress.passed, cursor):
            if offset not in progress.ended:
                note("skip", f"the cursor of {group!r} passed {partition_id}/{offset}, not handled")
        progress.passed = max(progress.passed, cursor)
        self._check_cursor(progress, event, instant)
        for start, end in ranges:
            for offset in range(start, end):
                if offset not in progress.ended:
                    note("skip", f"{partition_id}/{offset} acked for {group!r}, not handled")
                if kind == "ack":
                    progress.acked.setdefault(offset, instant)

    def _check_cursor(self, progress: _Progress, event: Served, instant: int) -> None:
        """A durable cursor and durable acks are never forgotten."""
        kind, _group, partition_id, token, began, cursor, ranges = event
        note = self._found.note
        at = bisect_left(progress.cursors, (began, -1)) - 1
        if at >= 0 and cursor < progress.cursors[at][1]:
            before = progress.cursors[at][1]
            note("nonmonotonic", f"cursor of partition {partition_id}: {cursor} after {before}")
        if cursor > progress.cursor:
            progress.cursor = cursor
            progress.cursors.append((instant, cursor))
        if kind != "acquire":
            return
        kept = {offset for start, end in ranges for offset in range(start, end)}
        for offset, acked_at in list(progress.acked.items()):
            if offset < cursor:
                del progress.acked[offset]
            elif acked_at < began and offset not in kept:
                note("nonmonotonic", f"the ack of {partition_id}/{offset} is forgotten ({token})")


def _predecessors(
    sent: dict[bytes, Sent], log: list[Stored]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """
    What has to be handled before each message: the one before it of its key in its partition, and the one its
    producer sent before it for that key, wherever that is stored (STRICT only).
    """
    before: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    last: dict[tuple[int, bytes], tuple[int, int]] = {}
    lanes: defaultdict[tuple[str, bytes], list[tuple[int, int, int]]] = defaultdict(list)
    seen: set[bytes] = set()
    for partition_id, offset, key, value in log:
        one = sent.get(value)
        if not key or one is None:
            continue
        place = (partition_id, offset)
        if (partition_id, key) in last:
            before[place].append(last[partition_id, key])
        last[partition_id, key] = place
        if one.strict and value not in seen:
            lanes[one.producer, key].append((one.number, *place))
        seen.add(value)
    for lane in lanes.values():
        lane.sort()
        for (_, *earlier), (_, *later) in itertools.pairwise(lane):
            place = (earlier[0], earlier[1])
            if place not in before[later[0], later[1]]:
                before[later[0], later[1]].append(place)
    return before
