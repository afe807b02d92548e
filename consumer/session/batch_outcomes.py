"""What becomes of a batch that a worker had: one outcome for all its messages. Pure.

handled ─▶ acked together
failed  ─▶ again as a whole, then in halves; one message alone: `outcomes.py`
returned ─▶ handed out again here, or by the next owner
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from ...protocol.groups import FailurePolicy
from ...protocol.message import Message
from ..settings import AckMode
from .batches import WHOLE_TRIES, MessageBatch
from .events import (
    BatchFailed,
    BatchHandled,
    BatchReturned,
    MessageFailed,
    MessagesHandled,
    MessagesReturned,
)
from .failure import Treatment, decide_treatment, pause_ms
from .offsets import ranges_of
from .outcomes import (
    forget_redriven,
    make_ack_due,
    on_failed,
    on_handled,
    on_returned,
    record_try,
    unpark,
)
from .ready import FailureOutcome, Note, NoteKind
from .setting_aside import is_own, set_aside, set_redriven_aside
from .state import PartitionSession
from .taking_batches import (
    await_ack,
    batches_of,
    finish,
    give,
    register,
    stop_counting,
    take_batch,
)


def _take_back(session: PartitionSession, messages: list[Message]) -> MessageBatch | None:
    """Take a batch back from its worker; None if its message was handed out alone."""
    first = messages[0]
    batch = batches_of(session).in_hand.pop((first.partition_id, first.offset), None)
    if batch is not None and session.flights.is_shared:
        for message in batch.messages:
            del session.lanes.in_hand[message.partition_id, message.offset]
    return batch


# ── handled ───────────────────────────────────────────────────────────────────────────────────────
def on_batch_handled(session: PartitionSession, event: BatchHandled, now_ms: int) -> None:
    """A handler has returned."""
    batch = _take_back(session, event.messages)
    if batch is None:
        on_handled(session, MessagesHandled(event.messages), now_ms)
    elif is_own(session, batch.messages[0]):
        _ack(session, batch, now_ms)
    else:
        for message in batch.messages:
            unpark(session, message)
        finish(session, batch)
    if event.wanted:
        take_batch(session, now_ms, retries=event.wanted)


def _ack(session: PartitionSession, batch: MessageBatch, now_ms: int) -> None:
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
        finish(session, batch)


def serve_awaited_batch(session: PartitionSession, batch: MessageBatch, now_ms: int) -> None:
    """Go on with a batch whose acks are all stored."""
    if session.settings.ack is AckMode.EACH:
        finish(session, batch)
    elif now_ms < session.tenure.until_ms and session.tenure.fence is None:
        give(session, batch)
    else:
        first = batch.messages[0]
        session.output.notes.append(Note(NoteKind.LOST, first.offset, len(batch.messages)))
        _lose(session, batch)


def _lose(session: PartitionSession, batch: MessageBatch) -> None:
    """A batch was acked before its handler, which has failed or will not start."""
    session.acks.failing.forget(batch.ref)
    session.intake.held -= len(batch.messages)
    finish(session, batch)


# ── failed ────────────────────────────────────────────────────────────────────────────────────────
def on_batch_failed(session: PartitionSession, event: BatchFailed, now_ms: int) -> None:
    """A handler has failed."""
    batch, first = _take_back(session, event.messages), event.messages[0]
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
        _lose(session, batch)
    elif not (session.tenure.is_live and now_ms < session.tenure.until_ms):
        _give_to_next_owner(session, batch, event, now_ms)
    else:
        _fail(session, batch, event, now_ms)
    if event.wanted:
        take_batch(session, now_ms, retries=event.wanted)


def _give_to_next_owner(
    session: PartitionSession, batch: MessageBatch, event: BatchFailed, now_ms: int
) -> None:
    """The next owner hands the messages out; this try counts."""
    _record_try(session, batch.messages, event)
    session.make_ack_due(now_ms)
    for message in batch.messages:
        if is_own(session, message):
            session.intake.held -= 1
        else:
            forget_redriven(session, message)


def _record_try(session: PartitionSession, messages: list[Message], event: BatchFailed) -> None:
    """A try of a batch is a try of each of its messages."""
    for message in messages:
        failure = replace(event.failure, attempts=message.attempt)
        if is_own(session, message):
            record_try(session, message, failure)
        else:
            session.acks.failing.record(message, failure, is_own=False)


def _fail(session: PartitionSession, batch: MessageBatch, event: BatchFailed, now_ms: int) -> None:
    settings = session.settings
    is_retried = settings.failure_policy is FailurePolicy.RETRY and not session.flights.is_shared
    if event.is_asked and is_retried:
        for message in batch.messages:
            _set_aside(session, message, event, now_ms)
        return
    _record_try(session, batch.messages, event)
    make_ack_due(session, now_ms)
    attempt, first = batch.attempt, batch.messages[0]
    is_halved = attempt >= WHOLE_TRIES and not event.is_asked
    other = batch.split() if is_halved else []
    pause = pause_ms(settings, session.rng, attempt=attempt, asked_ms=event.asked_ms)
    _wait(session, batch, now_ms + pause)
    session.output.notes.append(FailureOutcome(first, Treatment.AGAIN, pause))
    if other:
        _wait_apart(session, batch, other, now_ms)


def _wait(session: PartitionSession, batch: MessageBatch, due_ms: int) -> None:
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
        _wait(session, MessageBatch(other, keys, batch.attempt), now_ms + pause)
        return
    (key,) = shared_keys
    lanes.busy[key] = deque([*other, *(lanes.busy[key] or ())])


def _set_aside(
    session: PartitionSession, message: Message, event: BatchFailed, now_ms: int
) -> None:
    """Set a message aside that has asked for another try together with others."""
    lanes, redrives = session.lanes, session.redrives
    ref = message.partition_id, message.offset
    failure = replace(event.failure, attempts=message.attempt)
    treatment = decide_treatment(
        session.settings, attempt=message.attempt, has_order=bool(message.key), is_asked=True
    )
    if message.key:  # an earlier message of the batch may have freed it
        lanes.busy.setdefault(message.key, None)
    window = redrives.owners.pop(ref, None)
    if window is None:
        pause = set_aside(session, message, treatment, failure, now_ms, asked_ms=event.asked_ms)
    else:
        window.out.discard(ref)
        pause = set_redriven_aside(
            session, window, message, treatment, failure, now_ms, asked_ms=event.asked_ms
        )
    session.output.notes.append(FailureOutcome(message, treatment, pause))


# ── returned ──────────────────────────────────────────────────────────────────────────────────────
def on_batch_returned(session: PartitionSession, event: BatchReturned, now_ms: int) -> None:
    """A batch comes back of which no try counts."""
    batch = _take_back(session, event.messages)
    if batch is None:
        on_returned(session, MessagesReturned(event.messages), now_ms)
        return
    register(session.lanes, batches_of(session))
    stop_counting(session.lanes, batches_of(session), batch)
    if session.tenure.is_live and now_ms < session.tenure.until_ms:
        batch.count_try(-1)  # the next one is counted when it is handed out
        batches_of(session).wait(batch, now_ms)
        return
    session.acks.failing.forget(batch.ref)
    for message in batch.messages:
        if is_own(session, message):
            session.intake.held -= 1
        else:
            forget_redriven(session, message)
