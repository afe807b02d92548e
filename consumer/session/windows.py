"""RedriveWindows parked keys, and tries messages that wait for a retry, window by window. Pure.

listed as redriving ─▶ window ─▶ read ─▶ in hand ─▶ stored ─▶ the next window ─▶ freed
aside, due ─▶ window ─▶ read ─▶ in hand ─▶ stored
"""

from __future__ import annotations

from functools import partial

from ...protocol.message import Message
from ...protocol.parked import (
    RETRIED,
    Free,
    Park,
    ParkedKeyRow,
    ParkState,
    Shift,
    Unpark,
    crash_failure,
    is_loose,
)
from ...protocol.text import counted
from .aside import DueRetry
from .events import KeysListed, SourceUnreadable, WindowRead
from .parking import Pending
from .ready import Note, NoteKind, ReadWindow
from .redrive import CAREFUL_MS, WINDOW, Window, WindowPhase
from .state import PartitionSession


def on_listed(session: PartitionSession, event: KeysListed, now_ms: int) -> None:
    """The broker has listed the parked keys."""
    parking, redrives = session.parking, session.redrives
    # It falls if the broker runs on an older copy of its data. A later one than that of the list
    # comes again with the next ack.
    parking.listed_version = parking.version = event.version
    parking.ancestors.set_unneeded(event.unneeded_ancestors)
    rows = [row for row in event.rows if row.key not in parking.freed]
    parking.keys.update(row.key for row in rows if not is_loose(row.key))
    for row in rows:
        waits = row.key in parking.releasing or parking.ends_redrive(row.key)
        if row.state is ParkState.REDRIVING and not waits and not _is_retry(row.key):
            _begin(session, row)
    if event.aside and redrives.is_unreleased:
        redrives.careful_until_ms = now_ms + CAREFUL_MS
    for tries, source, start, end in event.aside:
        if tries < 0 and redrives.is_unreleased:
            attempts = -tries
            at_ms = session.tenure.epoch_ms + now_ms
            failure = crash_failure("again", at_ms=at_ms, attempts=attempts)
            parking.add(Shift(tries, None, source, ((start, end),), failure))
            session.output.notes.append(Note(NoteKind.CRASHED, start, end - start))
        else:
            redrives.aside.put(now_ms, tries, source, (start, end))


def _is_retry(key: object) -> bool:
    return isinstance(key, int) and key != 0


def _begin(session: PartitionSession, row: ParkedKeyRow) -> None:
    redrives, parking = session.redrives, session.parking
    if not redrives.is_allowed:
        session.output.notes.append(Note(NoteKind.NO_REDRIVES))
    elif session.offsets.is_acked_to_end or row.key in redrives.keys:
        return
    elif row.messages or is_loose(row.key) or parking.has_parks_of(row.key):
        redrives.begin(row.key, is_inherited=not session.tenure.is_acquired)
    else:  # the last one was skipped: later messages of the key are like any others
        parking.free(row.key)


def read_due(session: PartitionSession, now_ms: int) -> None:
    """Request the windows that are due."""
    redrives = session.redrives
    if not redrives.has_waiting or not redrives.is_allowed:
        return
    if session.offsets.is_acked_to_end:
        redrives.drop_unread()  # the children have adopted them, or will
        return
    due = list(redrives.take_due(now_ms))
    window = redrives.take_unprotected(now_ms)
    if window is not None:
        _protect(session, window, now_ms)
    for each in due:
        session.output.requests.append(
            ReadWindow(
                *(each.number, each.key, each.source, each.ranges, WINDOW),
                passed_over=each.unreadable.below,
                first_row=each.unreadable.first_row,
            )
        )


def _protect(session: PartitionSession, window: Window, now_ms: int) -> None:
    """Have the broker store that a window begins which may end the process."""
    window.unstored += 1
    if window.is_retry:
        assert isinstance(window.key, int)
        begun = -attempt_of(window.key)
        change = Shift(window.key, begun, window.source, window.ranges)
        window.key = begun
        session.parking.add(change, window=window.number)
        return
    crashes = 2 if window.is_inherited else 1  # this process, and that of the earlier owner
    failure = crash_failure(
        counted(crashes, "time"), at_ms=session.tenure.epoch_ms + now_ms, attempts=crashes
    )
    token = session.tenure.lease[3]
    if isinstance(window.key, bytes):
        session.output.notes.append(Note(NoteKind.PROTECTED, key=window.key))
    session.parking.park(window.key, [], failure, token=token, window=window.number)


def attempt_of(key: int) -> int:
    """Return the number of the next try of messages that wait under `key`: a negative one says that
    this try has begun.
    """
    return key + 1 if key > 0 else -key


