"""Hands messages out to a worker that asks. Pure.

suspects? one alone ─▶ failed messages that are due ─▶ freed and redriven ones ─▶ opened ─▶ stored
nothing in hand: a run, to one worker
"""

from __future__ import annotations

from ...protocol.errors import CorruptBatchError
from ...protocol.message import Message
from ..settings import AckMode
from .broadcast import leave_out_superfluous
from .failure import TABLE, Treatment, sets_aside
from .flights import ALONE_FROM
from .flights import CRASHES_MAX as SHARED_CRASHES_MAX
from .ready import FailureOutcome, LeaveTurn, Note, NoteKind, TakeTurn
from .setting_aside import crash_of, divert, is_own, set_aside
from .state import PartitionSession
from .stored import ClosedBatch, ColumnPart
from .suspects import CRASHES_MAX, SuspectMessages, SuspectPhase
from .tenure import NEVER

OPENED_MAX = 1_024
"""The largest number of messages of several batches that are opened for one run."""


def take(
    session: PartitionSession,
    now_ms: int,
    *,
    count: int,
    retries: int,
    run: int = 0,
    together: bool = False,
) -> None:
    """
    Hand out messages to one worker.

    Args:
        count: how many messages at most.
        retries: how many of them may be later tries.
        run: how many messages it would take as a run; 0: none.
        together: True: it takes several messages of a key at once.
    """
    if count <= 0 or session.lanes.run or not session.tenure.may_hand_out(now_ms):
        return
    if session.suspects is not None and take_suspect(session, session.suspects, now_ms):
        return
    lanes = session.lanes
    if (
        run
        and _may_run(session, now_ms)
        and _take_run(session, run, now_ms, is_limited=not together)
    ):
        return
    if together and lanes.is_ordered:
        _take_together(session, count, now_ms)
        return
    is_due = bool(retries and lanes.retries) and lanes.retries[0].due_ms <= now_ms
    if not (is_due or lanes.extra) and session.is_plain:
        _take_plain(session, count, now_ms)
        return
    left = count
    while retries and left and (message := take_due(session, now_ms)) is not None:
        if _is_late(session, message, now_ms):
            drop(session, message)
            continue
        retries -= 1
        left -= 1
        message.attempt += 1
        _hand_out(session, message, now_ms)
    while left and lanes.again:
        left -= 1
        _hand_out(session, lanes.again.popleft(), now_ms)
    while left and lanes.extra:
        message = lanes.extra.popleft()
        if lanes.claim(message):
            left -= 1
            _hand_out(session, message, now_ms)
    while left and (lanes.opened or open_next(session, now_ms)):
        message = lanes.opened.popleft()
        if lanes.claim(message):
            left -= 1
            _hand_out(session, message, now_ms)


def take_due(session: PartitionSession, now_ms: int) -> Message | None:
    """Take a failed message whose next try is due, and park those that have had their last one."""
    lanes = session.lanes
    while (message := lanes.take_due(now_ms)) is not None:
        failure = None
        if lanes.last_failures:
            failure = lanes.last_failures.pop((message.partition_id, message.offset), None)
        if failure is None:
            return message
        set_aside(session, message, Treatment.PARKED, failure, now_ms)
    return None


def _take_together(session: PartitionSession, count: int, now_ms: int) -> None:
    """Hand out messages, as `take` does, with as many later ones of their keys as possible."""
    lanes, hand_out = session.lanes, session.output.hand_out
    firsts: dict[bytes, Message] = {}
    """The first message of each key that is handed out now."""

    def hand_out_with_later(message: Message) -> None:
        _hand_out(session, message, now_ms)
        if not message.key or not is_own(session, message):
            return
        firsts[message.key] = message
        while len(hand_out) < count and (behind := lanes.take_behind(message)) is not None:
            lanes.join(message, behind)
            _hand_out(session, behind, now_ms)

    while len(hand_out) < count and (message := take_due(session, now_ms)) is not None:
        message.attempt += 1
        hand_out_with_later(message)
    while len(hand_out) < count and lanes.again:
        hand_out_with_later(lanes.again.popleft())
    while len(hand_out) < count and lanes.extra:
        message = lanes.extra.popleft()
        if lanes.claim(message):
            _hand_out(session, message, now_ms)
    while len(hand_out) < count and (lanes.opened or open_next(session, now_ms)):
        message = lanes.opened.popleft()
        key = message.key
        if key in firsts and lanes.busy[key] is None:
            lanes.join(firsts[key], message)
        elif lanes.claim(message):
            if key:
                firsts[key] = message
        else:
            continue
        _hand_out(session, message, now_ms)


