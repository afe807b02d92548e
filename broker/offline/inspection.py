"""Reads everything of a data folder that no broker uses, and lists its problems. Changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol.errors import KeylaneError
from ...protocol.record import Header, Kind
from ..partition.damage import damage_of
from ..partition.state import BrokerState
from ..scheduled.journal import ScheduledJournal
from ..scheduled.records import Place, Record
from ..scheduled.scheduler import open_schedule
from ..storage.data_folder import FolderIdentity, read_identity
from ..storage.files import Files
from ..storage.log.commit_log import segment_bases
from ..storage.log.holes import Hole
from ..storage.log.recovery import scan_log
from ..storage.snapshot import Snapshots
from ..store.replay import Replay


@dataclass(kw_only=True)
class Inspection:
    """The content of a data folder, and its problems."""

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
    """The number of bytes of an unfinished write at the end of the log, which the next start
    cuts.
    """
    snapshot_position: int = 0
    """The log position of the newest snapshot; 0 without a snapshot."""
    scheduled: int = 0
    """The number of messages that wait for a later delivery, counted as far as their journal is not
    damaged.
    """
    stopped_partitions: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Counting:
    """A `Visitor` that replays the log and counts its records."""

    def __init__(self, replay: Replay, inspection: Inspection) -> None:
        self._replay = replay
        self._inspection = inspection

    def record(self, header: Header, body: memoryview) -> None:
        self._replay.record(header, body)
        self._inspection.records += 1
        if header.kind == Kind.MESSAGES:
            self._inspection.batches += 1
            self._inspection.messages += header.count

    def hole(self, hole: Hole) -> None:
        self._replay.hole(hole)


def inspect_folder(files: Files) -> Inspection:
    """
    Read the whole log and the scheduled messages of a locked folder, check every checksum, and
    compare the snapshot.

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
    inspection.snapshot_position = Snapshots(files).load(from_snapshot.partitions.load).position
    state = BrokerState()
    replay = Replay(state)
    scanned = scan_log(files, _Counting(replay, inspection), durable=inspection.snapshot_position)
    replay.finish()
    inspection.next_position = scanned.end
    inspection.unfinished_bytes = scanned.cut_bytes
    inspection.partitions = len(state.partitions)
    inspection.stopped_partitions = sorted(
        number
        for number, partition in state.partitions.items()
        if partition.lost or partition.fences_lost
    )
    schedule_index, journal = open_schedule(files, cut=False)
    inspection.scheduled = len(schedule_index.entries)
    inspection.problems = [
        *damage_of(state),
        *_missing(state, from_snapshot),
        *journal.problems,
    ]
    return inspection


def _missing(state: BrokerState, snapshot: BrokerState) -> list[str]:
    """Return the partitions for which the log has fewer messages than the snapshot, as problems."""
    problems = []
    for number in snapshot.partitions:
        if number in state.dropped:
            continue
        then = snapshot.partitions[number]
        try:
            now = state.partition(number)
        except KeylaneError as error:
            problems.append(error.message)
            continue
        if now.next_offset < then.next_offset and not now.lost:
            problems.append(
                f"partition {number} ends at offset {now.next_offset} in the log, "
                f"and at {then.next_offset} in the snapshot"
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
    Call `visit` and `hole` with the records and holes of a locked folder's log, oldest first.

    The walk begins with the segment that contains position `start`.

    Raises:
        DataFolderError: the folder is not a broker's, or a newer broker wrote it.
    """
    identity = read_identity(files)
    before = [base for base in segment_bases(files) if base <= start]
    scan_log(files, _Walk(visit, hole), start=max(before, default=0))
    return identity


def walk_scheduled(
    files: Files, visit: Callable[[Place, list[Record]], None]
) -> tuple[FolderIdentity, list[str]]:
    """
    Call `visit` with the frames of a locked folder's journal of scheduled messages, oldest first.

    Returns:
        The identity of the folder, and the damage of the journal.

    Raises:
        DataFolderError: the folder is not a broker's, or a newer broker wrote it.
    """
    identity = read_identity(files)
    return identity, ScheduledJournal.open(files, visit, cut=False).problems


class _Walk:
    def __init__(
        self, visit: Callable[[Header, memoryview], None], hole: Callable[[Hole], None]
    ) -> None:
        self.record = visit
        self.hole = hole
