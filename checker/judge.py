"""Checks the history of a run for anomalies, event by event. Pure.

lost            acked, but not stored where the receipt says; or acked for a group that never
                handled it
phantom         stored or handled, but never sent like this; stored although its producer reported
                that it was not; or handled with another value than an operator's edit
duplicate       stored twice, though neither that nor a reordering was declared; or a batch accepted
                twice
inversion       two messages of one key and producer stored in another order than they were sent, or
                one stored in a partition that does not cover its key, without a declared
                reordering; or a reordering declared for a message that must keep its order, or has
                no order
skip            a handler began before the previous message of its key was handled (in the
                partition, or in an earlier one if the order of both was promised); a cursor passed
                an unhandled message; or the log has a batch without its producer's previous batch
nonmonotonic    an owner went back to a message before one that it had handled; a durable fence,
                cursor or ack was lost; a producer went back to an older route, or two different
                routes have the same version
stale effect    a broker accepted a token below one that it had accepted before; a fenced owner's
                ack counted; or a batch of an older epoch was accepted
late start      a handler began at or after the end of its lease, by its own clock or by the
                database's
duplicate token a token was granted or used twice on a partition, or is below an earlier one
two grants      a lease was granted to another session before it was released or expired; a handler
                of an older grant began after a newer grant; or a lease was released while its
                handler was running
starvation      after all faults have been healed, a sent message is not settled, or a stored
                message is not handled
silent loss     a flush or a close raised no error, and a message sent before it is not stored

Handling a message again under a higher token is not an anomaly, because delivery is at least once.
A message is *owed* to a group until the group has handled it. A reset back to before handled
messages makes them owed again, under tokens above that of the reset; messages that a reset passes
are no longer owed. Before retention removes a message, every group to which the metaserver's
database promises it must have handled it, whether or not the broker knows the group. The messages
of a partition are no longer owed once an operator has accepted its loss; earlier and later
partitions keep their order.

The names follow Jepsen's Kafka workload and Maelstrom. The rules for stale effects are those of
linearizable registers: an accepted call violates the fence only if its request was sent after the
higher token was accepted.
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
    LeaseReleased,
    LeasesReported,
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
"""A number above every offset."""


def check_history(events: Sequence[Event], *, drained: bool = True) -> Findings:
    """
    Return the anomalies in the events of one run. The events are in chronological order, and
    include the final log (`Stored`).

    Args:
        drained: True if all faults were healed and the run had time to finish, so that every
            message must be settled and handled.
    """
    judge = Judge()
    log = judge.log
    passes: tuple[tuple[type[Any], Callable[..., None]], ...] = (
        (Sent, log.on_sent),
        (Settled, log.on_settled),
        (Ranged, log.on_ranged),
        (Abandoned, log.on_abandoned),
        (AcceptedLost, log.on_lost),
        (Stored, log.on_stored),
        (Batched, judge.sequences.on_batched),
        (Routed, judge.routes.on_routed),
    )
    for kind, handle in passes:
        for event in events:
            if type(event) is kind:
                handle(*event)
    log.close(drained=drained)
    handlers: dict[type[Any], Callable[..., None]] = {
        Started: judge.on_started,
        Ended: judge.on_ended,
        Dropped: judge.ownership.on_dropped,
        Served: judge.on_served,
        Granted: judge.ownership.on_granted,
        LeaseReleased: judge.ownership.on_released,
        LeasesReported: judge.ownership.on_leases_reported,
        Looked: judge.on_looked,
        Recovered: judge.on_recovered,
        Resetting: judge.on_resetting,
        SetAside: judge.on_set_aside,
        Edited: judge.edits.on_edited,
        Replaced: judge.ownership.on_replaced,
        Expired: judge.on_expired,
        AcceptedLost: judge.on_lost,
    }
    for judge.now, event in enumerate(events):
        handler = handlers.get(type(event))
        if handler is not None:
            handler(*event)
    return judge.close(drained=drained)


class Judge:
    """
    Consumes events one by one, without storing them: first the whole log, then all others in
    chronological order.

    Each method takes the fields of the event with the same name. `now` is the instant of the event.
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
        self._lost_partitions: set[int] = set()
        """The partitions whose loss an operator has accepted."""
        self._newest_begun: dict[tuple[str, str, bytes], int] = {}
        """Maps (group, producer, key) to the number of the newest message that was begun outside
        lost partitions since a loss was accepted.
        """
        self._let_in: dict[tuple[str, int], int] = {}
        """Maps (group, partition) to the newest token that a broker has let in."""
        self._leased_ids: dict[tuple[str, int], int] = {}
        """Maps (group, token) to the partition for which the token was granted."""
        self._expired_below: dict[int, int] = {}
        """Maps each partition to the offset below which its messages have expired."""

    def get_progress(self, group: str, partition_id: int) -> Progress:
        """Return the progress of a group on a partition."""
        partitions = self._groups.setdefault(group, {})
        progress = partitions.get(partition_id)
        if progress is None:
            progress = partitions[partition_id] = Progress(partition_id, self.findings)
            progress.eras.floor = self._expired_below.get(partition_id, 0)
        return progress

    def on_started(  # noqa: PLR0917 - the fields of an event
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
        is_promised: bool = False,
    ) -> None:
        """See `events.Started`."""
        slot = (partition_id, offset)
        log, note_anomaly = self.log, self.findings.note
        stored_value = log.values.get(slot)
        if problem := self.edits.find_problem(group, slot, value, stored_value):
            note_anomaly("phantom", f"{value!r} handled at {partition_id}/{offset}, {problem}")
            return
        is_replaced = self.ownership.is_replaced(session)
        if is_replaced:
            pass  # its process may rely on its lease until it learns that it was replaced
        elif clock_ns >= deadline_ns:
            late_ms = (clock_ns - deadline_ns) / 1e6
            note_anomaly("late start", f"{value!r} under token {token}, {late_ms:.1f} ms late")
        elif session_left_ms is not None and session_left_ms <= 0 and not is_promised:
            note_anomaly(
                "late start", f"{value!r} under token {token}, of a session that has ended"
            )
        leased_id = self._leased_ids.get((group, token), partition_id)
        self.ownership.on_started(
            session,
            partition_id,
            offset,
            token,
            leased_id,
            ours=ours,
            with_earlier=with_earlier,
            let_in=self._let_in.get((group, leased_id), 0) if is_promised else None,
        )
        message = log.sent_messages.get(stored_value)
        if message is None:
            return  # it has already been noted as a phantom when the log was checked
        is_adopted, progress = leased_id != partition_id, self.get_progress(group, partition_id)
        is_misplaced = is_adopted and message.key and not log.is_covered(message.key, leased_id)
        if is_misplaced and offset not in progress.unordered:
            note_anomaly(
                "stale effect",
                f"{partition_id}/{offset} of {message.key!r} begun under token {token} "
                f"of {leased_id}, which does not cover its key",
            )
        progress.on_started(
            offset, message.key, token, session, adopted=is_adopted, replaced=is_replaced
        )
        if self._lost_partitions and message.key and message.strict:
            self._check_lost_order(
                partition_id, (group, message.producer, message.key), message.number
            )
        for earlier_slot in log.predecessors(slot):
            if not self.get_progress(group, earlier_slot[0]).is_finished(earlier_slot[1], token):
                note_anomaly(
                    "skip",
                    f"{partition_id}/{offset} of {message.key!r} begun before "
                    f"{earlier_slot[0]}/{earlier_slot[1]} was handled, under token {token}",
                )

    def _check_lost_order(
        self, partition_id: int, lane: tuple[str, str, bytes], send_number: int
    ) -> None:
        """Check that a message of a lost partition is either handled before newer messages of its
        key or never.
        """
        newest = self._newest_begun.get(lane, -1)
        if partition_id not in self._lost_partitions:
            self._newest_begun[lane] = max(newest, send_number)
        elif send_number < newest:
            text = f"number {send_number} of {lane[1]} for {lane[0]!r} begun after {newest}"
            self.findings.note(
                "inversion", f"{lane[2]!r}: {text}, in lost partition {partition_id}"
            )

    def on_ended(
        self, group: str, partition_id: int, offset: int, token: int, session: str = ""
    ) -> None:
        """See `events.Ended`."""
        adopted = self._leased_ids.get((group, token), partition_id) != partition_id
        self.get_progress(group, partition_id).on_ended(offset, token, adopted=adopted)
        self.ownership.on_dropped(session, partition_id, offset)

    def on_served(  # noqa: PLR0917 - the fields of an event
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
        progress = self.get_progress(group, partition_id)
        if kind == "acquire":
            self._leased_ids[group, token] = partition_id
            newest = self._let_in.get((group, partition_id), 0)
            self._let_in[group, partition_id] = max(token, newest)
        progress.on_served(kind, token, began, self.now)
        if cursor >= 0:
            progress.on_reported(kind, token, began, self.now, cursor, ranges)

    def on_set_aside(
        self,
        group: str,
        partition_id: int,
        token: int,
        ranges: tuple[Range, ...],
        skipped: bool = False,
        alone: bool = False,
    ) -> None:
        """See `events.SetAside`."""
        progress = self.get_progress(group, partition_id)
        for start, end in ranges:
            for offset in range(start, end):
                progress.on_parked(token, offset, skipped=skipped, alone=alone)

    def on_resetting(
        self, group: str, partition_id: int, token: int, cursor: int, alone: bool = False
    ) -> None:
        """See `events.Resetting`."""
        self.edits.on_reset(group)
        self.get_progress(group, partition_id).on_resetting(token, cursor, without_children=alone)

    def on_looked(self, *fields: Any) -> None:
        """See `events.Looked`."""
        observation = Looked(*fields)
        progress = self.get_progress(observation.group, observation.partition_id)
        progress.observations.append(observation)

    def on_expired(self, partition_id: int, first_offset: int, groups: tuple[str, ...]) -> None:
        """See `events.Expired`."""
        for group in groups:
            self.get_progress(group, partition_id).check_expired(first_offset)
        expired_below = max(first_offset, self._expired_below.get(partition_id, 0))
        self._expired_below[partition_id] = expired_below
        for partitions in self._groups.values():
            if partition_id in partitions:
                partitions[partition_id].eras.floor = expired_below

    def on_lost(self, partition_id: int) -> None:
        """See `events.AcceptedLost`."""
        self._lost_partitions.add(partition_id)
        self.on_expired(partition_id, OFFSET_MAX, ())

    def on_recovered(self, group: str, partition_id: int, token: int, cursor: int) -> None:
        """See `events.Recovered`."""
        self.get_progress(group, partition_id).on_recovered(token, cursor)

    def close(self, *, drained: bool) -> Findings:
        """Find the messages that are still owed to each group after the last event, and return all
        findings.
        """
        for group, partitions in self._groups.items():
            for partition_id, offset in self.log.values:
                progress = partitions.get(partition_id)
                if offset < self._expired_below.get(partition_id, 0):
                    continue  # it was checked when retention removed it
                eras = [] if progress is None else progress.eras.candidate_eras()
                if any(era.is_finished(offset) for era in eras):
                    continue
                message = f"{partition_id}/{offset} for {group!r}"
                if any(offset in era.parked for era in eras) and not drained:
                    continue
                if any(offset < era.cursor for era in eras):
                    self.findings.note("lost", f"{message} was acked, but never handled")
                elif drained:
                    self.findings.note("starvation", f"{message} was never handled")
            for partition_id, progress in partitions.items():
                progress.close(drained=drained and partition_id not in self._lost_partitions)
        return self.findings
