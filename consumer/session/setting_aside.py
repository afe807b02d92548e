"""Takes messages out of the order in which they are handed out: parked, dead, or for a retry. Pure.

of this partition      Park (which acks it): its key, None for a dead letter, its tries for a retry
redriven               Park again, Shift or FailAgain: it stays parked where it is
"""

from __future__ import annotations

from ...protocol.message import Message
from ...protocol.parked import RETRIED, FailAgain, Failure, Shift, crash_failure, is_loose
from ...protocol.text import counted
from .failure import Treatment, aside_ms
from .redrive import Window
from .state import PartitionSession


def divert(session: PartitionSession, messages: list[Message], now_ms: int) -> list[Message]:
    """Park the messages of parked keys, and return the others. What the filter leaves out is
    acked.
    """
    parking = session.parking
    if not parking.keys:
        return messages
    rejects = parking.rejects
    count = len(messages)
    if rejects is not None:
        left_out = [each for each in messages if each.key in parking.keys and rejects(each)]
        for message in left_out:
            session.acks.handled.add(message.offset, message.offset + 1)
        if left_out:
            session.let_acks_linger(now_ms)
            gone = {message.offset for message in left_out}
            messages = [message for message in messages if message.offset not in gone]
    before = sum(map(len, parking.releasing.values()))
    kept = parking.divert(messages)
    # What waits for its key to be free is handed out later, so it still counts.
    released = sum(map(len, parking.releasing.values())) - before
    session.intake.held -= count - len(kept) - released
    return kept


def set_aside(
    session: PartitionSession,
    message: Message,
    treatment: Treatment,
    failure: Failure,
    now_ms: int,
    *,
    asked_ms: int | None = None,
) -> int | None:
    """Set aside a message of this partition, which no worker has any more. Return the milliseconds
    until its next try; None: there is none.
    """
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


def set_redriven_aside(
    session: PartitionSession,
    window: Window,
    message: Message,
    treatment: Treatment,
    failure: Failure,
    now_ms: int,
    *,
    asked_ms: int | None = None,
) -> int | None:
    """Keep a redriven message parked, which has failed too often. Returns as `set_aside` does."""
    parking, key = session.parking, window.key
    where = (message.partition_id, ((message.offset, message.offset + 1),))
    session.intake.held -= 1
    session.acks.failing.forget((message.partition_id, message.offset))
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
    dropped = session.lanes.remove(
        lambda other: session.redrives.owners.get((other.partition_id, other.offset)) is window
    )
    session.intake.held -= len(dropped)
    for message in dropped:
        window.out.discard((message.partition_id, message.offset))
        del session.redrives.owners[message.partition_id, message.offset]


def is_own(session: PartitionSession, message: Message) -> bool:
    """Return True if a message was pulled from this partition, and is not redriven."""
    return (message.partition_id, message.offset) not in session.redrives.owners


def crash_of(session: PartitionSession, message: Message, crashes: int, now_ms: int) -> Failure:
    """Return the failure of a message that has ended processes."""
    return crash_failure(
        counted(crashes, "time"),
        at_ms=session.tenure.epoch_ms + now_ms,
        attempts=message.attempt - 1,
    )
