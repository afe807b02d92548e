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
from ..storage.log.recovery import RecoveredLog, recover_log
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


def open_state(files: Files, queues: ConsumeQueues, agenda: Agenda, *, clock: Clock) -> OpenedState:
    """
    Recover the state, the index, the scheduled messages and the log.

    Raises:
        DataFolderError: a newer broker has written to this folder.
    """
    try:
        return _open_state(files, queues, agenda, clock=clock)
    except CorruptIndexError as error:
        log.warning("the index is rebuilt from the log: %s", error.message)
        queues.truncate(0)
        return _open_state(files, queues, agenda, clock=clock)


def _open_state(
    files: Files, queues: ConsumeQueues, agenda: Agenda, *, clock: Clock
) -> OpenedState:
    """Recover like `open_state`. Raises CorruptIndexError if the index must be rebuilt."""
    state = BrokerState(clock.boot_ms)
    snapshots = Snapshots(files)
    snapshot = snapshots.load(state.partitions.load)
    if snapshot.extra is not None:
        state.orphans.update(snapshot.extra.orphans)
        state.problems += snapshot.extra.problems
        state.retained = snapshot.extra.retained
        state.damaged.update(snapshot.extra.damaged)
        for ranges, names in snapshot.extra.dropped:
            # The full snapshot is older than the incremental ones, and may still contain images of
            # these partitions.
            state.apply_dropped(DroppedBody(ranges, names))
    first = min(segment_bases(files), default=0)
    if snapshot.position < first:
        # Retention has removed the log at this snapshot's position, but the remaining log contains
        # the complete state.
        state, snapshot = BrokerState(clock.boot_ms), LoadedSnapshot()
    index_start = min(queues.recover(snapshot.position, first_position=first), snapshot.position)
    agenda_start = agenda.load(
        is_expected=snapshot.extra is not None and snapshot.extra.has_scheduled,
        position=snapshot.position,
        first_position=first,
    )
    replay = Replay(state, start=snapshot.position)
    dispatch = Dispatch(queues, start=index_start)
    visitor = _StateAndIndex(replay, dispatch, agenda)
    recovered_log = recover_log(
        files,
        visitor,
        start=min(index_start, agenda_start),
        durable=max(snapshot.position, agenda_start),
    )
    dispatch.flush()
    replay.finish()
    if visitor.unexplained_hole is not None:
        _mark_missing_offsets_lost(state, queues, hole=visitor.unexplained_hole)
    if state.retained < first:
        correct_first_offsets(state, queues, first_position=first)
    for problem in describe_damage(state):
        log.error("%s", problem)
    return OpenedState(
        state=state, snapshots=snapshots, position=snapshot.position, recovered=recovered_log
    )


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
