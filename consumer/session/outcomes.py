"""What becomes of what workers had, be it a message, a batch or a part of columns. Pure.

handled  ─▶ of this partition: an offset to ack; redriven: no longer parked
failed   ─▶ `failure.py` ─▶ again in place, aside, parked, dead; a batch: again as a whole, then
            in halves, and one message alone
hanging  ─▶ named to operators until it has ended
returned ─▶ handed out again here, or by the next owner
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from ...protocol.groups import FailurePolicy
from ...protocol.message import Message
from ...protocol.parked import Failure, Unpark
from ..settings import AckMode
from .events import (
    AckedLate,
    BatchFailed,
    ColumnsCut,
    ColumnsHandled,
    ColumnsReturned,
    FailureOutcome,
    MessageExpired,
    MessageFailed,
    MessageHangs,
    MessagesHandled,
    MessagesLeft,
    MessagesReturned,
    Note,
    NoteKind,
    RunEnded,
    RunSpread,
)
from .failure import Treatment, decide_treatment, pause_ms
from .lanes import (
    WHOLE_TRIES,
    MessageBatch,
    PartitionColumns,
    cut_part,
)
from .offsets import NEVER, ranges_of
from .state import PartitionSession, SuspectPhase
from .taking import (
    await_ack,
    batches_of,
    columns_of,
    end_suspect,
    finish_batch,
    give_batch,
    register,
    stop_counting,
    take,
)
from .windows import is_own, leave_window, set_aside


def on_run_ended(session: PartitionSession, event: RunEnded, now_ms: int) -> None:
    """A run has ended."""
    done = session.lanes.end_run(event.done, has_next=event.has_next)
    if done:
        handled = session.acks.handled
        for start, end in ranges_of(done):
            handled.add(start, end)
        session.intake.held -= len(done)
        make_ack_due(session, now_ms)


def on_run_spread(session: PartitionSession, _event: RunSpread, _now_ms: int) -> None:
    """The program acks or returns the messages of a run one by one."""
    session.lanes.spread()


def make_ack_due(session: PartitionSession, now_ms: int) -> None:
    """Let the next ack request leave after its linger, or at once where something waits for it."""
    settings = session.settings
    lingers = settings.ack is AckMode.LINGERING and not session.offsets.is_exhausted
    if lingers:
        session.let_acks_linger(now_ms)
    else:
        session.make_ack_due(now_ms)


def on_handled(session: PartitionSession, event: MessagesHandled, now_ms: int) -> None:
    """Handlers have returned."""
    if session.is_plain and not session.redrives.owners and not session.lanes.together:
        _ack_plain(session, event.messages, now_ms)
    elif (batch := _take_back_batch(session, event.messages)) is not None:
        if is_own(session, batch.messages[0]):
            _ack_batch(session, batch, now_ms)
        else:
            for message in batch.messages:
                _unpark(session, message)
            finish_batch(session, batch)
    else:
        for message in event.messages:
            ref = message.partition_id, message.offset
            del session.lanes.in_hand[ref]
            if ref in session.redrives.owners:
                _unpark(session, message)
                session.lanes.finish(message)
            else:
                _ack(session, message, now_ms)
    if event.wanted:
        take(session, now_ms, count=event.wanted, retries=event.wanted)


def _ack_plain(session: PartitionSession, messages: Sequence[Message], now_ms: int) -> None:
    """Ack messages that need nothing but their keys freed: the usual case, in one loop without
    calls, because a handler that waits spends its time here.
    """
    lanes = session.lanes
    in_hand, busy, pass_on, add = lanes.in_hand, lanes.busy, lanes.pass_on, session.acks.handled.add
    for message in messages:
        offset, key = message.offset, message.key
        del in_hand[message.partition_id, offset]
        if key:
            if busy[key] is None:
                del busy[key]
            else:
                pass_on(key)
        add(offset, offset + 1)
    session.intake.held -= len(messages)
    if session.acks.due_ms == NEVER:
        make_ack_due(session, now_ms)


def _ack(session: PartitionSession, message: Message, now_ms: int) -> None:
    """Ack a handled message of this partition."""
    offset, mode = message.offset, session.settings.ack
    session.intake.held -= 1
    suspects = session.suspects
    if suspects is not None and suspects.is_present(message):
        suspects.phase = SuspectPhase.ACKING
    if session.flights.is_shared:
        session.flights.end(offset)
        session.offsets.mark_acked(offset)
        if not session.calls.pull.is_in_flight:
            session.next_timer_ms = now_ms  # fast handlers may make another pull worth it
    if mode is AckMode.BEFORE:
        session.acks.failing.forget((message.partition_id, offset))
    else:
        session.acks.handled.add(offset, offset + 1)
    if mode is AckMode.EACH:
        session.acks.awaited[message.partition_id, offset] = message
    else:
        session.lanes.finish(message)
    make_ack_due(session, now_ms)
    if suspects is not None and mode is not AckMode.BEFORE:
        session.make_ack_due(now_ms)
    elif suspects is not None and suspects.is_present(message):
        end_suspect(session)


def _unpark(session: PartitionSession, message: Message) -> None:
    """A redriven message is handled, so it is no longer parked; its key stays busy."""
    window = leave_window(session, message)
    window.unstored += 1
    change = Unpark(window.key, message.partition_id, ((message.offset, message.offset + 1),))
    session.parking.add(change, window=window.number)


def on_failed(session: PartitionSession, event: MessageFailed, now_ms: int) -> None:
    """A handler has failed, or a program has given a message back."""
    message, lanes = event.message, session.lanes
    ref = message.partition_id, message.offset
    del lanes.in_hand[ref]
    suspects = session.suspects
    is_suspect = suspects is not None and suspects.is_present(message)
    if session.settings.ack is AckMode.BEFORE and is_own(session, message):
        session.output.notes.append(FailureOutcome(message, Treatment.LOST))
        session.acks.failing.forget(ref)
        session.intake.held -= 1
        lanes.finish(message)
    else:
        later = lanes.take_back(message) if lanes.together and is_own(session, message) else []
        for each in later:
            session.acks.failing.forget((each.partition_id, each.offset))
        _fail(session, event, tuple(later), now_ms)
    if is_suspect:
        end_suspect(session)


def _fail(
    session: PartitionSession, event: MessageFailed, later: tuple[Message, ...], now_ms: int
) -> None:
    message, failure, notes = event.message, event.failure, session.output.notes
    if not session.tenure.is_live and not is_own(session, message):
        forget_redriven(session, message)
        return
    if is_own(session, message) and not session.tenure.keeps(now_ms):
        # The next owner hands it out; this try counts.
        record_try(session, message, failure)
        session.make_ack_due(now_ms)
        session.intake.held -= 1 + len(later)
        if later:
            session.lanes.busy[message.key] = None
            notes.append(FailureOutcome(message, Treatment.AGAIN, None, later))
        return
    treatment = _treat(session, message, is_asked=event.is_asked)
    pause = None
    # A key is parked when the earlier messages of it that are in hand have ended.
    is_parked_later = treatment is Treatment.PARKED and message.key in session.lanes.together
    if treatment is Treatment.AGAIN or is_parked_later:
        record_try(session, message, failure)
        make_ack_due(session, now_ms)
    if is_parked_later:
        session.lanes.wait(message, now_ms, failure)
    elif treatment is Treatment.AGAIN:
        for each in later:
            each.attempt += 1
        pause = _wait(session, event, now_ms)
    else:
        pause = set_aside(session, message, treatment, failure, now_ms, asked_ms=event.asked_ms)
    notes.append(FailureOutcome(message, treatment, pause, later))


def _treat(session: PartitionSession, message: Message, *, is_asked: bool) -> Treatment:
    return decide_treatment(
        session.settings,
        attempt=message.attempt,
        has_order=bool(message.key),
        is_asked=is_asked,
    )


def record_try(session: PartitionSession, message: Message, failure: Failure) -> None:
    """Name a message that has failed to operators. Of this partition, have the next ack request
    report the try.
    """
    acks, own = session.acks, is_own(session, message)
    if session.settings.broadcast:  # no broker counts them
        return
    if own:
        acks.tries[message.offset] = message.attempt
    acks.failing.record(message, failure, is_own=own)


def _wait(session: PartitionSession, event: MessageFailed, now_ms: int) -> int:
    """Let a failed message wait in place for its next try; its key stays busy. Return the
    milliseconds until then.
    """
    message = event.message
    pause = pause_ms(
        session.settings, session.rng, attempt=message.attempt, asked_ms=event.asked_ms
    )
    due_ms = now_ms + pause
    if session.flights.is_shared and is_own(session, message):  # it ends with the time in flight
        due_ms = min(due_ms, session.flights.begin_until_ms.get(message.offset, due_ms))
        if event.holds_key:
            session.lanes.hold_key(message)
    session.lanes.wait(message, due_ms)
    return due_ms - now_ms


def forget_redriven(session: PartitionSession, message: Message) -> None:
    """A redriven message stays parked for the next owner."""
    window = leave_window(session, message)
    if not window.out:
        session.redrives.end(window)


def _leave_to_next_owner(session: PartitionSession, message: Message) -> None:
    """The next owner hands a message out."""
    if is_own(session, message):
        session.intake.held -= 1
    else:
        forget_redriven(session, message)


def on_hanging(session: PartitionSession, event: MessageHangs, now_ms: int) -> None:
    """A handler takes long. Operators learn it soon, and how long it takes with later requests."""
    message, acks = event.message, session.acks
    if not session.lanes.has_in_hand((message.partition_id, message.offset)):
        return  # it has ended meanwhile
    if session.settings.broadcast:  # no operator asks a broker for it
        return
    is_new = acks.failing.record(
        message, event.failure, is_own=is_own(session, message), running_ms=event.running_ms
    )
    if event.is_failed_try:
        _count_try(session, message)
    if is_new or event.is_failed_try:
        make_ack_due(session, now_ms)


def _count_try(session: PartitionSession, message: Message) -> None:
    """Have the next ack request report a failed try of a message whose handler goes on, and of all
    messages of its batch.
    """
    if session.settings.ack is AckMode.BEFORE or not is_own(session, message):
        return
    batches = session.lanes.batches
    batch = None
    if batches is not None:
        batch = batches.in_hand.get((message.partition_id, message.offset))
    for each in (message,) if batch is None else batch.messages:
        session.acks.tries[each.offset] = each.attempt


def on_returned(session: PartitionSession, event: MessagesReturned, now_ms: int) -> None:
    """Messages come back of which no try counts."""
    lanes, batch = session.lanes, _take_back_batch(session, event.messages)
    if batch is not None:
        _return_batch(session, batch, now_ms)
        return
    together: dict[bytes, list[Message]] = {}
    for message in event.messages:
        del lanes.in_hand[message.partition_id, message.offset]
        is_together = message.key in lanes.together
        if is_together:
            lanes.leave(message)
        if session.tenure.keeps(now_ms):
            if is_together or message.key in together:
                together.setdefault(message.key, []).append(message)
            else:
                lanes.again.append(message)
        else:
            session.acks.failing.forget((message.partition_id, message.offset))
            _leave_to_next_owner(session, message)
        suspects = session.suspects
        if suspects is not None and suspects.is_present(message):
            end_suspect(session)
    for key, messages in together.items():
        lanes.queue_in_order(key, messages)
        if key not in lanes.together:
            lanes.pass_on(key)


def _return_batch(session: PartitionSession, batch: MessageBatch, now_ms: int) -> None:
    register(session.lanes, batches_of(session))
    stop_counting(session.lanes, batches_of(session), batch)
    if session.tenure.keeps(now_ms):
        batch.count_try(-1)  # the next one is counted when it is handed out
        batches_of(session).wait(batch, now_ms)
        return
    session.acks.failing.forget(batch.ref)
    for message in batch.messages:
        _leave_to_next_owner(session, message)


# ── messages of a shared group that a program has left ────────────────────────────────────────────
def on_left(session: PartitionSession, event: MessagesLeft, _now_ms: int) -> None:
    """A program goes on without acks."""
    session.flights.left.update(message.offset for message in event.messages)


def on_expired(session: PartitionSession, event: MessageExpired, now_ms: int) -> None:
    """The time in flight of a message that a program has left is over: a failed try."""
    message, offset = event.message, event.message.offset
    del session.lanes.in_hand[message.partition_id, offset]
    treatment = _treat(session, message, is_asked=False)
    pause: int | None = 0
    if treatment is Treatment.AGAIN:
        session.acks.tries[offset] = message.attempt
        session.acks.failing.forget((message.partition_id, offset))
        session.intake.held -= 1
        session.flights.expire(offset)
        session.lanes.finish(message)
    else:
        pause = set_aside(session, message, treatment, event.failure, now_ms)
    make_ack_due(session, now_ms)
    session.output.notes.append(FailureOutcome(message, treatment, pause))


def on_acked_late(session: PartitionSession, event: AckedLate, now_ms: int) -> None:
    """Messages are acked that the broker may have handed out again."""
    for offset in event.offsets:
        session.flights.expired.pop(offset, None)
        session.offsets.mark_acked(offset)
        session.acks.handled.add(offset, offset + 1)
    make_ack_due(session, now_ms)


def _take_back_batch(session: PartitionSession, messages: Sequence[Message]) -> MessageBatch | None:
    """Take a batch back from its worker; None if messages were handed out alone."""
    batches, first = session.lanes.batches, messages[0] if messages else None
    if batches is None or first is None:
        return None
    batch = batches.in_hand.pop((first.partition_id, first.offset), None)
    if batch is not None and session.flights.is_shared:
        for message in batch.messages:
            del session.lanes.in_hand[message.partition_id, message.offset]
    return batch


# ── handled ───────────────────────────────────────────────────────────────────────────────────────
def _ack_batch(session: PartitionSession, batch: MessageBatch, now_ms: int) -> None:
    """Ack a handled batch of this partition."""
    messages, mode = batch.messages, session.settings.ack
    session.intake.held -= len(messages)
    if session.flights.is_shared:
        for message in messages:
            session.flights.end(message.offset)
            session.offsets.mark_acked(message.offset)
    if mode is AckMode.BEFORE:
        session.acks.failing.forget(batch.ref)
    else:
        for start, end in ranges_of(messages):
            session.acks.handled.add(start, end)
        make_ack_due(session, now_ms)
    if mode is AckMode.EACH:
        register(session.lanes, batches_of(session))
        await_ack(session, batch)
    else:
        finish_batch(session, batch)


def serve_awaited_batch(session: PartitionSession, batch: MessageBatch, now_ms: int) -> None:
    """Go on with a batch whose acks are all stored."""
    if session.settings.ack is AckMode.EACH:
        finish_batch(session, batch)
    elif now_ms < session.tenure.until_ms and session.tenure.fence is None:
        give_batch(session, batch)
    else:
        first = batch.messages[0]
        session.output.notes.append(Note(NoteKind.LOST, first.offset, len(batch.messages)))
        _lose_batch(session, batch)


def _lose_batch(session: PartitionSession, batch: MessageBatch) -> None:
    """A batch was acked before its handler, which has failed or will not start."""
    session.acks.failing.forget(batch.ref)
    session.intake.held -= len(batch.messages)
    finish_batch(session, batch)


# ── failed ────────────────────────────────────────────────────────────────────────────────────────
def on_batch_failed(session: PartitionSession, event: BatchFailed, now_ms: int) -> None:
    """A handler has failed."""
    batch, first = _take_back_batch(session, event.messages), event.messages[0]
    register(session.lanes, batches_of(session))
    if batch is not None:
        stop_counting(session.lanes, batches_of(session), batch)
    if batch is None or len(batch.messages) == 1:
        session.lanes.in_hand[first.partition_id, first.offset] = first
        failure = replace(event.failure, attempts=first.attempt)
        alone = MessageFailed(first, failure, event.asked_ms, event.is_asked)
        on_failed(session, alone, now_ms)
    elif session.settings.ack is AckMode.BEFORE and is_own(session, first):
        session.output.notes.append(FailureOutcome(first, Treatment.LOST))
        _lose_batch(session, batch)
    elif not session.tenure.keeps(now_ms):
        _record_batch_try(session, batch.messages, event)
        session.make_ack_due(now_ms)
        for message in batch.messages:
            _leave_to_next_owner(session, message)
    else:
        _fail_batch(session, batch, event, now_ms)


def _record_batch_try(
    session: PartitionSession, messages: list[Message], event: BatchFailed
) -> None:
    """A try of a batch is a try of each of its messages."""
    for message in messages:
        record_try(session, message, replace(event.failure, attempts=message.attempt))


def _fail_batch(
    session: PartitionSession, batch: MessageBatch, event: BatchFailed, now_ms: int
) -> None:
    settings = session.settings
    is_retried = settings.failure_policy is FailurePolicy.RETRY and not session.flights.is_shared
    if event.is_asked and is_retried:
        for message in batch.messages:
            _set_one_aside(session, message, event, now_ms)
        return
    _record_batch_try(session, batch.messages, event)
    make_ack_due(session, now_ms)
    attempt, first = batch.attempt, batch.messages[0]
    is_halved = attempt >= WHOLE_TRIES and not event.is_asked
    other = batch.split() if is_halved else []
    pause = pause_ms(settings, session.rng, attempt=attempt, asked_ms=event.asked_ms)
    _wait_batch(session, batch, now_ms + pause)
    session.output.notes.append(FailureOutcome(first, Treatment.AGAIN, pause))
    if other:
        _wait_apart(session, batch, other, now_ms)


def _wait_batch(session: PartitionSession, batch: MessageBatch, due_ms: int) -> None:
    """Let a batch wait for its next try; its keys stay busy."""
    if session.flights.is_shared:  # the pause ends with the time in flight
        until_ms = session.flights.begin_until_ms
        due_ms = min(due_ms, *(until_ms.get(each.offset, due_ms) for each in batch.messages))
    batches_of(session).wait(batch, due_ms)


def _wait_apart(
    session: PartitionSession, batch: MessageBatch, other: list[Message], now_ms: int
) -> None:
    """Let the other half wait: for the shortest pause, or for the first half, if that has the only
    key.
    """
    lanes = session.lanes
    keys = {message.key for message in other if message.key} if lanes.is_ordered else set()
    shared_keys = keys & (batch.keys or set())
    if not shared_keys:
        pause = session.settings.try_backoff.wait_ms(1, session.rng)
        _wait_batch(session, MessageBatch(other, keys, batch.attempt), now_ms + pause)
        return
    (key,) = shared_keys
    lanes.busy[key] = deque([*other, *(lanes.busy[key] or ())])


def _set_one_aside(
    session: PartitionSession, message: Message, event: BatchFailed, now_ms: int
) -> None:
    """Set a message aside that has asked for another try together with others."""
    failure = replace(event.failure, attempts=message.attempt)
    treatment = _treat(session, message, is_asked=True)
    if message.key:  # an earlier message of the batch may have freed it
        session.lanes.busy.setdefault(message.key, None)
    pause = set_aside(session, message, treatment, failure, now_ms, asked_ms=event.asked_ms)
    session.output.notes.append(FailureOutcome(message, treatment, pause))


# ── columns ───────────────────────────────────────────────────────────────────────────────────────
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
    if session.tenure.keeps(now_ms):
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