def _take_plain(session: PartitionSession, count: int, now_ms: int) -> None:
    """Hand out messages, as `take` does, where nothing special is to be done."""
    lanes, hand_out = session.lanes, session.output.hand_out
    again, busy, in_hand = lanes.again, lanes.busy, lanes.in_hand
    while len(hand_out) < count:
        if again:
            message = again.popleft()
        elif lanes.opened or open_next(session, now_ms):
            message = lanes.opened.popleft()
            key = message.key
            if key:
                if key in busy:
                    lanes.claim(message)  # it waits for its key
                    continue
                busy[key] = None
        else:
            return
        in_hand[message.partition_id, message.offset] = message
        hand_out.append(message)


def _hand_out(session: PartitionSession, message: Message, now_ms: int) -> None:
    """Hand out a message whose key is its own."""
    ref = message.partition_id, message.offset
    if _is_late(session, message, now_ms):
        drop(session, message)
        return
    if session.settings.ack is AckMode.BEFORE and is_own(session, message):
        session.acks.awaited[ref] = message
        session.acks.handled.add(message.offset, message.offset + 1)
        session.make_ack_due(now_ms)
        return
    session.lanes.in_hand[ref] = message
    session.flights.left.discard(message.offset)
    session.output.hand_out.append(message)


def _is_late(session: PartitionSession, message: Message, now_ms: int) -> bool:
    """Return True if another consumer of a shared group may soon have the message."""
    flights = session.flights
    is_over = flights.is_shared and now_ms >= flights.begin_until_ms.get(message.offset, NEVER)
    return is_over and is_own(session, message)


def has_more(session: PartitionSession, now_ms: int) -> bool:
    """Return True if a further worker may get something."""
    lanes, suspects = session.lanes, session.suspects
    if not session.tenure.may_hand_out(now_ms):
        return False
    if suspects is None:
        return lanes.may_have_more(now_ms)
    if suspects.message is not None or not lanes.is_idle:
        return False
    if lanes.opened or lanes.stored or lanes.again:
        return True
    if lanes.retries and lanes.retries[0].due_ms <= now_ms:
        return True
    return bool(lanes.extra) and _is_over(session, suspects, now_ms)


def drop(session: PartitionSession, message: Message) -> None:
    """Forget a message of a shared group, which the broker hands out again."""
    session.output.notes.append(FailureOutcome(message, Treatment.EXPIRED))
    session.intake.held -= 1
    session.flights.end(message.offset)
    session.acks.failing.forget((message.partition_id, message.offset))
    session.lanes.finish(message)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────
def _may_run(session: PartitionSession, now_ms: int) -> bool:
    lanes = session.lanes
    return (
        lanes.is_idle
        and lanes.is_ordered
        and session.settings.ack is AckMode.LINGERING
        and not (lanes.again or lanes.extra)
        and not (lanes.retries and lanes.retries[0].due_ms <= now_ms)
    )


def _take_run(session: PartitionSession, count: int, now_ms: int, *, is_limited: bool) -> bool:
    lanes = session.lanes
    while len(lanes.opened) < count and lanes.stored:
        next_count = sum(end - start for start, end in lanes.stored[0].ranges)
        if is_limited and lanes.opened and len(lanes.opened) + next_count > OPENED_MAX:
            break
        if not open_next(session, now_ms):
            break
    while lanes.opened:
        run = lanes.take_run(count)
        if run:
            session.output.hand_out = run
            return True
    return False


