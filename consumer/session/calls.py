"""Which requests a session sends now, and when it is to be called again. Pure."""

from __future__ import annotations

from operator import attrgetter

from ...protocol.frames import (
    Acquire,
    AcquireShared,
    ChangeParked,
    ListParked,
    Pull,
    PullShared,
)
from ...protocol.limits import PULL_ANSWERS_MAX
from ...protocol.offsets import Range
from ..settings import FullPolicy
from .batches import PartitionBatches
from .broadcast import ack_here, next_read
from .offsets import ranges_of
from .ready import LeaveAncestor, Request, SendChanges
from .setting_aside import is_own
from .state import PartitionSession
from .suspects import SuspectPhase
from .taking_batches import expire_fill
from .tenure import NEVER, SessionPhase
from .windows import read_due

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


def _renewal_ms(session: PartitionSession) -> int:
    """Return when an ack request is due although nothing is to be acked: it keeps the pull lock,
    and messages that handlers of a shared group have.
    """
    if session.settings.broadcast or (not session.intake.held and session.is_idle):
        return NEVER
    idle_ms = session.settings.ttl_ms // 3
    if session.flights.is_shared and session.lanes.in_hand:
        idle_ms = min(idle_ms, session.flights.renewal_ms)
    return session.acks.sent_ms + idle_ms


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
    acks = session.acks
    if not _may_send_acks(session):
        return
    if now_ms < acks.due_ms and now_ms < _renewal_ms(session):
        return
    if session.settings.broadcast:
        ack_here(session)
    elif session.calls.ack.begin(now_ms):
        request = acks.request(
            session.tenure.lease, now_ms, _held(session), session.settings.in_flight_ms
        )
        session.output.requests.append(request)


# ── the next time ─────────────────────────────────────────────────────────────────────────────────
def find_next_ms(session: PartitionSession, now_ms: int) -> int:
    """Return when the session is to be called, if nothing happens earlier."""
    tenure, calls, suspects = session.tenure, session.calls, session.suspects
    if session.has_ended:
        return NEVER
    next_ms = min(tenure.cancel_due_ms, tenure.flush_until_ms)
    for slot in calls.every:
        if now_ms < slot.not_before_ms < next_ms:
            next_ms = slot.not_before_ms
    if tenure.is_live:
        next_ms = min(next_ms, tenure.until_ms or NEVER)
    if not calls.ack.is_in_flight and _may_send_acks(session):
        next_ms = min(next_ms, _ack_ms(session))
    if session.lanes.retries and tenure.is_live and not tenure.is_paused:
        due_ms = session.lanes.retries[0].due_ms
        if now_ms < due_ms < next_ms:
            next_ms = due_ms
    columns = session.lanes.columns
    if columns is not None and columns.again is not None and now_ms < columns.due_ms < next_ms:
        next_ms = columns.due_ms
    if session.lanes.batches is not None and tenure.is_live and not tenure.is_paused:
        next_ms = min(next_ms, _batch_ms(session.lanes.batches, now_ms))
    if session.redrives.has_waiting and tenure.phase is SessionPhase.SERVING:
        window_ms = session.redrives.next_ms()
        if window_ms is not None and now_ms < window_ms < next_ms:
            next_ms = window_ms
    if suspects is not None and suspects.phase is SuspectPhase.ALONE:
        next_ms = min(next_ms, suspects.deadline_ms)
    elif suspects is not None and now_ms < suspects.until_ms:
        next_ms = min(next_ms, suspects.until_ms)
    return next_ms


def _batch_ms(batches: PartitionBatches, now_ms: int) -> int:
    """Return when a batch may begin next that waits for that time."""
    next_ms = batches.fill.until_ms
    if batches.waiting and batches.waiting[0].due_ms > now_ms:
        next_ms = min(next_ms, batches.waiting[0].due_ms)
    return next_ms


def _ack_ms(session: PartitionSession) -> int:
    """Return when the next ack request leaves."""
    due_ms = min(session.acks.due_ms, _renewal_ms(session))
    return max(due_ms, session.calls.ack.not_before_ms)
