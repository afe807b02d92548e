"""Judges a history of one run, event by event. Pure.

lost            acked and not stored where the receipt says, or acked for a group that never
                handled it
phantom         stored or handled but never sent like this; stored although its producer
                reported that it was not; or handled with another value than an operator's edit
duplicate       stored twice, though neither that nor a reordering was declared; a batch taken
                twice
inversion       two messages of one key and producer stored in another order than they were
                sent, or one where its key does not belong, though no reordering was declared;
                a reordering declared for a message that must keep its order, or has none
skip            a handler began before the previous message of its key was handled (in the
                partition, or in an earlier one if the order of both was promised); a cursor
                passed an unhandled message; or the log has a batch without the batch that its
                producer sent before
nonmonotonic    an owner went back over what it had handled; a durable fence, cursor or ack is
                forgotten; a producer went back to an older route, or two routes have one
                version
stale effect    a broker served a token below one that it had served before, a fenced owner's
                ack counted, or a batch of an older epoch was taken
late start      a handler began at or after its lease's end, by its own clock or by the
                database's
duplicate token a token granted or used twice on a partition, or one below an earlier one
two grants      a lease granted away that was neither released nor expired; a handler of an
                older grant that began after a newer one; a lease released while its handler
                still runs
starvation      after everything is healed, something sent is not settled, or something stored
                is not handled
silent loss     a flush or a close reported no error, and a message sent before is not stored

Handling a message again under a higher token is no anomaly, because delivery is at least once.
A message is *owed* to a group until the group has handled it. A reset back over handled
messages makes them owed again, under tokens above the reset's; messages that a reset passes are
no longer owed. Before retention removes a message, every group to which the metaserver's
database promises it must have handled it, whether the broker knows the group or not. The
messages of a partition are no longer owed once an operator has accepted its loss; earlier and
later partitions keep their order.

Source: the names follow Jepsen's Kafka workload and Maelstrom; the rules of stale effects are
those of linearizable registers: an accepted call counts against the fence only if it was
asked after the higher one was served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .edits import Edits
from .eras import Range
from .events import (
    Abandoned,
    AcceptedLost,
    Batched,
    Dropped,
    Edited,
    Ended,
    Event,
    Expired,
    Granted,
    Holds,
    LetGo,
    Looked,
    Ranged,
    Recovered,
    Replaced,
    Resetting,
    Routed,
    Sent,
    Served,
    SetAside,
    Settled,
    Started,
    Stored,
    Value,
)
from .findings import Findings
from .log import Log
from .ownership import Ownership
from .progress import Progress
from .routes import Routes, Sequences

OFFSET_MAX = 1 << 63
"""Number above every offset."""


def check_history(events: Sequence[Event], *, drained: bool = True) -> Findings:
    """
    Judge the events of one run, in the order of true time, including the final log (`Stored`).

    Args:
        drained: True if the run was healed and given time, so that everything must be settled and
            handled.
    """
    judge = Judge()
    log = judge.log
    for kinds in (
        {Sent: log.sent},
        {Settled: log.settled},
        {Ranged: log.ranged},
        {Abandoned: log.abandoned},
        {AcceptedLost: log.lost},
        {Stored: log.stored},
        {Batched: judge.sequences.batched},
        {Routed: judge.routes.routed},
    ):
        _feed(events, kinds)
    judge.log.close(drained=drained)
    take: dict[type[Any], Callable[..., None]] = {
        Started: judge.started,
        Ended: judge.ended,
        Dropped: judge.ownership.dropped,
        Served: judge.served,
        Granted: judge.ownership.granted,
        LetGo: judge.ownership.released,
        Holds: judge.ownership.holds,
        Looked: judge.looked,
        Recovered: judge.recovered,
        Resetting: judge.resetting,
        SetAside: judge.set_aside,
        Edited: judge.edits.edited,
        Replaced: judge.ownership.replaced,
        Expired: judge.expired,
        AcceptedLost: judge.lost,
    }
    for judge.now, event in enumerate(events):
        taken = take.get(type(event))
        if taken is not None:
            taken(*event)
    return judge.close(drained=drained)


def _feed(events: Sequence[Event], take: dict[Any, Callable[..., None]]) -> None:
    ((kind, taken),) = take.items()
    for event in events:
        if type(event) is kind:
            taken(*event)


class Judge:
    """
    Takes events one by one without keeping them: first the whole log, then the rest in the order of
    time.

    The arguments of its methods are the fields of the events of the same names; `now` is the
    instant.
    """

    def __init__(self, *, partitions_fixed: bool = False) -> None:
        self.findings = Findings()
        self.log = Log(self.findings, partitions_fixed=partitions_fixed)
        self.ownership = Ownership(self.findings)
        self.sequences = Sequences(self.findings)
        self.routes = Routes(self.findings)
        self.edits = Edits()
        self.now = 0
        self._groups: dict[str, dict[int, Progress]] = {}
        self._lost: set[int] = set()
        """Partitions whose loss was accepted."""
        self._begun: dict[tuple[str, str, bytes], int] = {}
        """Newest message begun since a loss was accepted, outside lost partitions, by (group,
        producer, key).
        """
        self._homes: dict[tuple[str, int], int] = {}
        """Partition to which a token belongs, by (group, token)."""
        self._firsts: dict[int, int] = {}
        """Offset below which messages have expired, by partition."""

    def progress(self, group: str, partition_id: int) -> Progress:
        """Return the progress of a group on a partition."""
        partitions = self._groups.setdefault(group, {})
        progress = partitions.get(partition_id)
        if progress is None:
            progress = partitions[partition_id] = Progress(partition_id, self.findings)
            progress.eras.floor = self._firsts.get(partition_id, 0)
        return progress

    def started(  # noqa: PLR0917 - the fields of an event
        self,
        group: str,
        session: str,
        partition_id: int,
        offset: int,
        value: Value,
        token: int,
        clock_ns: int = 0,
        deadline_ns: int = 1,
        ours: bool = False,
        session_left_ms: int | None = None,
        with_earlier: bool = False,
    ) -> None:
        """See `events.Started`."""
        slot = (partition_id, offset)
        log, note = self.log, self.findings.note
        stored = log.values.get(slot)
        if problem := self.edits.problem(group, slot, value, stored):
            note("phantom", f"{value!r} handled at {partition_id}/{offset}, {problem}")
            return
        replaced = self.ownership.is_replaced(session)
        if replaced:
            pass  # its process has a lease by its own clock until it learns that it was replaced
        elif clock_ns >= deadline_ns:
            late_ms = (clock_ns - deadline_ns) / 1e6
            note("late start", f"{value!r} under token {token}, {late_ms:.1f} ms late")
        elif session_left_ms is not None and session_left_ms <= 0:
            note("late start", f"{value!r} under token {token}, of a session that has ended")
        home = self._homes.get((group, token), partition_id)
        place = (partition_id, offset, token, home)
        self.ownership.begun(session, *place, ours=ours, with_earlier=with_earlier)
        sending = log.sendings.get(stored)
        if sending is None:
            return  # the log has already noted it as a phantom
        foreign, progress = home != partition_id, self.progress(group, partition_id)
        strays = foreign and sending.key and not log.belongs(sending.key, home)
        if strays and offset not in progress.alone:
            note(
                "stale effect",
                f"{partition_id}/{offset} of {sending.key!r} begun under token {token} "
                f"of {home}, where its key does not belong",
            )
        progress.begun(offset, sending.key, token, session, foreign=foreign, fenced=replaced)
        if self._lost and sending.key and sending.strict:
            self._check_lost(partition_id, (group, sending.producer, sending.key), sending.number)
        for before in log.before(slot):
            if not self.progress(group, before[0]).through(before[1], token):
                note(
                    "skip",
                    f"{partition_id}/{offset} of {sending.key!r} begun before "
                    f"{before[0]}/{before[1]} was handled, under token {token}",
                )

    def _check_lost(self, partition_id: int, lane: tuple[str, str, bytes], number: int) -> None:
        """Check that a message of a lost partition is handled before newer messages of its key, or
        not at all.
        """
        newest = self._begun.get(lane, -1)
        if partition_id not in self._lost:
            self._begun[lane] = max(newest, number)
        elif number < newest:
            text = f"number {number} of {lane[1]} for {lane[0]!r} begun after {newest}"
            self.findings.note(
                "inversion", f"{lane[2]!r}: {text}, in lost partition {partition_id}"
            )

    def ended(
        self, group: str, partition_id: int, offset: int, token: int, session: str = ""
    ) -> None:
        """See `events.Ended`."""
        foreign = self._homes.get((group, token), partition_id) != partition_id
        self.progress(group, partition_id).handled(offset, token, foreign=foreign)
        self.ownership.dropped(session, partition_id, offset)

    def served(  # noqa: PLR0917 - the fields of an event
        self,
        kind: str,
        group: str,
        partition_id: int,
        token: int,
        began: int,
        cursor: int = -1,
        ranges: tuple[Range, ...] = (),
    ) -> None:
        """See `events.Served`."""
        progress = self.progress(group, partition_id)
        if kind == "acquire":
            self._homes[group, token] = partition_id
        progress.served(kind, token, began, self.now)
        if cursor >= 0:
            progress.reported(kind, token, began, self.now, cursor, ranges)

    def set_aside(
        self,
        group: str,
        partition_id: int,
        token: int,
        ranges: tuple[Range, ...],
        skipped: bool = False,
        alone: bool = False,
    ) -> None:
        """See `events.SetAside`."""
        progress = self.progress(group, partition_id)
        for start, end in ranges:
            for offset in range(start, end):
                progress.set_aside(token, offset, skipped=skipped, alone=alone)

    def resetting(
        self, group: str, partition_id: int, token: int, cursor: int, alone: bool = False
    ) -> None:
        """See `events.Resetting`."""
        self.edits.reset(group)
        self.progress(group, partition_id).resetting(token, cursor, alone=alone)

    def looked(self, *fields: Any) -> None:
        """See `events.Looked`."""
        look = Looked(*fields)
        self.progress(look.group, look.partition_id).looks.append(look)

    def expired(self, partition_id: int, first_offset: int, groups: tuple[str, ...]) -> None:
        """See `events.Expired`."""
        for group in groups:
            self.progress(group, partition_id).check_expired(first_offset)
        first = max(first_offset, self._firsts.get(partition_id, 0))
        self._firsts[partition_id] = first
        for partitions in self._groups.values():
            if partition_id in partitions:
                partitions[partition_id].eras.floor = first

    def lost(self, partition_id: int) -> None:
        """See `events.AcceptedLost`."""
        self._lost.add(partition_id)
        self.expired(partition_id, OFFSET_MAX, ())

    def recovered(self, group: str, partition_id: int, token: int, cursor: int) -> None:
        """See `events.Recovered`."""
        self.progress(group, partition_id).recovered(token, cursor)

    def close(self, *, drained: bool) -> Findings:
        """Find what is still owed to each group after the last event, and return all findings."""
        for group, partitions in self._groups.items():
            for partition_id, offset in self.log.values:
                progress = partitions.get(partition_id)
                if offset < self._firsts.get(partition_id, 0):
                    continue  # it was checked when it was removed
                eras = [] if progress is None else progress.eras.possible()
                if any(era.through(offset) for era in eras):
                    continue
                where = f"{partition_id}/{offset} for {group!r}"
                if any(offset in era.aside for era in eras) and not drained:
                    continue  # it is parked
                if any(offset < era.cursor for era in eras):
                    self.findings.note("lost", f"{where} was acked and never handled")
                elif drained:
                    self.findings.note("starvation", f"{where} was never handled")
            for partition_id, progress in partitions.items():
                progress.close(drained=drained and partition_id not in self._lost)
        return self.findings