# ── batches ───────────────────────────────────────────────────────────────────────────────────────
def open_next(session: PartitionSession, now_ms: int) -> bool:
    """Open stored batches until a message is opened. Return False if there is none. Raises
    CorruptBatchError, and keeps the batch, if it cannot be unpacked.
    """
    lanes = session.lanes
    while lanes.stored:
        stored = lanes.stored[0]
        try:
            messages = stored.open()
        except CorruptBatchError:
            if lanes.opened or session.output.hand_out:
                return False  # what comes before it is handed out first
            raise
        lanes.stored.popleft()
        if now_ms >= stored.begin_until_ms:
            session.intake.held -= len(messages)
            continue
        earlier = session.intake.earlier_tries
        if earlier:
            for message in messages:
                message.attempt += earlier.pop(message.offset, 0)
        if session.flights.is_shared:
            messages = _note_flights(session, messages, stored, now_ms)
        messages = leave_out_superfluous(session, messages, now_ms)
        messages = divert(session, messages, now_ms)
        lanes.opened.extend(messages)
        if messages:
            return True
    return False


def _note_flights(
    session: PartitionSession, messages: list[Message], stored: ClosedBatch, now_ms: int
) -> list[Message]:
    """Note until when messages of a shared group may begin, and return those to hand out."""
    flights, lanes, kept = session.flights, session.lanes, []
    for message in messages:
        ref = message.partition_id, message.offset
        is_acking = ref in session.acks.awaited
        if ref in lanes.in_hand or is_acking or session.offsets.is_acked(message.offset):
            # Its time has ended before the ack: its handler has it, or has had it.
            session.intake.held -= 1
            continue
        if message.offset in flights.begin_until_ms:  # an earlier copy waits for its next try
            session.intake.held -= lanes.discard(ref)
        flights.begin_until_ms[message.offset] = stored.begin_until_ms
        crashes = flights.crashes.get(message.offset, 0)
        message.attempt += crashes
        if crashes >= ALONE_FROM:
            is_spent = crashes >= SHARED_CRASHES_MAX or message.attempt > session.settings.last_try
            is_aside = is_spent and sets_aside(session.settings)
            _note_crash(session, message, crashes, is_set_aside=is_aside)
            if is_aside:
                failure = crash_of(session, message, crashes, now_ms)
                set_aside(session, message, Treatment.DEAD, failure, now_ms)
                continue
            name_crash(session, message, crashes, now_ms)
        kept.append(message)
    return kept


