"""Hands batches out to a worker that asks. Pure.

suspects? one alone ─▶ failed batches that are due ─▶ freed and redriven messages ─▶ opened, once a
batch is full or has waited long enough
"""

from __future__ import annotations

from ...protocol.message import Message
from ..settings import AckMode
from .batches import MessageBatch, PartitionBatches, take_first
from .lanes import KeyLanes, by_offset
from .offsets import ranges_of
from .setting_aside import is_own
from .state import PartitionSession
from .taking import drop, has_more, open_next, take_suspect
from .tenure import NEVER


def batches_of(session: PartitionSession) -> PartitionBatches:
    """Return the batches of a session that hands out batches."""
    batches = session.lanes.batches
    assert batches is not None
    return batches


def take_batch(session: PartitionSession, now_ms: int, *, retries: int) -> None:
    """
    Hand out a batch to one worker.

    Args:
        retries: 0: not a failed one.
    """
    if not session.tenure.may_hand_out(now_ms):
        return
    if session.suspects is not None and take_suspect(session, session.suspects, now_ms):
        return
    batches = batches_of(session)
    if _waits_for_ack(session, batches):
        return
    register(session.lanes, batches)
    _requeue_owned(session, batches)
    expire_fill(session, now_ms)
    batch = _take_due(session, batches, now_ms) if retries else None
    if batch is None:
        batch = _take_extra(session, batches, now_ms) or _take_opened(session, batches, now_ms)
    if batch is not None:
        _hand_out(session, batches, batch, now_ms)


def has_more_batches(session: PartitionSession, now_ms: int) -> bool:
    """Return True if a further worker may get a batch."""
    if session.suspects is not None:
        return has_more(session, now_ms)
    lanes, batches = session.lanes, batches_of(session)
    if not session.tenure.may_hand_out(now_ms) or _waits_for_ack(session, batches):
        return False
    if lanes.again or lanes.extra or batches.is_due(now_ms):
        return True
    if lanes.retries and lanes.retries[0].due_ms <= now_ms:
        return True
    return _may_begin(session, batches)


def _waits_for_ack(session: PartitionSession, batches: PartitionBatches) -> bool:
    """True while a batch is acked before its handler: the next one is not acked meanwhile, because
    its messages would be lost with the process.
    """
    return bool(batches.awaited) and session.settings.ack is AckMode.BEFORE


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────
def register(lanes: KeyLanes, batches: PartitionBatches) -> None:
    """Make the keys of the batch busy that was taken while nothing was in hand."""
    batch = batches.unregistered
    if batch is None:
        return
    batches.unregistered = None
    batch.keys = {message.key for message in batch.messages if message.key}
    lanes.busy.update(dict.fromkeys(batch.keys))
    batches.running |= batch.keys


def stop_counting(lanes: KeyLanes, batches: PartitionBatches, batch: MessageBatch) -> None:
    """Count what waits for the keys of a batch no more, because it has failed or ended."""
    keys, busy = batch.keys or set(), lanes.busy
    if batches.held:
        batches.held -= sum(len(busy[key] or ()) for key in batches.running & keys)
    batches.running -= keys


def finish(session: PartitionSession, batch: MessageBatch) -> None:
    """Free the keys of a batch that has ended; what waited for them comes first."""
    lanes, batches = session.lanes, batches_of(session)
    if batch is batches.unregistered:
        batches.unregistered = None
        return
    stop_counting(lanes, batches, batch)
    waiting: list[Message] = []
    pop = lanes.busy.pop
    for key in batch.keys or ():
        queue = pop(key, None)
        if queue:
            waiting += queue
    if waiting:
        _put_first(session, batches, waiting)


def _requeue_owned(session: PartitionSession, batches: PartitionBatches) -> None:
    """Put back messages that own their keys, and those that wait for them, which were left by a
    message that was handed out alone.
    """
    lanes = session.lanes
    if not lanes.again:
        return
    messages = list(lanes.again)
    for message in lanes.again:
        messages += lanes.busy.pop(message.key, None) or ()
    lanes.again.clear()
    _put_first(session, batches, messages)


def _put_first(
    session: PartitionSession, batches: PartitionBatches, messages: list[Message]
) -> None:
    """Put messages before all others; they wait for no fuller batch."""
    lanes = session.lanes
    messages.sort(key=by_offset)
    own = messages
    if session.redrives.owners:
        own = [message for message in messages if is_own(session, message)]
        redriven = [message for message in messages if not is_own(session, message)]
        lanes.extra.extendleft(reversed(redriven))
    if own:
        lanes.opened.extendleft(reversed(own))
        batches.is_unsorted = batches.fill.is_over = True


# ── what comes next ───────────────────────────────────────────────────────────────────────────────
def _take_due(
    session: PartitionSession, batches: PartitionBatches, now_ms: int
) -> MessageBatch | None:
    """Take what has failed, and is to be tried now."""
    lanes = session.lanes
    while (batch := batches.take_due(now_ms)) is not None:
        batch.count_try()
        batch.messages = _without_late(session, batch.messages, now_ms)
        if batch.messages:
            return batch
    while (message := lanes.take_due(now_ms)) is not None:
        message.attempt += 1
        if _without_late(session, [message], now_ms):
            keys = {message.key} if message.key and lanes.is_ordered else set()
            return MessageBatch([message], keys, message.attempt)
    return None


