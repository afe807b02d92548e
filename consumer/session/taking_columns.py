"""Hands rows out as columns, and takes them back. Pure.

asked ─▶ given back, and due? the same ─▶ suspects? a part that is recorded as begun ─▶ stored rows
acked ─▶ their offsets are handled ─▶ the next part, with `ack="each"` once that is durable
"""

from __future__ import annotations

from ..settings import AckMode
from .broadcast import leave_out_superfluous
from .events import ColumnsCut, ColumnsHandled, ColumnsReturned, ColumnsWanted
from .offsets import ranges_of
from .outcomes import make_ack_due
from .ready import Note, NoteKind, TakeTurn
from .setting_aside import divert
from .state import PartitionSession
from .stored import PART_BYTES_MAX, PARTS, ClosedBatch, PartitionColumns, cut_part, take_part
from .suspects import SuspectMessages, SuspectPhase
from .taking import end_suspect, name_crash
from .tenure import NEVER


def columns_of(session: PartitionSession) -> PartitionColumns:
    """Return the part of a session whose program takes columns."""
    columns = session.lanes.columns
    assert columns is not None
    return columns


def on_columns_wanted(session: PartitionSession, _event: ColumnsWanted, now_ms: int) -> None:
    """The program takes the next part, which is then `lanes.columns.in_hand`."""
    columns, suspects = columns_of(session), session.suspects
    if not may_take(session, columns, now_ms):
        return
    if columns.again is not None:
        columns.begin(columns.again)
    elif suspects is not None and not _is_over(session, suspects, now_ms):
        if suspects.message is None and _has_rows(session, now_ms):
            _begin_alone(session, suspects, now_ms)
    elif _has_rows(session, now_ms):
        if suspects is not None:
            session.set_suspects(None)
        # Only the first batch was looked through for rows that are to be left out.
        bytes_max = 0 if _leaves_out(session) else PART_BYTES_MAX
        columns.begin(take_part(session.lanes.stored, bytes_max=bytes_max))


def may_take(session: PartitionSession, columns: PartitionColumns, now_ms: int) -> bool:
    """Return True if nothing is in hand or waited for."""
    if columns.in_hand is not None or columns.awaited is not None:
        return False
    is_due = columns.again is None or columns.due_ms <= now_ms
    return is_due and session.tenure.may_hand_out(now_ms)


def has_more_columns(session: PartitionSession, now_ms: int) -> bool:
    """Return True if a program that asks may get something."""
    columns, suspects = columns_of(session), session.suspects
    if not may_take(session, columns, now_ms):
        return False
    if columns.again is not None:
        return True
    is_busy = suspects is not None and suspects.message is not None
    return bool(session.lanes.stored) and not is_busy


def _leaves_out(session: PartitionSession) -> bool:
    return bool(session.parking.keys) or session.intake.is_superfluous is not None


def _has_rows(session: PartitionSession, now_ms: int) -> bool:
    """Return True if the first stored batch has rows to hand out. Rows of parked keys are parked,
    and rows whose original messages were handled are acked.
    """
    stored = session.lanes.stored
    if not _leaves_out(session):
        return bool(stored)
    while stored:
        batch = stored[0]
        messages = leave_out_superfluous(session, batch.open(), now_ms)
        kept = divert(session, messages, now_ms)
        stored.popleft()
        if kept:
            stored.appendleft(ClosedBatch(batch.batch, ranges_of(kept), batch.begin_until_ms))
            return True
    return False


# ── suspects ──────────────────────────────────────────────────────────────────────────────────────
def _is_over(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> bool:
    stored = session.lanes.stored
    first = stored[0].ranges[0][0] if stored else session.offsets.next_offset
    return suspects.is_over(first, now_ms, first_queued=NEVER)


def _begin_alone(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> None:
    """Make the next rows the present suspect: of a part that has ended its process, a smaller
    one.
    """
    stored = session.lanes.stored
    first = stored[0].ranges[0][0]
    begun = min((each for each in suspects.crashes if each >= first), default=None)
    end = None if begun is None else first + -(-(begun + 1 - first) // PARTS)
    bytes_max = 0 if _leaves_out(session) else PART_BYTES_MAX
    part = take_part(stored, bytes_max=bytes_max, end=end)
    if begun == first:
        part.crashes = suspects.crashes[first]
        message = part.batches[0].open()[0]
        message.attempt += part.crashes
        session.output.notes.append(Note(NoteKind.CRASHED, first, part.crashes, message))
        name_crash(session, message, part.crashes, now_ms)
    suspects.begin(part)
    session.output.requests.append(TakeTurn())


# ── outcomes ──────────────────────────────────────────────────────────────────────────────────────
def on_columns_handled(session: PartitionSession, event: ColumnsHandled, now_ms: int) -> None:
    """The program has acked its part."""
    columns, part = columns_of(session), event.part
    start, end = part.range
    columns.in_hand = None
    session.intake.held -= part.count
    session.acks.handled.add(start, end)
    if session.settings.ack is AckMode.EACH:
        columns.awaited = part
    suspects = session.suspects
    if suspects is not None and suspects.is_present(part):
        suspects.phase = SuspectPhase.ACKING
        session.make_ack_due(now_ms)
    make_ack_due(session, now_ms)


def on_columns_returned(session: PartitionSession, event: ColumnsReturned, now_ms: int) -> None:
    """The program has given its part back, or never got it."""
    columns, part = columns_of(session), event.part
    columns.in_hand = None
    if not event.is_try:
        part.attempt -= 1
    if session.tenure.is_live and now_ms < session.tenure.until_ms:
        columns.wait(part, now_ms + event.wait_ms)
    else:
        session.intake.held -= part.count
    suspects = session.suspects
    if event.is_try and suspects is not None and suspects.is_present(part):
        end_suspect(session)


def on_columns_cut(session: PartitionSession, event: ColumnsCut, _now_ms: int) -> None:
    """Of the part in hand the program has the first rows alone."""
    columns = columns_of(session)
    assert columns.in_hand is not None
    cut_part(columns.in_hand, event.end, session.lanes.stored)


def end_awaited(session: PartitionSession, columns: PartitionColumns) -> None:
    """Let the next part follow once the ack of the last one is durable."""
    if columns.awaited is not None and columns.awaited.offset not in session.acks.handled:
        columns.awaited = None
