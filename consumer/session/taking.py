"""Hands messages out to a worker that asks: one by one, as a run, in batches, or as columns. Pure.

messages  suspects? one alone ─▶ failed messages that are due ─▶ freed and redriven ones
              ─▶ opened ─▶ stored; nothing in hand: a run, to one worker
batches   suspects? one alone ─▶ failed batches that are due ─▶ freed and redriven messages
              ─▶ opened, once a batch is full or has waited long enough
columns   given back, and due? the same ─▶ suspects? a part that is recorded as begun
              ─▶ stored rows
"""

from __future__ import annotations

from ...protocol.errors import CorruptBatchError
from ...protocol.message import Message
from ...protocol.parked import Failure, crash_failure
from ...protocol.text import counted
from ..settings import AckMode
from .events import (
    ColumnsWanted,
    FailureOutcome,
    LeaveTurn,
    Note,
    NoteKind,
    TakeTurn,
)
from .failure import TABLE, Treatment, sets_aside
from .lanes import (
    PART_BYTES_MAX,
    PARTS,
    ClosedBatch,
    ColumnPart,
    KeyLanes,
    MessageBatch,
    PartitionBatches,
    PartitionColumns,
    by_offset,
    take_first,
    take_part,
)
from .offsets import ALONE_FROM, NEVER, SHARED_CRASHES_MAX, ranges_of
from .state import CRASHES_MAX, PartitionSession, SuspectMessages, SuspectPhase
from .windows import divert, is_own, leave_out, set_aside

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
    if lanes.batches is not None:
        _take_batch(session, now_ms, retries=retries)
        return
    if (
        run
        and _may_run(session, now_ms)
        and _take_run(session, run, now_ms, is_limited=not together)
    ):
        return
    is_due = bool(retries and lanes.retries) and lanes.retries[0].due_ms <= now_ms
    if not (together or is_due or lanes.extra) and session.is_plain:
        _take_plain(session, count, now_ms)
    else:
        _take_each(session, now_ms, left=count, retries=retries, together=together)


def _take_each(
    session: PartitionSession, now_ms: int, *, left: int, retries: int, together: bool
) -> None:
    """Hand out up to `left` messages, as `take` does, each with what else it needs."""
    lanes = session.lanes
    firsts: dict[bytes, Message] = {}
    """Of the keys of which several messages are taken at once, the first that is handed out now."""

    def hand_out(message: Message, first: Message | None = None) -> None:
        nonlocal left
        left -= 1
        _hand_out(session, message, now_ms)
        if first is not None:
            lanes.join(first, message)
        elif together and message.key and lanes.is_ordered and is_own(session, message):
            firsts[message.key] = message
            while left and (behind := lanes.take_behind(message)) is not None:
                hand_out(behind, message)

    while retries and left and (message := take_due(session, now_ms)) is not None:
        if _is_late(session, message, now_ms):
            drop(session, message)
            continue
        retries -= 1
        message.attempt += 1
        hand_out(message)
    while left and lanes.again:
        hand_out(lanes.again.popleft())
    while left and lanes.extra:
        message = lanes.extra.popleft()
        if lanes.claim(message):
            hand_out(message)
    while left and (lanes.opened or open_next(session, now_ms)):
        message = lanes.opened.popleft()
        first = firsts.get(message.key)
        if first is not None and lanes.busy[message.key] is None:
            hand_out(message, first)
        elif lanes.claim(message):
            hand_out(message)


def take_due(session: PartitionSession, now_ms: int) -> Message | None:
    """Take a failed message whose next try is due, and park those that have had their last one."""
    while (waiting := session.lanes.take_due(now_ms)) is not None:
        if waiting.last is None:
            return waiting.message
        set_aside(session, waiting.message, Treatment.PARKED, waiting.last, now_ms)
    return None


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
    if session.is_plain:
        session.lanes.in_hand[ref] = message
        session.output.hand_out.append(message)
        return
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


def leave_out_superfluous(
    session: PartitionSession, messages: list[Message], now_ms: int
) -> list[Message]:
    """Ack rows whose original messages were handled here, and return the other messages."""
    is_superfluous = session.intake.is_superfluous
    return (
        messages if is_superfluous is None else leave_out(session, messages, is_superfluous, now_ms)
    )


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
        is_accused = crashes >= ALONE_FROM
        if is_accused and _may_set_aside(session, message, crashes, SHARED_CRASHES_MAX, now_ms):
            continue
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
    if lanes.again:
        lanes.put_back(lanes.take_owned())
    while lanes.opened or open_next(session, now_ms):
        message = lanes.opened[0]
        if _is_over(session, suspects, now_ms):
            break
        lanes.opened.popleft()
        if not lanes.claim(message):
            continue
        crashes = suspects.crashes.get(message.offset, 0)
        if crashes and _may_set_aside(session, message, crashes, CRASHES_MAX, now_ms):
            continue
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