def _take_extra(
    session: PartitionSession, batches: PartitionBatches, now_ms: int
) -> MessageBatch | None:
    """Take redriven messages of one window, or those of a freed key."""
    extra, owners = session.lanes.extra, session.redrives.owners
    while extra:
        window = owners.get((extra[0].partition_id, extra[0].offset))
        messages: list[Message] = []
        while extra and len(messages) < batches.count_max:
            if owners.get((extra[0].partition_id, extra[0].offset)) is not window:
                break
            messages.append(extra.popleft())
        messages.sort(key=by_offset)
        batch = _claim(session, batches, messages, now_ms)
        if batch is not None:
            return batch
    return None


def _take_opened(
    session: PartitionSession, batches: PartitionBatches, now_ms: int
) -> MessageBatch | None:
    """Take the next opened messages, and as many of those that are stored as fit."""
    lanes = session.lanes
    batch = None
    while batch is None and _may_begin(session, batches):
        while len(lanes.opened) < batches.count_max and open_next(session, now_ms):
            pass
        if lanes.opened:
            messages = take_first(lanes.opened, batches.size_beginning_with(lanes.opened[0]))
            if batches.is_unsorted:
                messages.sort(key=by_offset)
                batches.is_unsorted = bool(lanes.opened)
            batch = _claim(session, batches, messages, now_ms)
    if not (lanes.opened or lanes.stored):
        batches.fill.empty()
    return batch


def _may_begin(session: PartitionSession, batches: PartitionBatches) -> bool:
    """Return True if a batch of opened and stored messages may begin."""
    lanes, count_max = session.lanes, batches.count_max
    if not (lanes.opened or lanes.stored):
        return False
    if not batches.fill.is_over and _count_ready(lanes, upto=count_max) < count_max:
        return False
    return batches.held < count_max


def _count_ready(lanes: KeyLanes, *, upto: int | None = None) -> int:
    """Return how many messages are opened or stored; `upto` is enough."""
    count = len(lanes.opened)
    for stored in lanes.stored:
        if upto is not None and count >= upto:
            break
        count += sum(end - start for start, end in stored.ranges)
    return count


def expire_fill(session: PartitionSession, now_ms: int) -> None:
    """Let a smaller batch begin once its messages have waited long enough."""
    fill = batches_of(session).fill
    if now_ms >= fill.until_ms:
        fill.expire(_count_ready(session.lanes), now_ms)


def _claim(
    session: PartitionSession, batches: PartitionBatches, messages: list[Message], now_ms: int
) -> MessageBatch | None:
    """Make a batch of the messages whose keys are free, and queue the others."""
    lanes = session.lanes
    busy = lanes.busy
    if not lanes.is_ordered:
        messages = _without_late(session, messages, now_ms)
        return MessageBatch(messages, set()) if messages else None
    if not busy:
        batches.unregistered = batch = MessageBatch(messages, None)
        return batch
    keys = {message.key for message in messages}
    if not keys.isdisjoint(busy):
        messages = _queue_busy(lanes, batches, messages)
        if not messages:
            return None
        keys = {message.key for message in messages}
    keys.discard(b"")
    busy.update(dict.fromkeys(keys))
    batches.running |= keys
    return MessageBatch(messages, keys)


def _queue_busy(
    lanes: KeyLanes, batches: PartitionBatches, messages: list[Message]
) -> list[Message]:
    """Queue the messages whose keys are busy, and return the others."""
    busy, running, free = lanes.busy, batches.running, []
    for message in messages:
        if message.key not in busy:
            free.append(message)
            continue
        lanes.queue_if_busy(message)
        batches.held += message.key in running
    return free


def _without_late(session: PartitionSession, messages: list[Message], now_ms: int) -> list[Message]:
    """Forget messages of a shared group whose time to begin is over, and return the others."""
    flights = session.flights
    if not flights.is_shared:
        return messages
    kept = []
    for message in messages:
        is_late = now_ms >= flights.begin_until_ms.get(message.offset, NEVER)
        if is_late and is_own(session, message):
            drop(session, message)
        else:
            kept.append(message)
    return kept


# ── handing out ───────────────────────────────────────────────────────────────────────────────────
def _hand_out(
    session: PartitionSession, batches: PartitionBatches, batch: MessageBatch, now_ms: int
) -> None:
    first = batch.messages[0]
    if session.settings.ack is AckMode.BEFORE and is_own(session, first):
        register(session.lanes, batches)
        await_ack(session, batch)
        for start, end in ranges_of(batch.messages):
            session.acks.handled.add(start, end)
        session.make_ack_due(now_ms)
        return
    give(session, batch)


def await_ack(session: PartitionSession, batch: MessageBatch) -> None:
    """Let a batch wait until the acks of all its messages are stored."""
    batches_of(session).awaited[batch.ref] = batch
    session.acks.awaited[batch.ref] = batch.messages[0]


def give(session: PartitionSession, batch: MessageBatch) -> None:
    """Give a batch to a worker."""
    batches_of(session).in_hand[batch.ref] = batch
    if session.flights.is_shared:  # what is in hand is renewed
        in_hand = session.lanes.in_hand
        in_hand.update(((each.partition_id, each.offset), each) for each in batch.messages)
    session.output.hand_out = batch.messages
