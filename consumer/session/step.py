"""The one function that changes a session. Pure.

    step(session, event, now_ms) ─▶ Ready(requests, hand_out, has_more, wait_until_ms, notes)

Invariants
    Time is what the caller says, and never goes back. A batch makes its messages when it is opened,
    and a filter is asked about messages of parked keys; apart from these two calls nothing outside
    of the session is reached. Sessions that were given the same events at
    the same times, and a generator of the same seed, are equal.
    An outcome that changes nothing but offsets takes a short way: no request but an ack can be due
    by it, and that one has a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.frames import Acked, Acquired, ParkedChanged, Released
from .calls import (
    find_next_ms,
    on_acked,
    on_acquired,
    on_ancestor_left,
    on_call_failed,
    on_changed,
    on_flights_pulled,
    on_keys_listed,
    on_operator_changed,
    on_pulled,
    on_released,
    send_due,
)
from .events import (
    AckedLate,
    AncestorLeft,
    BatchFailed,
    CallFailed,
    ColumnsCut,
    ColumnsHandled,
    ColumnsReturned,
    ColumnsWanted,
    Event,
    FailureOutcome,
    FlightsPulled,
    KeysListed,
    LeaseGranted,
    MessageExpired,
    MessageFailed,
    MessageHangs,
    MessagesHandled,
    MessagesLeft,
    MessagesReturned,
    Note,
    OperatorChanged,
    Paused,
    Pulled,
    Ready,
    ReleaseAllowed,
    Request,
    RunEnded,
    RunSpread,
    SettingsStored,
    SourceUnreadable,
    Stopped,
    Tick,
    TurnTaken,
    WindowRead,
    WorkersFree,
    WorkWanted,
)
from .hand_over import proceed, stop
from .outcomes import (
    on_acked_late,
    on_batch_failed,
    on_columns_cut,
    on_columns_handled,
    on_columns_returned,
    on_expired,
    on_failed,
    on_handled,
    on_hanging,
    on_left,
    on_returned,
    on_run_ended,
    on_run_spread,
)
from .state import PartitionSession, SessionPhase, SuspectPhase
from .taking import (
    has_more,
    has_more_batches,
    has_more_columns,
    on_columns_wanted,
    on_turn,
    pass_over_suspect,
    resume_suspect,
    take,
)
from .windows import on_source_unreadable, on_window_read

_NO_REQUESTS: tuple[Request, ...] = ()
_NO_NOTES: tuple[Note | FailureOutcome, ...] = ()


def step(session: PartitionSession, event: Event, now_ms: int) -> Ready:
    """
    Change the session by an event, and return what its shell does next.

    Args:
        now_ms: the boot clock.
    """
    kind = type(event)
    _APPLY[kind](session, event, now_ms)
    output = session.output
    if (
        kind not in _SHORT
        or now_ms >= session.next_timer_ms
        or session.tenure.phase is not SessionPhase.SERVING
        or output.requests
        or session.intake.held <= session.intake.resume_at
        or session.parking
    ):
        proceed(session, now_ms)
        send_due(session, now_ms)
        session.next_timer_ms = find_next_ms(session, now_ms)
    elif output.hand_out and session.is_plain:
        hand_out = output.hand_out
        output.hand_out = []
        more = session.lanes.may_have_more(now_ms)
        return Ready(_NO_REQUESTS, hand_out, more, session.next_timer_ms, _NO_NOTES)
    hand_out = output.hand_out
    output.hand_out = []
    requests, notes = _NO_REQUESTS, _NO_NOTES
    if output.requests:
        requests = tuple(output.requests)
        output.requests.clear()
    if output.notes:
        notes = tuple(output.notes)
        output.notes.clear()
    more = _has_more(session, now_ms)
    return Ready(requests, hand_out, more, session.next_timer_ms, notes)


def _has_more(session: PartitionSession, now_ms: int) -> bool:
    if session.lanes.columns is not None:
        return has_more_columns(session, now_ms)
    if session.lanes.batches is not None:
        return has_more_batches(session, now_ms)
    return has_more(session, now_ms)


def _on_granted(session: PartitionSession, event: LeaseGranted, now_ms: int) -> None:
    session.tenure.renew(event.until_ms, now_ms)


def _on_settings(session: PartitionSession, event: SettingsStored, _now_ms: int) -> None:
    session.settings = event.settings


def _on_wanted(session: PartitionSession, event: WorkWanted, now_ms: int) -> None:
    take(
        session,
        now_ms,
        count=event.count,
        retries=event.retries,
        run=event.run,
        together=event.together,
    )


def _on_workers_free(session: PartitionSession, event: WorkersFree, _now_ms: int) -> None:
    session.flights.pull_size.free = event.count


def _on_paused(session: PartitionSession, event: Paused, now_ms: int) -> None:
    session.tenure.is_paused = event.is_paused
    if not event.is_paused:
        resume_suspect(session, now_ms)


def _on_stopped(session: PartitionSession, event: Stopped, now_ms: int) -> None:
    stop(session, event.grace_ms, now_ms)


def _on_release_allowed(session: PartitionSession, _event: ReleaseAllowed, _now_ms: int) -> None:
    session.tenure.may_release = True


def _on_turn_taken(session: PartitionSession, _event: TurnTaken, now_ms: int) -> None:
    on_turn(session, now_ms)


def _on_tick(session: PartitionSession, _event: Tick, now_ms: int) -> None:
    """Go on without a suspect that takes too long."""
    suspects = session.suspects
    if suspects is None or suspects.phase is not SuspectPhase.ALONE:
        return
    if now_ms >= suspects.deadline_ms:
        pass_over_suspect(session, suspects, now_ms)


_APPLY: dict[type, Callable[[PartitionSession, Any, int], None]] = {
    LeaseGranted: _on_granted,
    SettingsStored: _on_settings,
    Acquired: on_acquired,
    Acked: on_acked,
    ParkedChanged: on_changed,
    Released: on_released,
    Pulled: on_pulled,
    FlightsPulled: on_flights_pulled,
    KeysListed: on_keys_listed,
    AncestorLeft: on_ancestor_left,
    WindowRead: on_window_read,
    SourceUnreadable: on_source_unreadable,
    CallFailed: on_call_failed,
    OperatorChanged: on_operator_changed,
    WorkWanted: _on_wanted,
    WorkersFree: _on_workers_free,
    RunEnded: on_run_ended,
    RunSpread: on_run_spread,
    MessagesHandled: on_handled,
    MessageFailed: on_failed,
    BatchFailed: on_batch_failed,
    MessagesLeft: on_left,
    MessageExpired: on_expired,
    AckedLate: on_acked_late,
    ColumnsWanted: on_columns_wanted,
    ColumnsHandled: on_columns_handled,
    ColumnsReturned: on_columns_returned,
    ColumnsCut: on_columns_cut,
    MessageHangs: on_hanging,
    MessagesReturned: on_returned,
    Paused: _on_paused,
    Stopped: _on_stopped,
    ReleaseAllowed: _on_release_allowed,
    TurnTaken: _on_turn_taken,
    Tick: _on_tick,
}
_SHORT = frozenset({WorkWanted, RunEnded, MessagesHandled})
