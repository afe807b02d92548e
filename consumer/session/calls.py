"""Which requests a session sends, what it makes of the answers, and when it is called next. Pure.

    usual      send_due ─▶ Acquire ─▶ ListParked ─▶ Pull, ReadWindow, ChangeParked, Ack, …
    broadcast  Read ─▶ handed out ─▶ handled ─▶ due ─▶ acked here: `PullOffsets.acked`, which
               outlives the session

Invariant
    No broker learns of a broadcast consumer: there is no fence, no lock and no cursor, and nothing
    holds up retention.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter

from ...protocol.backoff import Backoff
from ...protocol.errors import (
    FencedError,
    InvalidRequestError,
    KeylaneError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OverloadedError,
    Reason,
)
from ...protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    AcquireShared,
    ChangeParked,
    ListParked,
    ParkedChanged,
    Pull,
    PullShared,
    Read,
    Release,
    Released,
)
from ...protocol.limits import PULL_ANSWERS_MAX, READ_WAIT_MS
from ...protocol.offsets import Range
from ...protocol.parked import AncestorNotified
from ..settings import AckMode, FullPolicy
from .events import (
    AncestorLeft,
    CallFailed,
    FindBroker,
    FlightsPulled,
    KeysListed,
    LeaveAncestor,
    Note,
    NoteKind,
    OperatorChanged,
    Pulled,
    ReadWindow,
    Request,
    SendChanges,
)
from .failure import sets_aside
from .hand_over import ack_here, fence, stop
from .lanes import ClosedBatch
from .offsets import NEVER, ranges_of
from .outcomes import end_awaited, serve_awaited_batch
from .state import (
    PROMISES_PER_TTL,
    CallSlot,
    PartitionSession,
    SessionPhase,
    SuspectMessages,
    SuspectPhase,
)
from .taking import end_suspect, expire_fill, hand_out_suspect, pass_over_suspect
from .windows import is_own, on_listed, on_stored, on_window_failed, read_due

IDLE = Backoff(first_ms=10, max_ms=200)
"""The pauses between reads that bring nothing, from a broker that does not wait for messages."""


def next_read(session: PartitionSession) -> Read:
    """Return the request for the next messages."""
    settings = session.settings
    offset, wait_ms = session.offsets.next_offset, min(settings.pull_wait_ms, READ_WAIT_MS)
    return Read(session.partition_id, offset, settings.pull_bytes, wait_ms=wait_ms)


def end_read(session: PartitionSession, now_ms: int, *, is_empty: bool) -> None:
    """End a read, and pause after one that brought nothing and was answered at once."""
    slot = session.calls.pull
    wait_ms = min(session.settings.pull_wait_ms, READ_WAIT_MS)
    if is_empty and now_ms - slot.begun_ms < max(wait_ms // 2, IDLE.first_ms):
        slot.fail(IDLE, session.rng, now_ms)
    else:
        slot.end()


def fail_read(session: PartitionSession, now_ms: int) -> None:
    """Read again after a pause, from where the broker is then."""
    session.calls.pull.fail(session.settings.backoff, session.rng, now_ms)
    session.output.requests.append(FindBroker())


_by_offset = attrgetter("offset")


def send_due(session: PartitionSession, now_ms: int) -> None:
    """Request what is due."""
    tenure, calls = session.tenure, session.calls
    if session.has_ended:
        return
    if session.lanes.batches is not None:
        expire_fill(session, now_ms)
    requests, settings, lease = session.output.requests, session.settings, tenure.lease
    if tenure.phase is SessionPhase.ACQUIRING and session.calls.acquire.begin(now_ms):
        kind = AcquireShared if session.flights.is_shared else Acquire
        requests.append(kind(*lease, settings.ttl_ms))
    if tenure.phase is SessionPhase.SERVING:
        parking = session.parking
        must_list = parking.version > parking.listed_version or parking.ancestors.must_list
        if must_list and session.calls.list_keys.begin(now_ms):
            parking.freed.clear()
            parking.ancestors.must_list = False
            requests.append(ListParked(*lease, 0))
        if tenure.is_acquired:
            read_due(session, now_ms)
            unneeded = parking.ancestors.unneeded
            if unneeded and calls.leave.begin(now_ms):
                requests.append(LeaveAncestor(unneeded[0]))
        if not calls.pull.is_in_flight:
            count = _count_to_pull(session, now_ms)
            if count and calls.pull.begin(now_ms):
                requests.append(_pull(session, count, now_ms))
    if tenure.may_ack:
        _send_changes(session, now_ms)
        _send_acks(session, now_ms)


# ── pulls ─────────────────────────────────────────────────────────────────────────────────────────
def _count_to_pull(session: PartitionSession, now_ms: int) -> int:
    """Return how many messages to pull; 0: none. An exclusive group's pull has no such limit."""
    offsets, settings, held = session.offsets, session.settings, session.intake.held
    may_pull = (
        session.tenure.may_hand_out(now_ms)
        and session.parking.has_room
        and session.redrives.has_room
    )
    if session.flights.is_shared:
        if not may_pull or offsets.is_acked_to_end:
            return 0
        # What fails holds up nothing else, up to a limit of its own.
        failing = min(session.lanes.count_retrying, settings.buffer_messages)
        limit = settings.in_flight_messages + failing
        in_hand = session.lanes.count_in_hand
        return session.flights.pull_size.decide(held, in_hand, limit, now_ms)
    may_pull = (
        may_pull
        and session.intake.has_room(settings.buffer_messages)
        and not session.acks.handled.is_refused
        and not offsets.is_exhausted
    )
    return 1 if may_pull else 0


