"""Restores the store when the broker starts: the index, and the state from the newest snapshot and
the log that follows it. Blocks.

    snapshot at position p ─▶ state      index at position q ≤ p      read the log from q on:
                                         records from q on ─▶ index, records from p on ─▶ state
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...protocol.clock import Clock
from ...protocol.errors import CorruptIndexError
from ...protocol.record import HEADER_BYTES, Header, Kind
from ..partition.damage import describe_damage
from ..partition.records import DroppedBody
from ..partition.state import BrokerState
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues, Unit
from ..storage.log.commit_log import segment_bases
from ..storage.log.holes import Hole
from ..storage.log.recovery import RecoveredLog, recover_log, visit_records
from ..storage.snapshot import LoadedSnapshot, Snapshots
from .agenda import Agenda
from .holds import correct_first_offsets
from .replay import Dispatch, Replay

log = logging.getLogger("keylane.broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedState:
    """The result of a recovery."""

    state: BrokerState
    snapshots: Snapshots
    position: int
    """The log position of the newest snapshot."""
    recovered: RecoveredLog


class _StateAndIndex:
    """A `Visitor` that passes records and holes to the state, the index and the scheduled
    messages.
    """

    def __init__(self, replay: Replay, dispatch: Dispatch, agenda: Agenda) -> None:
        self._replay = replay
        self._dispatch = dispatch
        self._agenda = agenda
        self.unexplained_hole: Hole | None = None
        """The newest hole that contains unknown records."""

    def on_record(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.SCHEDULED:
            self._agenda.on_record(header, body)
            return
        self._replay.on_record(header, body)
        self._dispatch.on_record(header)

    def on_hole(self, hole: Hole) -> None:
        self._replay.on_hole(hole)
        self._dispatch.on_hole(hole)
        self._agenda.on_hole(hole)
        if not hole.explained:
            self.unexplained_hole = hole


class Recovery:
    """
    Restores a store: first the newest snapshot, then the log that follows it, perhaps step by step
    while the log grows.

    Raises:
        CorruptIndexError: the index must be rebuilt.
    """

    def __init__(
        self, files: Files, queues: ConsumeQueues, agenda: Agenda, *, clock: Clock
    ) -> None:
        self.queues = queues
        self.agenda = agenda
        self._files = files
        state = BrokerState(clock.boot_ms)
        self._snapshots = Snapshots(files)
        snapshot = self._snapshots.load(state.partitions.load)
        if snapshot.extra is not None:
            state.orphans.update(snapshot.extra.orphans)
            state.problems += snapshot.extra.problems
            state.retained = snapshot.extra.retained
            state.damaged.update(snapshot.extra.damaged)
            for ranges, names in snapshot.extra.dropped:
                # The full snapshot is older than the incremental ones, and may still contain images
                # of these partitions.
                state.apply_dropped(DroppedBody(ranges, names))
        first = min(segment_bases(files), default=0)
        if snapshot.position < first:
            # Retention has removed the log at this snapshot's position, but the remaining log
            # contains the complete state.
            state, snapshot = BrokerState(clock.boot_ms), LoadedSnapshot()
        index_start = min(
            queues.recover(snapshot.position, first_position=first), snapshot.position
        )
        agenda_start = agenda.load(
            is_expected=snapshot.extra is not None and snapshot.extra.has_scheduled,
            position=snapshot.position,
            first_position=first,
        )
        self._state = state
        self._snapshot_position = snapshot.position
        self._replay = Replay(state, start=snapshot.position)
        self._dispatch = Dispatch(queues, start=index_start)
        self._visitor = _StateAndIndex(self._replay, self._dispatch, agenda)
        self._durable_end = max(snapshot.position, agenda_start)
        self.position = max(first, min(index_start, agenda_start))
        """The log position from which records have yet to be applied."""

    def read(self, end: int) -> bool:
        """
        Apply the whole records before `end`, all of which are durable. Readers of the index find
        their batches. Blocks.

        Returns:
            False if the log is damaged; `finish` finds out what is lost.
        """
        position, is_intact = visit_records(
            self._files, self._visitor, start=self.position, end=end
        )
        self._dispatch.flush()
        self.position = position
        self._durable_end = max(self._durable_end, position)
        return is_intact

    def finish(self) -> OpenedState:
        """
        Apply the rest of the log, and prepare it for further writes. Blocks.

        Raises:
            DataFolderError: a newer broker has written to this folder.
            CorruptIndexError
        """
        state, visitor = self._state, self._visitor
        recovered_log = recover_log(
            self._files, visitor, start=self.position, durable=self._durable_end
        )
        self._dispatch.flush()
        self._replay.finish()
        if visitor.unexplained_hole is not None:
            _mark_missing_offsets_lost(state, self.queues, hole=visitor.unexplained_hole)
        first = min(segment_bases(self._files), default=0)
        if state.retained < first:
            correct_first_offsets(state, self.queues, first_position=first)
        for problem in describe_damage(state):
            log.error("%s", problem)
        return OpenedState(
            state=state,
            snapshots=self._snapshots,
            position=self._snapshot_position,
            recovered=recovered_log,
        )


def open_state(
    files: Files,
    queues: ConsumeQueues,
    agenda: Agenda,
    *,
    clock: Clock,
    begun: Recovery | None = None,
) -> OpenedState:
    """
    Recover the state, the index, the scheduled messages and the log.

    Args:
        begun: a recovery into the same index and agenda that has read a part of the log.

    Raises:
        DataFolderError: a newer broker has written to this folder.
    """
    try:
        return (begun or Recovery(files, queues, agenda, clock=clock)).finish()
    except CorruptIndexError as error:
        log.warning("the index is rebuilt from the log: %s", error.message)
        queues.truncate(0)
        return Recovery(files, queues, agenda, clock=clock).finish()


def _mark_missing_offsets_lost(state: BrokerState, queues: ConsumeQueues, *, hole: Hole) -> None:
    """Mark offsets as lost that the state has and that are missing from both the index and the
    log.
    """
    fillers = []
    for partition_id, partition in state.partitions.items():
        bounds = queues.bounds(partition_id)
        if bounds is None or bounds[1] >= partition.next_offset:
            continue
        start, end = bounds[1], partition.next_offset
        state.add_lost_range(partition, start, end, position=hole.start)
        appended_at_ms = partition.appended_at_ms
        fillers.append(
            (partition_id, Unit(start, end - start, hole.start, HEADER_BYTES, appended_at_ms))
        )
    queues.dispatch(fillers)
