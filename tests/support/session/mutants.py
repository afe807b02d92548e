"""Bugs of a partition session, put in on purpose: random histories must find each of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from keylane.consumer.session import calls, hand_over, outcomes, parking, step, taking, windows
from keylane.consumer.session.events import (
    AncestorLeft,
    FailureOutcome,
    MessageFailed,
    MessagesHandled,
    Paused,
    SourceUnreadable,
    TurnTaken,
    WindowRead,
    WorkersFree,
)
from keylane.consumer.session.lanes import KeyLanes, MessageBatch, by_offset, take_first
from keylane.consumer.session.offsets import (
    FailingMessages,
    Flights,
    HandledOffsets,
    PendingAcks,
    PullOffsets,
    PullSize,
)
from keylane.consumer.session.parking import (
    AsideMessages,
    PartitionAncestors,
    PartitionParking,
    RedriveWindows,
)
from keylane.consumer.session.state import PartitionSession, SuspectMessages, Tenure
from sim.mutants.mutant import Mutant, Patches
from sim.mutants.sessions import on_event


# ── order ─────────────────────────────────────────────────────────────────────────────────────────
def key_not_waited_for(patches: Patches) -> None:
    """A message is handed out while another one of its key is in hand."""

    def claim(self: Any, message: Any) -> bool:
        self.busy.setdefault(message.key, None)
        return True

    patches.set(KeyLanes, "claim", claim)


def run_ignores_busy_keys(patches: Patches) -> None:
    def take_run(self: Any, count: int) -> Any:
        self.run = [self.opened.popleft() for _ in range(min(count, len(self.opened)))]
        return self.run

    patches.set(KeyLanes, "take_run", take_run)


def run_returned_behind_later_ones(patches: Patches) -> None:
    def end_run(self: Any, done: int, *, has_next: bool) -> Any:
        rest = self.run[done + has_next :]
        handled = real(self, done, has_next=has_next)
        for _ in rest:
            self.opened.append(self.opened.popleft())
        return handled

    real = patches.set(KeyLanes, "end_run", end_run)


def failed_key_freed(patches: Patches) -> None:
    """Later messages of a key overtake one that waits for its next try."""

    def wait(self: Any, message: Any, due_ms: int, last: Any = None) -> None:
        real(self, message, due_ms, last)
        if message.key and self.is_ordered:
            self.opened.extendleft(reversed(self.busy.pop(message.key) or ()))

    real = patches.set(KeyLanes, "wait", wait)


def later_messages_not_parked(patches: Patches) -> None:
    def remove_key(self: Any, key: bytes, matches: Any) -> list[Any]:
        queue = self.busy.pop(key, None) or ()
        self.opened.extendleft(reversed(queue))
        return []

    patches.set(KeyLanes, "remove_key", remove_key)


def parked_key_handed_out(patches: Patches) -> None:
    """A batch that is opened later is not looked through for parked keys."""
    patches.set(taking, "divert", lambda session, messages, now_ms: messages)


def key_freed_before_it_is_stored(patches: Patches) -> None:
    """An ack "each" does not hold its key."""

    def confirm(session: Any, event: Any, now_ms: int) -> None:
        before(session, event, now_ms)
        for message in session.acks.awaited.values():
            session.lanes.finish(message)
        session.acks.awaited.clear()

    before = on_event(patches, MessagesHandled, confirm)


# ── several messages of a key ─────────────────────────────────────────────────────────────────────
def later_ones_stay_with_the_program(patches: Patches) -> None:
    """A message fails, and the program keeps those that it has of its key."""

    def take_back(self: Any, failed: Any) -> list[Any]:
        self.leave(failed)
        return []

    patches.set(KeyLanes, "take_back", take_back)


def key_freed_with_the_first_of_several(patches: Patches) -> None:
    """Later messages of a key are handed out while others of it are in hand."""

    def leave(self: Any, message: Any) -> bool:
        real(self, message)
        self.together.pop(message.key, None)
        return False

    real = patches.set(KeyLanes, "leave", leave)


def failed_one_overtakes_earlier_ones(patches: Patches) -> None:
    """A message is tried again while earlier ones of its key are in hand."""

    def wait(self: Any, message: Any, due_ms: int, last: Any = None) -> None:
        together, self.together = self.together, {}
        real(self, message, due_ms, last)
        self.together = together

    real = patches.set(KeyLanes, "wait", wait)


def taken_back_behind_later_ones(patches: Patches) -> None:
    """What comes back with a failed message is handed out after what waited for it."""

    def queue_in_order(self: Any, key: bytes, messages: Any) -> None:
        if messages:
            self.busy[key] = deque([*(self.busy[key] or ()), *messages])

    patches.set(KeyLanes, "queue_in_order", queue_in_order)


def parked_before_earlier_ones_have_ended(patches: Patches) -> None:
    """A key is parked without the first messages of it, which are in hand."""

    def fail(session: Any, event: Any, later: Any, now_ms: int) -> None:
        together, session.lanes.together = session.lanes.together, {}
        real(session, event, later, now_ms)
        session.lanes.together = together

    real = patches.set(outcomes, "_fail", fail)


def program_told_too_little(patches: Patches) -> None:
    """The program does not learn which messages were taken back."""

    def outcome(message: Any, treatment: Any, pause: Any = None, returned: Any = ()) -> Any:
        return FailureOutcome(message, treatment, pause)

    patches.set(outcomes, "FailureOutcome", outcome)


def joined_ones_not_noted(patches: Patches) -> None:
    """Only the first of several messages of a key is known to be in hand."""
    patches.set(KeyLanes, "join", lambda self, first, message: None)


# ── batches ───────────────────────────────────────────────────────────────────────────────────────
def keys_of_a_failed_batch_freed(patches: Patches) -> None:
    """Later messages overtake a batch that waits for its next try."""

    def wait(session: Any, batch: Any, due_ms: int) -> None:
        real(session, batch, due_ms)
        taking.finish_batch(session, batch)

    real = patches.set(outcomes, "_wait_batch", wait)


def newer_half_beside_the_older_one(patches: Patches) -> None:
    """Both halves of a batch with one key are tried at the same time."""

    def wait_apart(session: Any, batch: Any, other: Any, now_ms: int) -> None:
        keys = {message.key for message in other if message.key}
        half = MessageBatch(other, keys, batch.attempt)
        session.lanes.batches.wait(half, now_ms + 50)

    patches.set(outcomes, "_wait_apart", wait_apart)


def other_half_forgotten(patches: Patches) -> None:
    patches.set(outcomes, "_wait_apart", lambda session, batch, other, now_ms: None)


def keys_looked_at_too_late(patches: Patches) -> None:
    """The keys of a batch that was taken alone are never busy."""
    patches.set(taking, "register", lambda lanes, batches: None)


def batch_acked_when_one_ack_is_stored(patches: Patches) -> None:
    """The keys of a batch are free with its first ack, whatever the others."""

    def request(self: Any, *args: Any) -> Any:
        sent = real(self, *args)
        if self.awaited:
            self.handled.in_flight = self.handled.in_flight[:1]
        return sent

    real = patches.set(PendingAcks, "request", request)


def tries_of_a_batch_not_counted(patches: Patches) -> None:
    """Only the first message of a failed batch counts a try."""

    def record_try(session: Any, messages: Any, event: Any) -> None:
        real(session, messages[:1], event)

    real = patches.set(outcomes, "_record_batch_try", record_try)


def redriven_messages_beside_others(patches: Patches) -> None:
    """Redriven messages are in one batch with those of another window."""

    def take_extra(session: Any, batches: Any, now_ms: int) -> Any:
        extra = session.lanes.extra
        messages = sorted(take_first(extra, batches.count_max), key=by_offset)
        return taking._claim_batch(session, batches, messages, now_ms) if messages else None

    patches.set(taking, "_take_extra", take_extra)


# ── nothing lost, nothing twice ───────────────────────────────────────────────────────────────────
def queue_dropped(patches: Patches) -> None:
    """What waits for a key is forgotten when the key is free."""
    patches.set(KeyLanes, "finish", lambda self, message: self.busy.pop(message.key, None))


def run_rest_dropped(patches: Patches) -> None:
    def end_run(self: Any, done: int, *, has_next: bool) -> Any:
        self.run = self.run[: done + has_next]
        return real(self, done, has_next=has_next)

    real = patches.set(KeyLanes, "end_run", end_run)


def acked_when_handed_out(patches: Patches) -> None:
    def hand_out(session: Any, message: Any, now_ms: int) -> None:
        real(session, message, now_ms)
        session.acks.handled.add(message.offset, message.offset + 1)

    real = patches.set(taking, "_hand_out", hand_out)


def failed_ack_forgotten(patches: Patches) -> None:
    def retract(self: Any, *, is_refused: bool = False) -> bool:
        self.in_flight = ()
        return False

    patches.set(HandledOffsets, "retract", retract)


def acked_ranges_pulled_again(patches: Patches) -> None:
    """What is acked above the cursor is handed out again."""

    def begin(self: Any, cursor: int, ranges: Any) -> None:
        real(self, cursor, ())

    real = patches.set(PullOffsets, "begin", begin)


def overlap_pulled_again(patches: Patches) -> None:
    """The first messages of a batch that begins below the pull offset are handed out again."""

    def take(self: Any, start: int, end: int) -> Any:
        self.next_offset = min(start, self.next_offset)
        return real(self, start, end)

    real = patches.set(PullOffsets, "take", take)


def refused_ack_blocks_for_ever(patches: Patches) -> None:
    def confirm(self: Any) -> Any:
        is_refused = self.is_refused
        confirmed = real(self)
        self.is_refused = is_refused
        return confirmed

    real = patches.set(HandledOffsets, "confirm", confirm)


def refused_parks_forgotten(patches: Patches) -> None:
    def refuse(self: Any) -> bool:
        self.in_flight = []
        return True

    patches.set(PartitionParking, "refuse", refuse)


def tries_not_loaded(patches: Patches) -> None:
    """A new owner counts the tries of a message from one."""

    def on_acquired(session: Any, answer: Any, now_ms: int) -> None:
        real(session, answer, now_ms)
        session.intake.earlier_tries = {}

    real = patches.set(calls, "on_acquired", on_acquired)
    on_event(patches, calls.Acquired, on_acquired)


def count_leaks(patches: Patches) -> None:
    """A message that fails counts as pulled for ever."""

    def on_failed(session: Any, event: Any, now_ms: int) -> None:
        session.intake.held += 1
        before(session, event, now_ms)

    before = on_event(patches, MessageFailed, on_failed)


# ── parking ───────────────────────────────────────────────────────────────────────────────────────
def window_read_again_too_soon(patches: Patches) -> None:
    """The next window is read before it is stored what became of the last one."""

    def settle(session: Any, window: Any) -> None:
        unstored = window.unstored
        window.unstored = 0
        real(session, window)
        window.unstored = unstored

    real = patches.set(windows, "_settle", settle)

    def unpark(session: Any, message: Any) -> None:
        window = session.redrives.owners[message.partition_id, message.offset]
        real_unpark(session, message)
        settle(session, window)

    real_unpark = patches.set(outcomes, "_unpark", unpark)


def key_freed_with_messages(patches: Patches) -> None:
    """A redriven key is freed after its first window."""

    def settle(session: Any, window: Any) -> None:
        is_due = not (window.out or window.unstored) and window.key not in session.parking.releasing
        if is_due and isinstance(window.key, bytes) and window.phase is windows.WindowPhase.IN_HAND:
            window.phase = windows.WindowPhase.FREEING
            session.parking.free(window.key)
            return
        real(session, window)

    real = patches.set(windows, "_settle", settle)


def redrive_goes_on_after_a_failure(patches: Patches) -> None:
    """A redriven key whose message has failed too often goes on with its next message."""

    def drop_window(session: Any, window: Any) -> None:
        window.is_stopped = False

    from keylane.consumer.session import windows

    patches.set(windows, "_drop_window", drop_window)


def released_messages_forgotten(patches: Patches) -> None:
    """What came while a key was being freed is not handed out."""

    def release(session: Any, key: Any) -> None:
        session.parking.releasing[key] = []
        real(session, key)

    real = patches.set(windows, "_release", release)


def others_wait_for_an_unreadable_message(patches: Patches) -> None:
    """Nothing of a key is redriven while its first message cannot be read."""

    def on_source_unreadable(session: Any, event: Any, now_ms: int) -> None:
        windows.on_window_failed(session, event.number, now_ms)

    on_event(patches, SourceUnreadable, on_source_unreadable)


def retries_wait_for_an_unreadable_message(patches: Patches) -> None:
    """What cannot be read is put back together with what comes after it."""
    patches.set(parking, "_split_unreadable", lambda ranges, upto: list(ranges))


def unreadable_message_given_up(patches: Patches) -> None:
    """The redrive of a key ends although a message of it was passed over."""

    def on_window_read(session: Any, event: Any, now_ms: int) -> None:
        window = session.redrives.windows.get(event.number)
        if window is not None:
            window.unreadable.clear()
        before(session, event, now_ms)

    before = on_event(patches, WindowRead, on_window_read)


def held_retries_forgotten(patches: Patches) -> None:
    """What waits for a source is not due when the source can be read again."""
    patches.set(AsideMessages, "note_read", lambda self, source: self.failing.pop(source, None))


def ancestor_told_while_it_is_needed(patches: Patches) -> None:
    """An ancestor is told as soon as one key is free, whatever else of it is parked."""

    def note_freed(self: Any) -> None:
        self.must_list = True
        self.unneeded = [7, 8]

    patches.set(PartitionAncestors, "note_freed", note_freed)


def ancestor_noted_before_it_is_told(patches: Patches) -> None:
    """A call to an ancestor that failed counts as answered."""

    def on_leave_failed(session: Any, source: int, error: Any, now_ms: int) -> None:
        calls.on_ancestor_left(session, AncestorLeft(source), now_ms)

    patches.set(calls, "_on_leave_failed", on_leave_failed)


def ancestor_never_told(patches: Patches) -> None:
    """The keys are not listed when one is freed."""
    patches.set(PartitionAncestors, "note_freed", lambda self: None)


def ancestor_not_told_of_loose_messages(patches: Patches) -> None:
    """The keys are not listed when the last dead letter of an ancestor is handled."""

    def end_loose(session: Any, window: Any) -> None:
        session.redrives.end(window)

    patches.set(windows, "_end_loose", end_loose)


def refusal_of_an_ancestor_taken_for_a_fence(patches: Patches) -> None:
    """An ancestor that was reset refuses the call, and the partition is handed over."""

    def on_leave_failed(session: Any, source: int, error: Any, now_ms: int) -> None:
        real(session, source, error, now_ms)
        calls.fence(session, 0, now_ms)

    real = patches.set(calls, "_on_leave_failed", on_leave_failed)


def released_suspect_handed_out_beside_others(patches: Patches) -> None:
    """A suspect that came while its key was being freed is handed out freely."""
    patches.set(KeyLanes, "put_back", lambda self, messages: self.extra.extend(messages))


# ── broadcast ─────────────────────────────────────────────────────────────────────────────────────
def local_acks_forgotten(patches: Patches) -> None:
    """The next session of a broadcast consumer begins with what this one has handled."""

    def ack(self: Any, start: int, end: int) -> None:
        self.cursor = max(self.cursor, end)

    patches.set(PullOffsets, "ack", ack)


def empty_reads_follow_at_once(patches: Patches) -> None:
    """A broker that does not wait for messages is asked without a pause."""

    def end_read(session: Any, now_ms: int, *, is_empty: bool) -> None:
        session.calls.pull.end()

    patches.set(calls, "end_read", end_read)


def superfluous_rows_handed_out(patches: Patches) -> None:
    """A row is handed out whose original was handled."""
    patches.set(taking, "leave_out_superfluous", lambda session, messages, now_ms: messages)


# ── suspects ──────────────────────────────────────────────────────────────────────────────────────
def suspects_ignored(patches: Patches) -> None:
    patches.set(taking, "take_suspect", lambda session, suspects, now_ms: False)


def suspect_not_recorded(patches: Patches) -> None:
    """A suspect is handed out before the broker has recorded that it begins."""

    def on_turn(session: Any, event: Any, now_ms: int) -> None:
        before(session, event, now_ms)
        suspects = session.suspects
        if suspects is not None and suspects.message is not None:
            taking.hand_out_suspect(session, suspects, now_ms)

    before = on_event(patches, TurnTaken, on_turn)


def suspect_ack_not_awaited(patches: Patches) -> None:
    """The next suspect begins before the ack of the last one is stored."""

    def on_handled(session: Any, event: Any, now_ms: int) -> None:
        before(session, event, now_ms)
        if session.suspects is not None:
            taking.end_suspect(session)

    before = on_event(patches, MessagesHandled, on_handled)


def suspects_behind_a_failed_one_set_free(patches: Patches) -> None:
    def is_over(self: Any, first: int, now_ms: int, *, first_queued: int) -> bool:
        return bool(real(self, first, now_ms, first_queued=first))

    real = patches.set(SuspectMessages, "is_over", is_over)


# ── the message that operators see ────────────────────────────────────────────────────────────────
def newest_failing_message_named(patches: Patches) -> None:
    """Operators see a later message than the one that blocks the partition."""

    def oldest(self: Any, handled: Any) -> Any:
        while len(self._own) > 1:
            self.forget(min(self._own))
        return real(self, handled)

    real = patches.set(FailingMessages, "oldest", oldest)


def hang_named_after_its_end(patches: Patches) -> None:
    """A message that has been handled is named for ever."""
    patches.set(FailingMessages, "forget_acked", lambda self, ranges: None)


def retry_of_a_failed_message_named_as_hanging(patches: Patches) -> None:
    """A message that hung and then failed is said to be in its handler still."""

    def record(self: Any, message: Any, failure: Any, **given: Any) -> Any:
        before = self._own.get((message.partition_id, message.offset))
        if before is not None and given.get("running_ms") is None:
            given["running_ms"] = before.running_ms
        return real(self, message, failure, **given)

    real = patches.set(FailingMessages, "record", record)


# ── leases ────────────────────────────────────────────────────────────────────────────────────────
def lease_not_looked_at(patches: Patches) -> None:
    def may_hand_out(self: Any, now_ms: int) -> bool:
        return bool(real(self, min(now_ms, self.until_ms - 1)))

    real = patches.set(Tenure, "may_hand_out", may_hand_out)
    patches.set(hand_over, "proceed", lambda session, now_ms: None)
    patches.set(step, "proceed", lambda session, now_ms: None)


def pause_ignored(patches: Patches) -> None:
    on_event(patches, Paused, lambda session, event, now_ms: None)


def lock_renewed_while_a_pull_keeps_it(patches: Patches) -> None:
    """An idle partition sends an ack every third of the ttl."""
    patches.set(PartitionSession, "is_idle", property(lambda self: False))


def lock_lost_in_a_pause(patches: Patches) -> None:
    """A partition that does not pull renews nothing."""

    def is_idle(self: Any) -> bool:
        return not self.intake.held and self.offsets.cursor >= self.offsets.next_offset

    patches.set(PartitionSession, "is_idle", property(is_idle))


def fence_ignored(patches: Patches) -> None:
    patches.set(calls, "fence", lambda session, token, now_ms: None)


def lapsed_lease_renewed(patches: Patches) -> None:
    def renew(self: Any, until_ms: int, now_ms: int) -> None:
        self.until_ms = until_ms

    patches.set(Tenure, "renew", renew)
    patches.set(step, "proceed", lambda session, now_ms: None)


def released_before_handlers_end(patches: Patches) -> None:
    patches.set(KeyLanes, "is_idle", property(lambda self: True))


# ── shared groups, and acks before ────────────────────────────────────────────────────────────────
def flight_used_to_its_end(patches: Patches) -> None:
    def begin_limit_ms(self: Any, sent_ms: int) -> int:
        return sent_ms + self.in_flight_ms if self.is_shared else 1 << 62

    patches.set(Flights, "begin_limit_ms", begin_limit_ms)


def more_pulled_than_workers_begin(patches: Patches) -> None:
    """Messages wait here, while another consumer may be free."""
    patches.set(PullSize, "decide", lambda self, held, in_hand, limit, now_ms: max(0, limit - held))


def nothing_pulled_until_a_message_ends(patches: Patches) -> None:
    """A worker that becomes free is not noticed."""
    on_event(patches, WorkersFree, lambda session, event, now_ms: None)


def handled_flight_begun_again(patches: Patches) -> None:
    """The broker hands a message out again whose ack it does not have yet."""
    patches.set(PullOffsets, "is_acked", lambda self, offset: False)


def handler_before_the_ack(patches: Patches) -> None:
    """With acks before, a handler starts when the ack is sent, not when it is stored."""

    def request(self: Any, *args: Any) -> Any:
        sent = real(self, *args)
        self.handled.in_flight = ()
        return sent

    real = patches.set(PendingAcks, "request", request)


def redriven_windows_unlimited(patches: Patches) -> None:
    """A window that is in hand is read a second time."""

    def take_due(self: Any, now_ms: int) -> Any:
        for window in real(self, now_ms):
            yield window
            if not window.is_retry:
                window.phase = windows.WindowPhase.DUE

    real = patches.set(RedriveWindows, "take_due", take_due)


MUTANTS = [
    Mutant(breaks)
    for breaks in (
        key_not_waited_for,
        run_ignores_busy_keys,
        run_returned_behind_later_ones,
        failed_key_freed,
        later_messages_not_parked,
        parked_key_handed_out,
        key_freed_before_it_is_stored,
        later_ones_stay_with_the_program,
        key_freed_with_the_first_of_several,
        failed_one_overtakes_earlier_ones,
        taken_back_behind_later_ones,
        parked_before_earlier_ones_have_ended,
        program_told_too_little,
        joined_ones_not_noted,
        keys_of_a_failed_batch_freed,
        newer_half_beside_the_older_one,
        other_half_forgotten,
        keys_looked_at_too_late,
        batch_acked_when_one_ack_is_stored,
        tries_of_a_batch_not_counted,
        redriven_messages_beside_others,
        queue_dropped,
        run_rest_dropped,
        acked_when_handed_out,
        failed_ack_forgotten,
        acked_ranges_pulled_again,
        overlap_pulled_again,
        refused_ack_blocks_for_ever,
        refused_parks_forgotten,
        tries_not_loaded,
        count_leaks,
        window_read_again_too_soon,
        key_freed_with_messages,
        redrive_goes_on_after_a_failure,
        released_messages_forgotten,
        others_wait_for_an_unreadable_message,
        retries_wait_for_an_unreadable_message,
        unreadable_message_given_up,
        held_retries_forgotten,
        local_acks_forgotten,
        empty_reads_follow_at_once,
        superfluous_rows_handed_out,
        ancestor_told_while_it_is_needed,
        ancestor_not_told_of_loose_messages,
        ancestor_noted_before_it_is_told,
        ancestor_never_told,
        refusal_of_an_ancestor_taken_for_a_fence,
        released_suspect_handed_out_beside_others,
        suspects_ignored,
        suspect_not_recorded,
        suspect_ack_not_awaited,
        suspects_behind_a_failed_one_set_free,
        newest_failing_message_named,
        hang_named_after_its_end,
        retry_of_a_failed_message_named_as_hanging,
        lease_not_looked_at,
        pause_ignored,
        lock_renewed_while_a_pull_keeps_it,
        lock_lost_in_a_pause,
        fence_ignored,
        lapsed_lease_renewed,
        released_before_handlers_end,
        flight_used_to_its_end,
        more_pulled_than_workers_begin,
        nothing_pulled_until_a_message_ends,
        handled_flight_begun_again,
        handler_before_the_ack,
        redriven_windows_unlimited,
    )
]