def on_window_read(session: PartitionSession, event: WindowRead, now_ms: int) -> None:
    """Messages of a window are here."""
    redrives, parking = session.redrives, session.parking
    window = redrives.windows.get(event.number)
    if window is None or not session.tenure.is_live:
        return
    if window.is_retry:
        redrives.aside.note_read(window.source)
    if window.unreadable:
        window.unreadable.first_row = event.first_row
    else:
        window.failures = 0
    for source, start, end in event.gone:
        session.output.notes.append(Note(NoteKind.GONE, start, end - start))
        window.unstored += 1
        parking.add(Unpark(window.key, source, ((start, end),)), window=window.number)
    for left in event.left:
        assert isinstance(window.key, int)
        redrives.aside.put(now_ms, window.key, window.source, left)
    window.phase = WindowPhase.IN_HAND
    if window.gives_up and event.messages:
        _give_up(session, window, event.messages)
        return
    for message in event.messages:
        ref = message.partition_id, message.offset
        window.out.add(ref)
        redrives.owners[ref] = window
        if window.is_retry:
            assert isinstance(window.key, int)
            message.attempt = attempt_of(window.key)
    session.lanes.extra.extend(event.messages)
    session.intake.held += len(event.messages)
    if event.messages or event.gone:
        return
    if window.unreadable:  # the others are handled: what was passed over is read again
        on_window_failed(session, window.number, now_ms)
    elif is_loose(window.key):
        _end_loose(session, window)
    elif parking.has_parks_of(window.key):
        window.phase = WindowPhase.DUE
        window.not_before_ms = now_ms + session.settings.backoff.wait_ms(1, session.rng)
    else:
        window.phase = WindowPhase.FREEING
        window.unstored += 1
        parking.free(window.key)


def _give_up(session: PartitionSession, window: Window, messages: list[Message]) -> None:
    """Let dead letters stay dead, of which one may have ended the last owner."""
    for message in messages:
        window.unstored += 1
        offset_range = message.offset, message.offset + 1
        change = Shift(RETRIED, None, message.partition_id, (offset_range,))
        session.parking.add(change, window=window.number)


def on_source_unreadable(session: PartitionSession, event: SourceUnreadable, now_ms: int) -> None:
    """The first messages of a window cannot be read from where they are stored."""
    window = session.redrives.windows.get(event.number)
    if window is None or not session.tenure.is_live:
        return
    if window.is_retry or not is_loose(window.key):
        on_window_failed(session, event.number, now_ms, upto=event.upto)
        return
    window.unreadable.add(event.source, event.upto, event.first_row)
    window.phase = WindowPhase.DUE


def on_window_failed(
    session: PartitionSession, number: int, now_ms: int, *, upto: int | None = None
) -> None:
    """
    A window was not read: it is read again after a pause.

    Args:
        upto: the offset after what cannot be read of a retry; None: unknown.
    """
    redrives = session.redrives
    window = redrives.windows.get(number)
    if window is None or not session.tenure.is_live:
        return
    if window.is_retry:
        assert isinstance(window.key, int)
        due = DueRetry(window.key, window.source, window.ranges, window.is_probe)
        redrives.aside.put_back(due, now_ms, partial(_pause_ms, session), upto=upto)
        redrives.end(window)
        return
    window.failures += 1
    window.unreadable.clear()
    redrives.wait(window, now_ms + _pause_ms(session, window.failures))


def _pause_ms(session: PartitionSession, failures: int) -> int:
    return session.settings.backoff.wait_ms(failures, session.rng)


def on_stored(session: PartitionSession, pending: Pending, now_ms: int) -> None:
    """The broker has stored a change."""
    change, redrives = pending.change, session.redrives
    if isinstance(change, Free):
        _release(session, change.key)
    elif isinstance(change, Park) and pending.try_at_ms:
        assert isinstance(change.key, int)
        for offset_range in change.ranges:
            redrives.aside.put(pending.try_at_ms, change.key, session.partition_id, offset_range)
    elif isinstance(change, Shift) and change.to is not None and pending.try_at_ms:
        for offset_range in change.ranges:
            redrives.aside.put(pending.try_at_ms, change.to, change.source, offset_range)
    elif isinstance(change, Park) and is_loose(change.key) and not (change.ranges or change.token):
        # Others of its key may have been the last ones of an ancestor. Before this was stored, a
        # list would have named the key as redriven.
        session.parking.ancestors.note_freed()
    window = redrives.windows.get(pending.window)
    if window is not None:
        window.unstored -= 1
        _settle(session, window)


def _settle(session: PartitionSession, window: Window) -> None:
    """Go on with a window of which everything is stored."""
    if window.out or window.unstored:
        return
    if window.phase is WindowPhase.PROTECTING:
        window.phase = WindowPhase.DUE
    elif window.phase is WindowPhase.IN_HAND and not (window.is_stopped or window.is_retry):
        if is_loose(window.key) and window.failure is not None:
            session.parking.park(window.key, [], window.failure)
            session.redrives.end(window)
        else:
            window.phase = WindowPhase.DUE
    elif window.phase is WindowPhase.IN_HAND and window.is_retry:
        _end_loose(session, window)
    elif window.phase is WindowPhase.IN_HAND:
        session.redrives.end(window)


def _end_loose(session: PartitionSession, window: Window) -> None:
    """End a window of loose messages, which may have had the last ones of an ancestor."""
    redrives = session.redrives
    redrives.end(window)
    is_own = window.source == session.partition_id
    if not (window.is_retry and (is_own or redrives.has_retries_of(window.source))):
        session.parking.ancestors.note_freed()


def _release(session: PartitionSession, key: bytes | int | None) -> None:
    """The broker has freed a key: its later messages are handed out."""
    parking, redrives = session.parking, session.redrives
    waiting = parking.releasing.pop(key, [])
    parking.keys.discard(key)
    parking.failures.pop(key, None)
    parking.freed.add(key)
    parking.ancestors.note_freed()
    for window in list(redrives.windows.values()):
        if window.key == key and not window.is_retry:
            redrives.end(window)
    if not session.tenure.is_live:
        return
    if session.suspects is None:
        session.lanes.extra.extend(waiting)
    else:
        session.lanes.put_back(waiting)  # they may be suspects too
