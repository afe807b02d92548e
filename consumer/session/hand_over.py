"""Hands a partition over: handlers end, all is flushed, and the lock is released. Pure.

    stop, lapse, fence ─▶ nothing starts ─▶ handlers end, or are cancelled ─▶ changes and acks
        ─▶ Release ─▶ ENDED
              ╰─ fenced: ENDED at once, because the broker takes nothing more

Invariant
    The lock is released only when no handler has a message of the partition.
"""

from __future__ import annotations

from ...protocol.frames import Release
from ..settings import AckMode
from .events import CancelHandlers, Note, NoteKind
from .offsets import NEVER
from .state import NOT_BEGUN, PartitionSession, SessionPhase
from .taking import end_suspect


def stop(session: PartitionSession, grace_ms: int, now_ms: int) -> None:
    """Begin to hand over; running handlers have `grace_ms`, but not beyond the lease, which may
    still be renewed.
    """
    tenure, lanes, suspects = session.tenure, session.lanes, session.suspects
    if not tenure.is_live:
        return
    tenure.phase = SessionPhase.STOPPING
    tenure.cancel_ms = now_ms + grace_ms
    is_waiting = lanes.columns is not None and lanes.columns.in_hand is None
    if suspects is not None and (is_waiting or suspects.phase in NOT_BEGUN):
        end_suspect(session)
    _drop_waiting(session)
    session.make_ack_due(now_ms)
    if lanes.is_idle and not session.acks.awaited:
        tenure.cancel_ms = NEVER


def _give_up_awaited(session: PartitionSession) -> None:
    """Nothing waits for an ack any more: no handler starts with a message that was acked first."""
    acks, batches = session.acks, session.lanes.batches
    if session.settings.ack is AckMode.BEFORE:
        awaited_batches = {} if batches is None else batches.awaited
        for ref, message in acks.awaited.items():
            batch = awaited_batches.get(ref)
            count = 1 if batch is None else len(batch.messages)
            session.intake.held -= count
            if session.tenure.fence is None:  # otherwise they are the next owner's
                session.output.notes.append(Note(NoteKind.LOST, message.offset, count))
    acks.awaited.clear()
    if batches is not None:
        batches.awaited.clear()


def _drop_waiting(session: PartitionSession) -> None:
    """Drop what no worker has: the next owner gets it."""
    lanes, redrives = session.lanes, session.redrives
    lanes.clear()
    in_hand = set(lanes.in_hand)
    if lanes.batches is not None:
        for batch in lanes.batches.in_hand.values():
            in_hand.update((each.partition_id, each.offset) for each in batch.messages)
    for ref in [ref for ref in redrives.owners if ref not in in_hand]:
        redrives.owners.pop(ref).out.discard(ref)
        session.acks.failing.forget(ref)
    redrives.clear()
    is_first = session.settings.ack is AckMode.BEFORE
    session.intake.held = lanes.count_in_hand
    if is_first:
        session.intake.held += len(session.acks.awaited)
        if lanes.batches is not None:
            session.intake.held += lanes.batches.count_awaited - len(lanes.batches.awaited)


def fence(session: PartitionSession, token: int, now_ms: int) -> None:
    """The broker has seen a higher token, 0 if it is unknown: another consumer has the messages."""
    tenure = session.tenure
    if tenure.fence is not None or session.has_ended:
        return
    session.output.notes.append(Note(NoteKind.FENCED, token))
    stop(session, 0, now_ms)
    tenure.fence = token
    if not session.lanes.is_idle:
        tenure.cancel_ms = min(tenure.cancel_ms, now_ms)


def proceed(session: PartitionSession, now_ms: int) -> None:
    """Do what is due of the end of the lease, and of the hand-over."""
    tenure, lanes = session.tenure, session.lanes
    if tenure.is_live and tenure.until_ms and now_ms >= tenure.until_ms:
        session.output.notes.append(Note(NoteKind.LAPSED))
        stop(session, 0, now_ms)
    if tenure.phase is not SessionPhase.STOPPING:
        return
    if now_ms >= tenure.cancel_due_ms:
        tenure.cancel_ms = NEVER
        if not lanes.is_idle:
            session.output.requests.append(CancelHandlers())
        _give_up_awaited(session)
    is_first = session.settings.ack is AckMode.BEFORE
    if not lanes.is_idle or (is_first and session.acks.awaited and tenure.fence is None):
        return
    if tenure.fence is not None or not tenure.is_acquired:
        tenure.phase = SessionPhase.ENDED
        return
    if not tenure.may_release:
        return
    if session.settings.broadcast:
        ack_here(session)
        tenure.phase = SessionPhase.ENDED
        return
    if tenure.flush_until_ms == NEVER:
        tenure.flush_until_ms = now_ms + session.settings.call_timeout_ms
        session.make_ack_due(now_ms)
    parking, slot = session.parking, session.calls.release
    is_flushed = session.acks.is_flushed and (not parking or parking.is_full)
    if now_ms >= tenure.flush_until_ms:
        tenure.phase = SessionPhase.ENDED  # what is not flushed is handed out again
    elif is_flushed and not slot.is_in_flight:
        slot.is_in_flight = True
        session.output.requests.append(Release(*tenure.lease))


def ack_here(session: PartitionSession) -> None:
    """Ack what is handled."""
    acks = session.acks
    acks.due_ms = NEVER
    acks.handled.retract()  # what could not be acked before
    while acks.handled:
        for start, end in acks.handled.take():
            session.offsets.ack(start, end)
        acks.handled.confirm()