def _pull(session: PartitionSession, count: int, now_ms: int) -> Request:
    settings, lease = session.settings, session.tenure.lease
    if settings.broadcast:
        return next_read(session)
    wait_ms = min(settings.pull_wait_ms, settings.ttl_ms)
    if session.flights.is_shared:
        wait_ms = min(wait_ms, settings.ttl_ms // 3, settings.in_flight_ms // 3)
        return PullShared(*lease, count, settings.pull_bytes, wait_ms, settings.in_flight_ms)
    offset, tags = session.offsets.next_offset, tuple(settings.tags or ())
    return Pull(*lease, offset, settings.pull_bytes, wait_ms, tags, PULL_ANSWERS_MAX)


# ── acks and changes ──────────────────────────────────────────────────────────────────────────────
def _send_changes(session: PartitionSession, now_ms: int) -> None:
    parking = session.parking
    if not parking or not session.calls.change.begin(now_ms):
        return
    may_die = session.settings.on_full is FullPolicy.DEAD
    changes = parking.take(may_die=may_die)
    tries = tuple(
        (*each, session.tenure.epoch_ms + at_ms)
        for *each, at_ms in parking.next_tries(session.partition_id)
    )
    frame = ChangeParked(*session.tenure.lease, tries)  # type: ignore[arg-type]
    session.output.requests.append(SendChanges(frame, tuple(changes)))


def _promise_due_ms(session: PartitionSession) -> int:
    """Return when the broker is asked for a promise; NEVER: the metaserver's lease is enough."""
    tenure, settings = session.tenure, session.settings
    if settings.broadcast or session.flights.is_shared or not tenure.is_live:
        return NEVER
    return tenure.promise_due_ms(settings.ttl_ms)


def _renewal_ms(session: PartitionSession) -> int:
    """Return when an ack request is due although nothing is to be acked: it asks for a promise, or
    keeps the pull lock, and messages that handlers of a shared group have.
    """
    promise_ms = _promise_due_ms(session)
    if session.settings.broadcast or (not session.intake.held and session.is_idle):
        return promise_ms
    idle_ms = session.settings.ttl_ms // 3
    if session.flights.is_shared and session.lanes.in_hand:
        idle_ms = min(idle_ms, session.flights.renewal_ms)
    return min(session.acks.sent_ms + idle_ms, promise_ms)


def _held(session: PartitionSession) -> tuple[Range, ...]:
    """Return the messages of a shared group that handlers have, which are renewed."""
    if not session.flights.is_shared:
        return ()
    left = session.flights.left
    own = [
        message
        for message in session.lanes.in_hand.values()
        if message.offset not in left and is_own(session, message)
    ]
    return tuple(ranges_of(sorted(own, key=_by_offset)))


def _may_send_acks(session: PartitionSession) -> bool:
    tenure = session.tenure
    if not tenure.may_ack or session.calls.release.is_in_flight:
        return False
    return tenure.is_live or not session.acks.is_flushed


def _send_acks(session: PartitionSession, now_ms: int) -> None:
    acks, settings = session.acks, session.settings
    if not _may_send_acks(session):
        return
    if now_ms < acks.due_ms and now_ms < _renewal_ms(session):
        return
    if settings.broadcast:
        ack_here(session)
    elif session.calls.ack.begin(now_ms):
        request = acks.request(
            session.tenure.lease,
            now_ms,
            _held(session),
            settings.in_flight_ms,
            settings.ttl_ms // PROMISES_PER_TTL if now_ms >= _promise_due_ms(session) else 0,
        )
        if request.promise_ms:
            session.tenure.asked_ms = now_ms
        session.output.requests.append(request)


# ── the next time ─────────────────────────────────────────────────────────────────────────────────
def find_next_ms(session: PartitionSession, now_ms: int) -> int:
    """Return when the session is to be called, if nothing happens earlier."""
    tenure, calls, suspects = session.tenure, session.calls, session.suspects
    lanes, columns, batches = session.lanes, session.lanes.columns, session.lanes.batches
    if session.has_ended:
        return NEVER
    deadlines = [tenure.cancel_due_ms, tenure.flush_until_ms]
    pauses = [slot.not_before_ms for slot in calls.each()]
    if tenure.is_live and tenure.until_ms:
        deadlines.append(tenure.until_ms)
    if not calls.ack.is_in_flight and _may_send_acks(session):
        deadlines.append(_ack_ms(session))
    if columns is not None and columns.again is not None:
        pauses.append(columns.due_ms)
    if tenure.is_live and not tenure.is_paused:
        pauses += [waiting.due_ms for waiting in lanes.retries[:1]]
        if batches is not None:
            deadlines.append(batches.fill.until_ms)
            pauses += [waiting.due_ms for waiting in batches.waiting[:1]]
    if session.redrives.has_waiting and tenure.phase is SessionPhase.SERVING:
        pauses.append(session.redrives.next_ms())
    if suspects is not None and suspects.phase is SuspectPhase.ALONE:
        deadlines.append(suspects.deadline_ms)
    elif suspects is not None:
        pauses.append(suspects.until_ms)
    return min(*deadlines, *(due_ms for due_ms in pauses if due_ms > now_ms))


def _ack_ms(session: PartitionSession) -> int:
    """Return when the next ack request leaves."""
    due_ms = min(session.acks.due_ms, _renewal_ms(session))
    return max(due_ms, session.calls.ack.not_before_ms)


def on_acquired(session: PartitionSession, answer: Acquired, now_ms: int) -> None:
    """The broker has raised the fence, for the first time or again."""
    tenure, offsets = session.tenure, session.offsets
    session.calls.acquire.end()
    session.acks.sent_ms = now_ms
    if tenure.phase is SessionPhase.ACQUIRING:
        tenure.phase = SessionPhase.SERVING
    if answer.sealed:
        offsets.end_offset = answer.next_offset
    session.parking.version = max(session.parking.version, answer.parked_version)
    if offsets.next_offset >= 0:
        session.parking.listed_version = 0  # a broker that was restarted counts versions from 0
        return
    offsets.begin(answer.cursor, answer.ranges)
    earlier_tries = session.intake.earlier_tries = dict(answer.attempts)
    for offset, crashes in answer.begun:  # each is a try
        earlier_tries[offset] = earlier_tries.get(offset, 0) + crashes
    session.redrives.is_unreleased = answer.unreleased
    session.redrives.is_careful = answer.unreleased and sets_aside(session.settings)
    if answer.suspects_upto > answer.cursor or answer.begun:
        session.set_suspects(SuspectMessages(answer.suspects_upto, answer.begun, now_ms))
        count = max(answer.suspects_upto - answer.cursor, 1)
        session.output.notes.append(Note(NoteKind.CAREFUL, answer.cursor, count))
    tenure.is_acquired = session.parking.version <= session.parking.listed_version


def on_keys_listed(session: PartitionSession, event: KeysListed, now_ms: int) -> None:
    """The parked keys are known."""
    session.calls.list_keys.end()
    if session.tenure.is_live:
        on_listed(session, event, now_ms)
        session.tenure.is_acquired = True


def on_ancestor_left(session: PartitionSession, event: AncestorLeft, _now_ms: int) -> None:
    """An ancestor knows that it is not needed: have the broker store that it was told."""
    session.calls.leave.end()
    if session.tenure.is_live:  # the next owner tells it again otherwise
        session.parking.ancestors.end(event.source, is_told=True)
        session.parking.add(AncestorNotified(event.source))


def on_operator_changed(session: PartitionSession, event: OperatorChanged, _now_ms: int) -> None:
    """An operator has changed parked messages."""
    session.parking.version = max(session.parking.version, event.version)


# ── pulls ─────────────────────────────────────────────────────────────────────────────────────────
def on_pulled(session: PartitionSession, event: Pulled, now_ms: int) -> None:
    """Batches are here."""
    if session.tenure.is_live:
        session.parking.version = max(session.parking.version, event.parked_version)
        try:
            _store(session, event, now_ms)
        except OutcomeUnknownError:
            _acquire_again(session, now_ms)  # after a pause that grows with each such answer
            return
    if session.settings.broadcast:
        end_read(session, now_ms, is_empty=not event.batches)
    elif not event.has_more:
        session.calls.pull.end()
    if not session.tenure.is_live:
        return
    if event.is_sealed:
        session.offsets.end_offset = event.end_offset
        if session.offsets.is_exhausted:
            session.make_ack_due(now_ms)


def _store(session: PartitionSession, event: Pulled, now_ms: int) -> None:
    offsets, left_out = session.offsets, list(event.left_out)
    for batch in event.batches:
        while left_out and left_out[0][0] < batch.start:
            _ack_left_out(session, *left_out.pop(0), now_ms)
        if batch.end <= offsets.next_offset:
            continue
        ranges = offsets.take(batch.start, batch.end)
        if ranges:
            _keep(session, ClosedBatch(batch, ranges, NEVER), now_ms)
    for start, end in left_out:
        _ack_left_out(session, start, end, now_ms)


def _keep(session: PartitionSession, batch: ClosedBatch, now_ms: int) -> int:
    """Keep a batch until a worker asks, and return how many messages are to be handed out."""
    count = sum(end - start for start, end in batch.ranges)
    session.lanes.stored.append(batch)
    session.intake.held += count
    if session.lanes.batches is not None:
        session.lanes.batches.fill.arrive(count, now_ms)
    return count


def _ack_left_out(session: PartitionSession, start: int, end: int, now_ms: int) -> None:
    """Ack messages without a wanted tag."""
    for low, high in session.offsets.take(min(start, session.offsets.next_offset), end):
        session.acks.handled.add(low, high)
        session.let_acks_linger(now_ms)


def on_flights_pulled(session: PartitionSession, event: FlightsPulled, now_ms: int) -> None:
    """Messages of a shared group are in flight here."""
    session.calls.pull.end()
    if not session.tenure.is_live:
        return
    flights, offsets = session.flights, session.offsets
    limit_ms = flights.begin_limit_ms(event.sent_ms)
    session.intake.earlier_tries.update(event.tries)
    flights.crashes.update(event.crashes)
    for batch in event.batches:
        ranges = [
            (max(low, batch.start), min(high, batch.end))
            for low, high in event.ranges
            if low < batch.end and batch.start < high
        ]
        if ranges:
            flights.pull_size.received += _keep(
                session, ClosedBatch(batch, ranges, limit_ms), now_ms
            )
            offsets.next_offset = max(offsets.next_offset, ranges[-1][1])
    offsets.cursor = max(offsets.cursor, event.cursor)
    if event.is_sealed:
        offsets.end_offset = event.end_offset


# ── acks and changes ──────────────────────────────────────────────────────────────────────────────
def on_acked(session: PartitionSession, answer: Acked, now_ms: int) -> None:
    """The broker has stored acks, tries and begun suspects."""
    acks, suspects = session.acks, session.suspects
    sent = acks.sent
    assert sent is not None
    session.calls.ack.end()
    acks.confirm()
    if answer.is_wanted:
        session.output.notes.append(Note(NoteKind.WANTED))
        stop(session, session.settings.handover_ms, now_ms)
    elif answer.promise_ms:
        end_ms = acks.sent_ms + answer.promise_ms - session.settings.margin_ms
        session.tenure.extend(end_ms, now_ms)
    session.offsets.cursor = max(session.offsets.cursor, answer.cursor)
    session.parking.version = max(session.parking.version, answer.parked_version)
    if acks.due_ms == NEVER and (acks.handled or acks.tries or acks.begun):
        session.make_ack_due(now_ms)  # what did not fit into the request; anything newer lingers
    if sent.held:
        renewed = chain.from_iterable(range(start, end) for start, end in sent.held)
        session.flights.renew(list(renewed), acks.sent_ms)
    if suspects is not None and suspects.message is not None:
        offset = suspects.message.offset
        if suspects.phase is SuspectPhase.BEGINNING and offset not in acks.begun:
            hand_out_suspect(session, suspects, now_ms)
        elif suspects.phase is SuspectPhase.PASSED_OVER and offset not in acks.begun:
            pass_over_suspect(session, suspects, now_ms)
        elif suspects.phase is SuspectPhase.ACKING and offset not in acks.handled:
            end_suspect(session)
    if not acks.handled.is_refused:
        session.lanes.release_keyless()
    if acks.awaited:
        _serve_awaited(session, now_ms)
    if session.lanes.columns is not None:
        end_awaited(session, session.lanes.columns)


def _serve_awaited(session: PartitionSession, now_ms: int) -> None:
    """Go on with messages whose ack is stored."""
    acks, tenure, lanes = session.acks, session.tenure, session.lanes
    batches = {} if lanes.batches is None else lanes.batches.awaited
    for ref, message in list(acks.awaited.items()):
        batch = batches.get(ref)
        if batch is not None:
            if not any(each.offset in acks.handled for each in batch.messages):
                del acks.awaited[ref], batches[ref]
                serve_awaited_batch(session, batch, now_ms)
            continue
        if ref[1] in acks.handled:
            continue
        del acks.awaited[ref]
        if session.settings.ack is AckMode.EACH:
            lanes.finish(message)
        elif now_ms < tenure.until_ms and tenure.fence is None:
            lanes.in_hand[ref] = message
            session.output.hand_out.append(message)
        else:
            session.intake.held -= 1
            session.output.notes.append(Note(NoteKind.LOST, message.offset, 1))


def on_changed(session: PartitionSession, _answer: ParkedChanged, now_ms: int) -> None:
    """The broker has stored changes of parked messages."""
    session.calls.change.end()
    for pending in session.parking.confirm():
        on_stored(session, pending, now_ms)


def on_released(session: PartitionSession, _answer: Released, _now_ms: int) -> None:
    """The pull lock is free."""
    session.calls.release.end()
    session.tenure.phase = SessionPhase.ENDED


# ── failures ──────────────────────────────────────────────────────────────────────────────────────
def on_call_failed(session: PartitionSession, event: CallFailed, now_ms: int) -> None:
    """A request was not answered, or was refused."""
    request, error = event.request, event.error
    if isinstance(request, Release):
        session.tenure.phase = SessionPhase.ENDED
    elif isinstance(request, ReadWindow):
        on_window_failed(session, request.number, now_ms)
    elif isinstance(request, Ack):
        _on_ack_failed(session, error, now_ms)
    elif isinstance(request, SendChanges):
        _on_changes_failed(session, error, now_ms)
    elif isinstance(request, Pull | PullShared | Read):
        _on_pull_failed(session, error, now_ms)
    elif isinstance(request, Acquire | AcquireShared):
        _pause_after(session, session.calls.acquire, now_ms)
    elif isinstance(request, ListParked):
        _pause_after(session, session.calls.list_keys, now_ms)
        session.parking.ancestors.note_freed()
    elif isinstance(request, LeaveAncestor):
        _on_leave_failed(session, request.source, error, now_ms)
    others = Release | ReadWindow | LeaveAncestor  # their brokers know other fences
    if isinstance(error, FencedError) and not isinstance(request, others):
        fence(session, error.current_token or 0, now_ms)


def _on_leave_failed(
    session: PartitionSession, source: int, error: KeylaneError, now_ms: int
) -> None:
    """An ancestor was not told: it is told after a pause, unless it was reset since then."""
    if isinstance(error, FencedError):
        session.calls.leave.end()
        session.parking.ancestors.end(source, is_told=False)
    else:
        _pause_after(session, session.calls.leave, now_ms)


def _pause_after(session: PartitionSession, slot: CallSlot, now_ms: int) -> None:
    slot.fail(session.settings.backoff, session.rng, now_ms)


def _on_ack_failed(session: PartitionSession, error: KeylaneError, now_ms: int) -> None:
    acks = session.acks
    if not isinstance(error, OverloadedError):
        is_renewal = acks.sent is not None and bool(acks.sent.held)
        if acks.sent is not None and acks.sent.promise_ms:
            session.tenure.asked_ms = -NEVER
        acks.retract()
        if acks.handled or acks.tries or acks.begun or is_renewal:
            session.make_ack_due(now_ms)
        _pause_after(session, session.calls.ack, now_ms)
        return
    if not acks.handled.is_refused:
        session.output.notes.append(Note(NoteKind.RANGE_LIMIT, session.offsets.cursor))
    if session.settings.ack is AckMode.EACH:
        session.lanes.hold_keyless()
    if acks.retract(is_refused=True):
        session.calls.ack.end()
    else:
        _pause_after(session, session.calls.ack, now_ms)
    session.make_ack_due(now_ms)


def _on_changes_failed(session: PartitionSession, error: KeylaneError, now_ms: int) -> None:
    is_full = error.reason is Reason.PARK_FULL
    is_unknown = isinstance(error, InvalidRequestError)
    parking = session.parking
    if (is_full and parking.refuse()) or (is_unknown and parking.name_failures()):
        session.calls.change.end()
    elif error.reason is Reason.PARK_MOVED:
        # The children have adopted the messages, so these changes have no effect any more.
        session.calls.change.end()
        for pending in session.parking.confirm():
            on_stored(session, pending, now_ms)
    else:
        _pause_after(session, session.calls.change, now_ms)


def _on_pull_failed(session: PartitionSession, error: KeylaneError, now_ms: int) -> None:
    offsets = session.offsets
    if not isinstance(error, OffsetOutOfRangeError):
        _acquire_again(session, now_ms)
        return
    session.calls.pull.end()
    first_offset = error.first_offset or 0
    if session.flights.is_shared:  # the broker continues with what it still stores
        session.output.notes.append(Note(NoteKind.MISSED, first_offset))
    elif offsets.next_offset < first_offset:
        start = offsets.next_offset
        missed = offsets.skip_removed(first_offset)
        if session.settings.broadcast:
            offsets.ack(start, first_offset)
        session.output.notes.append(Note(NoteKind.MISSED, first_offset, missed))
    elif session.settings.broadcast:
        fail_read(session, now_ms)  # no other token helps, but the broker's own data may
    else:
        # The broker stores less than was pulled: only the owner of the next token may start over.
        stop(session, session.settings.handover_ms, now_ms)


def _acquire_again(session: PartitionSession, now_ms: int) -> None:
    """Raise the fence again: the broker may have been started again."""
    if session.settings.broadcast:
        fail_read(session, now_ms)
        return
    _pause_after(session, session.calls.pull, now_ms)
    if session.tenure.phase is SessionPhase.SERVING:
        session.tenure.phase = SessionPhase.ACQUIRING