# ── suspects ──────────────────────────────────────────────────────────────────────────────────────
def take_suspect(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> bool:
    """Let the next suspect begin. Return False once messages are handed out freely."""
    lanes = session.lanes
    if suspects.message is not None or not lanes.is_idle:
        return True
    due = take_due(session, now_ms)
    if due is not None:  # it has failed, so it has not ended the process
        due.attempt += 1
        _hand_out(session, due, now_ms)
        return True
    lanes.reopen()
    while lanes.opened or open_next(session, now_ms):
        message = lanes.opened[0]
        if _is_over(session, suspects, now_ms):
            break
        lanes.opened.popleft()
        if not lanes.claim(message):
            continue
        crashes = suspects.crashes.get(message.offset, 0)
        is_spent = crashes >= CRASHES_MAX or (
            crashes > 0 and message.attempt > session.settings.last_try
        )
        is_aside = is_spent and sets_aside(session.settings)
        if crashes:
            _note_crash(session, message, crashes, is_set_aside=is_aside)
        if is_aside:
            failure = crash_of(session, message, crashes, now_ms)
            set_aside(session, message, treat_crash(session, message), failure, now_ms)
            continue
        if crashes:
            name_crash(session, message, crashes, now_ms)
        suspects.begin(message)
        session.output.requests.append(TakeTurn())
        return True
    if not lanes.opened and not _is_over(session, suspects, now_ms):
        return True  # suspects are not pulled yet, or wait for their keys
    session.set_suspects(None)
    return False


def _is_over(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> bool:
    """Return True if messages may be handed out freely."""
    lanes = session.lanes
    first = session.offsets.next_offset
    if lanes.opened or lanes.again:
        first = min(message.offset for message in (*lanes.opened, *lanes.again))
    elif lanes.stored:
        first = lanes.stored[0].ranges[0][0]
    queues = (*lanes.busy.values(), *session.parking.releasing.values())
    queued = (queue[0].offset for queue in queues if queue)
    return suspects.is_over(first, now_ms, first_queued=min(queued, default=NEVER))


def _note_crash(
    session: PartitionSession, message: Message, crashes: int, *, is_set_aside: bool
) -> None:
    note = Note(NoteKind.CRASHED, message.offset, crashes, message, is_set_aside)
    session.output.notes.append(note)


def name_crash(session: PartitionSession, message: Message, crashes: int, now_ms: int) -> None:
    """Name a message that has ended processes to operators until it is handled."""
    failure = crash_of(session, message, crashes, now_ms)
    session.acks.failing.record(message, failure, is_own=True)
    session.let_acks_linger(now_ms)


def treat_crash(session: PartitionSession, message: Message) -> Treatment:
    """Return what becomes of a message that has ended processes."""
    settings = session.settings
    row = TABLE[settings.failure_policy, settings.consume_strategy]
    return Treatment.PARKED if row.after is Treatment.PARKED and message.key else Treatment.DEAD


def on_turn(session: PartitionSession, now_ms: int) -> None:
    """The consumer's turn is here: have the broker record that the suspect begins."""
    suspects = session.suspects
    if suspects is None or suspects.message is None or not session.tenure.is_live:
        session.output.requests.append(LeaveTurn())
        return
    offset = suspects.message.offset
    suspects.phase = SuspectPhase.BEGINNING
    session.acks.begun[offset] = suspects.crashes_if_begun
    session.make_ack_due(now_ms)


def hand_out_suspect(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> None:
    """The begin of the suspect is stored: hand it out."""
    assert suspects.message is not None
    if not session.tenure.may_hand_out(now_ms):
        return  # it waits for the end of a pause
    suspects.phase = SuspectPhase.ALONE
    suspects.since_ms = now_ms
    if isinstance(suspects.message, ColumnPart):
        assert session.lanes.columns is not None
        session.lanes.columns.wait(suspects.message, now_ms)  # until the program asks
    else:
        _hand_out(session, suspects.message, now_ms)


def resume_suspect(session: PartitionSession, now_ms: int) -> None:
    """Hand out the suspect whose begin was stored during a pause."""
    suspects = session.suspects
    if suspects is None or suspects.phase is not SuspectPhase.BEGINNING:
        return
    assert suspects.message is not None
    if suspects.message.offset not in session.acks.begun:
        hand_out_suspect(session, suspects, now_ms)


def pass_over_suspect(session: PartitionSession, suspects: SuspectMessages, now_ms: int) -> None:
    """Do not wait any longer for the present suspect, once the broker has stored how many ends it
    is accused of if its process ends with others in hand.
    """
    assert suspects.message is not None
    crashes = suspects.crashes_if_shared
    if suspects.phase is SuspectPhase.ALONE and crashes < suspects.crashes_if_begun:
        suspects.phase = SuspectPhase.PASSED_OVER
        session.acks.begun[suspects.message.offset] = crashes
        session.make_ack_due(now_ms)
        return
    end_suspect(session)
    session.set_suspects(None)


def end_suspect(session: PartitionSession) -> None:
    """The present suspect has ended, or is not waited for any more."""
    suspects = session.suspects
    if suspects is not None and suspects.message is not None:
        session.acks.begun.pop(suspects.message.offset, None)
        suspects.end()
        session.output.requests.append(LeaveTurn())