def _may_set_aside(
    session: PartitionSession, message: Message, crashes: int, crashes_max: int, now_ms: int
) -> bool:
    """Set a message aside that has ended its process too often, unless the policy blocks. Return
    True if it is.
    """
    settings = session.settings
    is_spent = crashes >= crashes_max or message.attempt > settings.last_try
    is_set_aside = is_spent and sets_aside(settings)
    failure = _note_crash(session, message, crashes, now_ms, is_set_aside=is_set_aside)
    if is_set_aside:
        row = TABLE[settings.failure_policy, settings.consume_strategy]
        is_parked = row.after is Treatment.PARKED and message.key
        treatment = Treatment.PARKED if is_parked else Treatment.DEAD
        set_aside(session, message, treatment, failure, now_ms)
    return is_set_aside


def _note_crash(
    session: PartitionSession,
    message: Message,
    crashes: int,
    now_ms: int,
    *,
    is_set_aside: bool = False,
) -> Failure:
    """Name a message that has ended processes in the log, and to operators until it is handled.
    Return its failure.
    """
    note = Note(NoteKind.CRASHED, message.offset, crashes, message, is_set_aside)
    session.output.notes.append(note)
    failure = crash_failure(
        counted(crashes, "time"),
        at_ms=session.tenure.epoch_ms + now_ms,
        attempts=message.attempt - 1,
    )
    if not is_set_aside:
        session.acks.failing.record(message, failure, is_own=True)
        session.let_acks_linger(now_ms)
    return failure


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


def batches_of(session: PartitionSession) -> PartitionBatches:
    """Return the batches of a session that hands out batches."""
    batches = session.lanes.batches
    assert batches is not None
    return batches


def _take_batch(session: PartitionSession, now_ms: int, *, retries: int) -> None:
    """
    Hand out a batch to one worker.

    Args:
        retries: 0: not a failed one.
    """
    batches = batches_of(session)
    if _waits_for_ack(session, batches):
        return
    register(session.lanes, batches)
    _put_first(session, batches, session.lanes.take_owned())
    expire_fill(session, now_ms)
    batch = _take_due_batch(session, batches, now_ms) if retries else None
    if batch is None:
        batch = _take_extra(session, batches, now_ms) or _take_opened(session, batches, now_ms)
    if batch is not None:
        _hand_out_batch(session, batches, batch, now_ms)


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


def finish_batch(session: PartitionSession, batch: MessageBatch) -> None:
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
def _take_due_batch(
    session: PartitionSession, batches: PartitionBatches, now_ms: int
) -> MessageBatch | None:
    """Take what has failed, and is to be tried now."""
    lanes = session.lanes
    while (batch := batches.take_due(now_ms)) is not None:
        batch.count_try()
        batch.messages = _without_late(session, batch.messages, now_ms)
        if batch.messages:
            return batch
    while (message := take_due(session, now_ms)) is not None:
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
        batch = _claim_batch(session, batches, messages, now_ms)
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
            batch = _claim_batch(session, batches, messages, now_ms)
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


def _claim_batch(
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
    if not session.flights.is_shared:
        return messages
    kept = []
    for message in messages:
        if _is_late(session, message, now_ms):
            drop(session, message)
        else:
            kept.append(message)
    return kept


# ── handing out ───────────────────────────────────────────────────────────────────────────────────
def _hand_out_batch(
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
    give_batch(session, batch)


def await_ack(session: PartitionSession, batch: MessageBatch) -> None:
    """Let a batch wait until the acks of all its messages are stored."""
    batches_of(session).awaited[batch.ref] = batch
    session.acks.awaited[batch.ref] = batch.messages[0]


def give_batch(session: PartitionSession, batch: MessageBatch) -> None:
    """Give a batch to a worker."""
    batches_of(session).in_hand[batch.ref] = batch
    if session.flights.is_shared:  # what is in hand is renewed
        in_hand = session.lanes.in_hand
        in_hand.update(((each.partition_id, each.offset), each) for each in batch.messages)
    session.output.hand_out = batch.messages


def columns_of(session: PartitionSession) -> PartitionColumns:
    """Return the part of a session whose program takes columns."""
    columns = session.lanes.columns
    assert columns is not None
    return columns


def on_columns_wanted(session: PartitionSession, _event: ColumnsWanted, now_ms: int) -> None:
    """The program takes the next part, which is then `lanes.columns.in_hand`."""
    columns, suspects = columns_of(session), session.suspects
    if not _may_take_columns(session, columns, now_ms):
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


def _may_take_columns(session: PartitionSession, columns: PartitionColumns, now_ms: int) -> bool:
    """Return True if nothing is in hand or waited for."""
    if columns.in_hand is not None or columns.awaited is not None:
        return False
    is_due = columns.again is None or columns.due_ms <= now_ms
    return is_due and session.tenure.may_hand_out(now_ms)


def has_more_columns(session: PartitionSession, now_ms: int) -> bool:
    """Return True if a program that asks may get something."""
    columns, suspects = columns_of(session), session.suspects
    if not _may_take_columns(session, columns, now_ms):
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
        _note_crash(session, message, part.crashes, now_ms)
    suspects.begin(part)
    session.output.requests.append(TakeTurn())
