"""Takes messages out of the order in which they are handed out, and brings them back. Pure.

set aside: parked, dead, or for a retry
    of this partition      Park (which acks it): its key, None for a dead letter, its tries for
                           a retry
    redriven               Park again, Shift or FailAgain: it stays parked where it is
redriven, window by window
    listed as redriving ─▶ window ─▶ read ─▶ in hand ─▶ stored ─▶ the next window ─▶ freed
    aside, due ─▶ window ─▶ read ─▶ in hand ─▶ stored
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...protocol.message import Message
from ...protocol.parked import (
    RETRIED,
    FailAgain,
    Failure,
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
from .events import KeysListed, Note, NoteKind, ReadWindow, SourceUnreadable, WindowRead
from .failure import Treatment, aside_ms
from .parking import CAREFUL_MS, WINDOW, DueRetry, Pending, Window, WindowPhase
from .state import PartitionSession


def divert(session: PartitionSession, messages: list[Message], now_ms: int) -> list[Message]:
    """Park the messages of parked keys, and return the others. What the filter leaves out is
    acked.
    """
    parking = session.parking
    keys, rejects = parking.keys, parking.rejects
    if not keys:
        return messages
    if rejects is not None:
        messages = leave_out(
            session, messages, lambda message: message.key in keys and rejects(message), now_ms
        )
    before = sum(map(len, parking.releasing.values()))
    kept = parking.divert(messages)
    # What waits for its key to be free is handed out later, so it still counts.
    released = sum(map(len, parking.releasing.values())) - before
    session.intake.held -= len(messages) - len(kept) - released
    return kept


def leave_out(
    session: PartitionSession,
    messages: list[Message],
    is_unwanted: Callable[[Message], bool],
    now_ms: int,
) -> list[Message]:
    """Ack messages of this partition that are not to be handed out, and return the others."""
    unwanted = {message.offset for message in messages if is_unwanted(message)}
    if not unwanted:
        return messages
    for offset in sorted(unwanted):
        session.acks.handled.add(offset, offset + 1)
    session.intake.held -= len(unwanted)
    session.let_acks_linger(now_ms)
    return [message for message in messages if message.offset not in unwanted]


def set_aside(
    session: PartitionSession,
    message: Message,
    treatment: Treatment,
    failure: Failure,
    now_ms: int,
    *,
    asked_ms: int | None = None,
) -> int | None:
    """Set aside a message, which no worker has any more. Return the milliseconds until its next
    try; None: there is none.
    """
    if not is_own(session, message):
        return _keep_parked(session, message, treatment, failure, now_ms, asked_ms=asked_ms)
    parking, lanes, offset = session.parking, session.lanes, message.offset
    session.acks.tries.pop(offset, None)
    session.acks.failing.forget((message.partition_id, offset))
    if treatment is Treatment.PARKED:
        later = lanes.remove_key(message.key, lambda other: is_own(session, other))
        session.intake.held -= 1 + len(later)
        for other in later:  # they may have failed with it, in a batch
            session.acks.tries.pop(other.offset, None)
            session.acks.failing.forget((other.partition_id, other.offset))
        parking.park(message.key, [offset, *(each.offset for each in later)], failure)
        return None
    pause = None
    session.intake.held -= 1
    if session.flights.is_shared:
        session.flights.end(offset)
        session.offsets.mark_acked(offset)  # another copy of it may be stored
    if treatment is Treatment.ASIDE:
        pause = aside_ms(session.settings, session.rng, attempt=message.attempt, asked_ms=asked_ms)
        parking.park(message.attempt, [offset], failure, try_at_ms=now_ms + pause)
    else:
        parking.park(None, [offset], failure)
    lanes.finish(message)
    return pause


def _keep_parked(
    session: PartitionSession,
    message: Message,
    treatment: Treatment,
    failure: Failure,
    now_ms: int,
    *,
    asked_ms: int | None,
) -> int | None:
    """Keep a redriven message parked, which has failed too often. Returns as `set_aside` does."""
    parking, window = session.parking, leave_window(session, message)
    key, where = window.key, (message.partition_id, ((message.offset, message.offset + 1),))
    window.unstored += 1
    if not is_loose(key):
        window.is_stopped = True
        parking.park(key, [], failure, window=window.number)
        _drop_window(session, window)
        session.lanes.remove_key(message.key, lambda _: False)
        return None
    next_try = None
    if isinstance(key, int):
        is_retried = key != RETRIED and treatment is Treatment.ASIDE
        pause = aside_ms(session.settings, session.rng, attempt=message.attempt, asked_ms=asked_ms)
        next_try = pause if is_retried else None
        try_at_ms = now_ms + pause if is_retried else 0
        shift = Shift(key, message.attempt if is_retried else None, *where, failure)
        parking.add(shift, window=window.number, try_at_ms=try_at_ms)
    else:
        window.failure = failure
        parking.add(FailAgain(key, *where, failure), window=window.number)
    session.lanes.finish(message)
    return next_try


def _drop_window(session: PartitionSession, window: Window) -> None:
    """Drop the messages of a window that no worker has: they are parked."""
    owners = session.redrives.owners
    for message in session.lanes.remove(
        lambda other: owners.get((other.partition_id, other.offset)) is window
    ):
        leave_window(session, message)


def leave_window(session: PartitionSession, message: Message) -> Window:
    """End a redriven message here, and return its window."""
    ref = message.partition_id, message.offset
    window = session.redrives.owners.pop(ref)
    window.out.discard(ref)
    session.acks.failing.forget(ref)
    session.intake.held -= 1
    return window


def is_own(session: PartitionSession, message: Message) -> bool:
    """Return True if a message was pulled from this partition, and is not redriven."""
    return (message.partition_id, message.offset) not in session.redrives.owners


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
