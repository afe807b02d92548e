"""Reads and verifies a whole data folder that no broker uses. Changes nothing. Does disk I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...protocol.clock import SystemClock
from ...protocol.errors import CorruptLogError, KeylaneError
from ...protocol.record import Header, Kind
from ..partition.damage import describe_damage
from ..partition.state import BrokerState
from ..scheduled.agenda import ScheduledAgenda
from ..scheduled.old_journal import read_journal
from ..scheduled.records import Place, Record, decode_changes
from ..storage.data_folder import FolderIdentity, read_identity
from ..storage.files import Files
from ..storage.log.commit_log import segment_bases, segment_path
from ..storage.log.holes import Hole
from ..storage.log.recovery import scan_log
from ..storage.snapshot import Snapshots
from ..store.replay import Replay


@dataclass(kw_only=True)
class Inspection:
    """A summary of a data folder, and its problems."""

    broker_group: str
    broker_id: str
    segments: int
    first_position: int
    next_position: int = 0
    records: int = 0
    batches: int = 0
    messages: int = 0
    partitions: int = 0
    unfinished_bytes: int = 0
    """The size of an unfinished write at the end of the log, which the next start will truncate."""
    snapshot_position: int = 0
    """The log position of the newest snapshot; 0 if there is none."""
    scheduled: int = 0
    """The number of scheduled messages in the undamaged part of the log, or of the journal of an
    earlier version that the next start moves into it.
    """
    stopped_partitions: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _CountingVisitor:
    """A `Visitor` that replays the log and counts its records."""

    def __init__(
        self,
        replay: Replay,
        agenda: ScheduledAgenda,
        inspection: Inspection,
        on_position: Callable[[int], None],
    ) -> None:
        self._replay = replay
        self._agenda = agenda
        self._inspection = inspection
        self._on_position = on_position

    def on_record(self, header: Header, body: memoryview) -> None:
        self._on_position(header.position)
        self._replay.on_record(header, body)
        self._inspection.records += 1
        if header.kind == Kind.SCHEDULED:
            self._agenda.on_record(header, body)
        if header.kind == Kind.MESSAGES:
            self._inspection.batches += 1
            self._inspection.messages += header.count

    def on_hole(self, hole: Hole) -> None:
        self._replay.on_hole(hole)
        self._agenda.on_hole(hole)


def log_bounds(files: Files) -> tuple[int, int]:
    """Return the positions at which the log of a folder begins and ends."""
    bases = segment_bases(files)
    last = max(bases, default=0)
    return min(bases, default=0), last + (files.size(segment_path(last)) or 0)


def inspect_folder(
    files: Files, on_position: Callable[[int], None] = lambda _position: None
) -> Inspection:
    """
    Read the whole log and the scheduled messages of a locked folder, verify every checksum, and
    compare the log with the snapshot.

    Args:
        on_position: called with the position of each record.

    Raises:
        DataFolderError: the folder is not a broker's, or a newer broker wrote it.
    """
    identity = read_identity(files)
    bases = segment_bases(files)
    inspection = Inspection(
        broker_group=identity.broker_group,
        broker_id=identity.broker_id,
        segments=len(bases),
        first_position=min(bases, default=0),
    )
    from_snapshot = BrokerState()
    snapshot = Snapshots(files).load(from_snapshot.partitions.load)
    inspection.snapshot_position = snapshot.position
    copied_agenda = ScheduledAgenda(files, SystemClock())
    copied_agenda.load(
        is_expected=snapshot.extra is not None and snapshot.extra.has_scheduled,
        position=snapshot.position,
        first_position=min(bases, default=0),
    )
    state = BrokerState()
    replay = Replay(state)
    agenda = ScheduledAgenda(files, SystemClock())
    scan_result = scan_log(
        files,
        _CountingVisitor(replay, agenda, inspection, on_position),
        durable=inspection.snapshot_position,
    )
    replay.finish()
    inspection.next_position = scan_result.end
    inspection.unfinished_bytes = scan_result.cut_bytes
    inspection.partitions = len(state.partitions)
    inspection.stopped_partitions = sorted(
        partition_id
        for partition_id, partition in state.partitions.items()
        if partition.lost or partition.fences_lost
    )

    def replay_journal(segment: int, position: int, changes: list[Record]) -> None:
        for change in changes:
            agenda.index.replay(change, Place(segment, position))

    journal_problems = read_journal(files, replay_journal)
    inspection.scheduled = len(agenda.index.entries)
    inspection.problems = [
        *describe_damage(state),
        *_missing_messages(state, from_snapshot),
        *dict.fromkeys([*agenda.problems, *copied_agenda.problems]),
        *journal_problems,
    ]
    return inspection


def _missing_messages(state: BrokerState, snapshot: BrokerState) -> list[str]:
    """Return a problem for each partition that has fewer messages in the log than in the
    snapshot.
    """
    problems = []
    for partition_id in snapshot.partitions:
        if partition_id in state.dropped:
            continue
        expected_end = snapshot.partitions[partition_id]
        try:
            replayed_partition = state.partition(partition_id)
        except KeylaneError as error:
            problems.append(error.message)
            continue
        if (
            replayed_partition.next_offset < expected_end.next_offset
            and not replayed_partition.lost
        ):
            problems.append(
                f"partition {partition_id} ends at offset {replayed_partition.next_offset} in the "
                f"log, and at {expected_end.next_offset} in the snapshot"
            )
    return problems


def walk_log(
    files: Files,
    visit: Callable[[Header, memoryview], None],
    hole: Callable[[Hole], None],
    *,
    start: int = 0,
) -> FolderIdentity:
    """
    Read the log of a locked folder in order, calling `visit` with its records and `hole` with its
    holes.

    The walk begins with the segment that contains position `start`.

    Raises:
        DataFolderError: the folder is not a broker's, or a newer broker wrote it.
    """
    identity = read_identity(files)
    bases = [base for base in segment_bases(files) if base <= start]
    scan_log(files, _CallbackVisitor(visit, hole), start=max(bases, default=0))
    return identity


def walk_scheduled(
    files: Files, visit: Callable[[int, Sequence[Record]], None]
) -> tuple[FolderIdentity, list[str]]:
    """
    Call `visit` with the position and the changes of each record of scheduled messages in the log
    of a locked folder, in order.

    Returns:
        The folder's identity, and the problems.

    Raises:
        DataFolderError: the folder is not a broker's, or a newer broker wrote it.
    """
    problems: list[str] = []

    def visit_scheduled(header: Header, body: memoryview) -> None:
        if header.kind != Kind.SCHEDULED:
            return
        try:
            visit(header.position, decode_changes(body, header.position))
        except CorruptLogError as error:
            problems.append(error.message)

    def note_hole(hole: Hole) -> None:
        problems.append(f"the log is damaged at positions [{hole.start}, {hole.end})")

    identity = walk_log(files, visit_scheduled, note_hole)
    problems += read_journal(files, lambda _segment, position, changes: visit(position, changes))
    return identity, problems


class _CallbackVisitor:
    """A `Visitor` that consists of two functions."""

    def __init__(
        self, visit: Callable[[Header, memoryview], None], hole: Callable[[Hole], None]
    ) -> None:
        self.on_record = visit
        self.on_hole = hole
