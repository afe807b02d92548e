"""A partition session, step by step: the promises of docs/CONSUMING.md, each as a story."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer.session.events import (
    CallFailed,
    CancelHandlers,
    KeysListed,
    LeaseGranted,
    MessagesReturned,
    Note,
    NoteKind,
    Paused,
    Pulled,
    RunEnded,
    Stopped,
    Tick,
    WorkWanted,
)
from keylane.consumer.session.failure import Treatment
from keylane.consumer.session.offsets import RANGES_PER_ACK, TRIES_PER_ACK
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    FencedError,
    OffsetOutOfRangeError,
    OverloadedError,
    UnreachableError,
)
from keylane.protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    ListParked,
    Pull,
    Release,
    Released,
)
from support.session.partition_model import BatchModel
from support.session.steps import LEASE, LEASE_MS, Steps, offsets_of

A, B, NONE = b"a", b"b", b""


def test_session_acquires_before_it_pulls():
    steps = Steps.__new__(Steps)
    Steps.__init__(steps, A)
    [pull] = steps.requested(Pull)
    assert (pull.partition_id, pull.token, pull.offset) == (LEASE[0], LEASE[3], 0)


def test_batch_stays_closed_until_a_worker_takes_from_it():
    steps = Steps(*[A] * 6)
    first, second = steps.pull(3, 3)
    assert (first.opened, second.opened) == (0, 0)
    assert steps.ready.has_more
    assert steps.want() == [0]
    assert (first.opened, second.opened) == (1, 0)


def test_lone_worker_takes_a_run_of_several_batches():
    steps = Steps(*[A, B] * 4)
    steps.pull(4, 4)
    assert steps.want(run=6) == [0, 1, 2, 3, 4, 5]
    steps.step(RunEnded(6))
    assert steps.want(run=6) == [6, 7]
    steps.step(RunEnded(2), after_ms=20)
    [ack] = steps.requested(Ack)
    assert ack.ranges == ((0, 8),)


def test_run_ends_where_its_handler_waits():
    steps = Steps(A, A, B, A)
    steps.pull(4)
    assert steps.want(run=4) == [0, 1, 2, 3]
    steps.step(RunEnded(1, has_next=True))
    assert steps.want() == [2]
    assert steps.want() == []
    assert steps.handle(1, wanted=1) == [3]


def test_messages_of_a_key_are_handed_out_one_at_a_time():
    steps = Steps(A, A, B, NONE)
    steps.pull(4)
    assert steps.want(3) == [0, 2, 3]
    assert steps.want() == []
    assert steps.handle(0, wanted=1) == [1]


def test_ack_leaves_after_its_linger():
    steps = Steps(A, B, ack_linger_ms=20)
    steps.pull(2)
    steps.want(2)
    steps.handle(0)
    assert steps.ready.wait_until_ms == steps.now_ms + 20
    steps.handle(1)
    assert not steps.requested(Ack)
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    assert ack.ranges == ((0, 2),)


@given(st.integers(1, 50), st.integers(20, 40), st.data())
def test_acks_of_partitions_leave_together(linger_ms, multiple, data):
    """Whenever their messages are handled between two multiples of the linger; none waits longer
    than that.
    """
    due_ms = set()
    for key in (A, B):
        steps = Steps(key, ack_linger_ms=linger_ms)
        steps.pull(1)
        steps.want()
        part_ms = data.draw(st.integers(0, linger_ms - 1))
        steps.now_ms = handled_ms = (1_000 // linger_ms + multiple) * linger_ms + part_ms
        steps.handle(0)
        due_ms.add(steps.session.acks.due_ms)
        assert 0 < steps.session.acks.due_ms - handled_ms <= linger_ms
    assert len(due_ms) == 1


def test_ack_leaves_at_once_without_a_linger():
    steps = Steps(A, ack_linger_ms=0)
    steps.pull(1)
    steps.want()
    steps.handle(0)
    assert steps.requested(Ack)[0].ranges == ((0, 1),)


def test_failed_ack_is_sent_again_with_what_was_handled_since():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    steps.handle(1)
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    steps.handle(0)
    steps.step(CallFailed(ack, UnreachableError("no answer")))
    steps.step(Tick(), after_ms=2_000)
    assert steps.requested(Ack)[0].ranges == ((0, 2),)


def test_ack_that_comes_while_a_request_is_in_flight_is_in_the_next_one():
    """No further handler has to end for that."""
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    steps.handle(0)
    steps.step(Tick(), after_ms=20)
    steps.handle(1)
    steps.step(Tick(), after_ms=20)
    assert not steps.requested(Ack), "one is in flight at a time"
    steps.ack(1)
    assert steps.requested(Ack)[0].ranges == ((1, 2),)


def test_ack_lingers_also_after_the_answer_to_the_last_request():
    """A request would follow each answer at once under load, each with a sync of a disk."""
    steps = Steps(A, B, ack_linger_ms=20)
    steps.pull(2)
    steps.want(2)
    steps.handle(0)
    steps.step(Tick(), after_ms=20)
    steps.now_ms += 3
    steps.handle(1)
    steps.now_ms += 3
    steps.ack(1)
    assert not steps.requested(Ack)
    assert steps.ready.wait_until_ms == steps.now_ms + 14
    steps.step(Tick(), after_ms=14)
    assert steps.requested(Ack)[0].ranges == ((1, 2),)


def test_acks_that_did_not_fit_into_a_request_are_sent_after_its_answer():
    count = 2 * (RANGES_PER_ACK + 5)
    steps = Steps(*[NONE] * count)
    steps.pull(count)
    steps.want(count)
    steps.handle(*range(1, count, 2))
    steps.step(Tick(), after_ms=20)
    assert len(steps.requested(Ack)[0].ranges) == RANGES_PER_ACK
    steps.ack()
    assert len(steps.requested(Ack)[0].ranges) == 5


def test_request_reports_a_limited_number_of_failed_tries():
    count = TRIES_PER_ACK + 5
    steps = Steps(*[NONE] * count)
    steps.pull(count)
    steps.want(count)
    for offset in range(count):
        steps.fail(offset)
    steps.step(Tick(), after_ms=20)
    assert len(steps.requested(Ack)[0].failed) == TRIES_PER_ACK
    steps.ack()
    assert len(steps.requested(Ack)[0].failed) == 5


def test_ack_in_flight_at_a_hand_over_is_sent_again_when_it_fails():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.handle(0)
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    steps.step(Stopped(500))
    assert not steps.requested(Release)
    steps.step(CallFailed(ack, UnreachableError("no answer")))
    assert not steps.requested(Release)
    steps.step(Tick(), after_ms=2_000)
    assert steps.requested(Ack)[0].ranges == ((0, 1),)
    steps.ack(1)
    assert steps.requested(Release)


def test_parked_keys_are_listed_once_when_an_ack_is_answered_with_a_newer_version():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    for offset in (0, 1):
        steps.handle(offset)
        steps.step(Tick(), after_ms=20)
        steps.step(Acked(offset + 1, 3))
        assert len(steps.requested(ListParked)) == (offset == 0)
        if offset == 0:
            steps.step(KeysListed(3, []))


def test_message_that_fails_waits_and_so_does_its_key():
    steps = Steps(A, A, B)
    steps.pull(3)
    assert steps.want() == [0]
    steps.fail(0)
    assert steps.want(2) == [2]
    assert steps.ready.wait_until_ms <= steps.now_ms + 100
    steps.step(Tick(), after_ms=100)
    assert steps.ready.has_more
    [message] = steps.step(WorkWanted(1)).hand_out
    assert (message.offset, message.attempt) == (0, 2)
    assert steps.handle(0, wanted=1) == [1]


def test_retry_waits_while_a_worker_takes_first_tries_only():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want()
    steps.fail(0)
    steps.now_ms += 100
    assert offsets_of(steps.step(WorkWanted(2, 0)).hand_out) == [1]
    assert offsets_of(steps.step(WorkWanted(2, 1)).hand_out) == [0]


def test_failed_tries_are_reported_with_the_next_ack():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].failed == ((0, 1),)


def test_next_owner_counts_on():
    steps = Steps(A, acquired=Acquired(0, (), 1, False, ((0, 3),)))
    steps.pull(1)
    assert steps.step(WorkWanted(1)).hand_out[0].attempt == 4


def test_ack_each_holds_the_key_until_the_ack_is_stored():
    steps = Steps(A, A, B, ack="each")
    steps.pull(3)
    steps.want()
    assert steps.handle(0, wanted=1) == [2]
    [ack] = steps.requested(Ack)
    assert ack.ranges == ((0, 1),)
    steps.ack(1)
    assert steps.want() == [1]


def test_ack_before_hands_a_message_out_when_its_ack_is_stored():
    steps = Steps(A, ack="before")
    steps.pull(1)
    assert steps.want() == []
    assert steps.requested(Ack)[0].ranges == ((0, 1),)
    assert offsets_of(steps.ack(1).hand_out) == [0]


def test_message_acked_before_is_acked_once():
    steps = Steps(A, ack="before")
    steps.pull(1)
    steps.want()
    steps.ack(1)
    steps.handle(0)
    steps.step(Tick(), after_ms=1_000)
    assert not [ack for ack in steps.requested(Ack) if ack.ranges]
    assert steps.session.intake.held == 0


def test_ack_before_waits_while_the_broker_takes_no_more_ranges():
    steps = Steps(A, B, ack="before")
    steps.pull(2)
    steps.want()
    for _ in range(2):
        [ack] = steps.requested(Ack)
        steps.step(CallFailed(ack, OverloadedError("more acked ranges above the cursor")))
        assert not steps.ready.hand_out
        steps.step(Tick(), after_ms=10_000)
    assert steps.requested(Ack)[0].ranges == ((0, 1),)
    assert offsets_of(steps.ack(1).hand_out) == [0]


def test_message_is_the_next_owners_when_its_ack_before_was_fenced():
    """It is not lost: the broker has no ack of it."""
    steps = Steps(A, ack="before")
    steps.pull(1)
    steps.want()
    [ack] = steps.requested(Ack)
    steps.step(CallFailed(ack, FencedError(token=5, current_token=9)))
    assert not steps.ready.hand_out
    assert steps.session.has_ended
    assert [note.kind for note in steps.ready.notes] == [NoteKind.FENCED]
    assert steps.want() == []


def test_message_acked_before_is_lost_when_its_handler_fails():
    steps = Steps(A, A, ack="before")
    steps.pull(2)
    steps.want()
    steps.ack(1)
    steps.fail(0)
    (outcome,) = steps.ready.notes
    assert (outcome.message.offset, outcome.treatment) == (0, Treatment.LOST)
    steps.want()
    assert offsets_of(steps.ack(2).hand_out) == [1]


def test_paused_partition_hands_out_and_pulls_nothing():
    steps = Steps(A, B)
    steps.pull(1)
    steps.step(Paused(True))
    assert not steps.ready.has_more
    assert steps.want() == []
    steps.step(Pulled([], 1, 2))
    assert not steps.requested(Pull)
    steps.step(Paused(False))
    assert steps.requested(Pull)
    assert steps.want() == [0]


def test_pulls_stop_at_the_limit_and_go_on_at_half_of_it():
    steps = Steps(*[NONE] * 4, buffer_messages=4)
    steps.pull(4)
    assert not steps.requested(Pull)
    steps.want(3)
    steps.handle(0)
    assert not steps.requested(Pull)
    steps.handle(1)
    assert steps.requested(Pull)


def test_hand_over_flushes_and_releases_when_the_last_handler_has_ended():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want()
    steps.step(Stopped(500))
    assert steps.want() == []
    assert not steps.requested(Release)
    steps.handle(0)
    assert steps.requested(Ack)[0].ranges == ((0, 1),)
    assert not steps.requested(Release)
    steps.ack(1)
    assert steps.requested(Release)
    steps.step(Released())
    assert steps.session.has_ended


def test_handlers_are_cancelled_when_the_hand_over_takes_too_long():
    steps = Steps(A)
    steps.pull(1)
    message = steps.step(WorkWanted(1)).hand_out[0]
    steps.step(Stopped(500))
    assert steps.ready.wait_until_ms == steps.now_ms + 500
    steps.step(Tick(), after_ms=500)
    assert steps.requested(CancelHandlers)
    steps.step(MessagesReturned([message]))
    assert steps.requested(Release)
    assert not steps.requested(Ack)


def test_handlers_are_not_cancelled_before_their_time_while_the_lease_is_renewed():
    """They have all of it, not what was left of the lease when the hand-over began."""
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.step(Stopped(2 * LEASE_MS))
    assert steps.ready.wait_until_ms == steps.now_ms + LEASE_MS
    steps.step(LeaseGranted(steps.now_ms + 4 * LEASE_MS), after_ms=LEASE_MS - 1)
    steps.step(Tick(), after_ms=LEASE_MS)
    assert not steps.requested(CancelHandlers)
    steps.step(Tick(), after_ms=1)
    assert steps.requested(CancelHandlers)


def test_handlers_are_cancelled_once_at_the_end_of_a_lease_that_is_not_renewed():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.step(Stopped(2 * LEASE_MS))
    steps.step(Tick(), after_ms=LEASE_MS)
    assert steps.requested(CancelHandlers)
    steps.step(Tick(), after_ms=2 * LEASE_MS)
    assert not steps.requested(CancelHandlers)


def test_handlers_keep_their_time_when_the_lease_is_renewed_during_the_hand_over():
    """The lease would have ended first."""
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.step(Stopped(500), after_ms=LEASE_MS - 200)
    assert steps.ready.wait_until_ms == steps.now_ms + 200
    steps.step(LeaseGranted(steps.now_ms + LEASE_MS), after_ms=100)
    assert steps.ready.wait_until_ms == steps.now_ms + 400
    steps.step(Tick(), after_ms=399)
    assert not steps.requested(CancelHandlers)
    steps.step(Tick(), after_ms=1)
    assert steps.requested(CancelHandlers)


def test_handlers_are_cancelled_at_the_end_of_a_lease_that_is_not_renewed():
    """Another consumer may have the messages then, so the time of the hand-over does not count."""
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.step(Stopped(500), after_ms=LEASE_MS - 200)
    steps.step(Tick(), after_ms=199)
    assert not steps.requested(CancelHandlers)
    steps.step(Tick(), after_ms=1)
    assert steps.requested(CancelHandlers)


def test_handler_does_not_begin_at_the_end_of_the_lease():
    steps = Steps(A)
    steps.pull(1)
    steps.now_ms += LEASE_MS
    assert steps.want() == []
    assert Note(NoteKind.LAPSED) in steps.ready.notes


def test_lapsed_lease_is_not_renewed():
    steps = Steps(A)
    steps.pull(1)
    steps.now_ms += LEASE_MS
    steps.step(LeaseGranted(steps.now_ms + LEASE_MS))
    assert steps.want() == []


def test_fenced_session_cancels_its_handlers_and_ends():
    steps = Steps(A)
    steps.pull(1)
    message = steps.step(WorkWanted(1)).hand_out[0]
    steps.step(Tick(), after_ms=10_000)
    [ack] = steps.requested(Ack)
    steps.step(CallFailed(ack, FencedError(token=5, current_token=9)))
    assert steps.session.tenure.fence == 9
    assert steps.requested(CancelHandlers)
    steps.step(MessagesReturned([message]))
    assert steps.session.has_ended
    assert not steps.ready.requests


def test_failed_pull_raises_the_fence_again_and_handlers_go_on():
    steps = Steps(A, B)
    steps.pull(2)
    [pull] = steps.requested(Pull)
    steps.step(CallFailed(pull, UnreachableError("no answer")))
    assert steps.requested(Acquire)
    assert steps.want() == [0]


def test_pauses_grow_while_the_answers_of_pulls_have_a_gap():
    """Each one raises the fence again, so they become rarer. No message is passed by."""
    steps = Steps(*[A] * 6, backoff=Backoff(first_ms=100, max_ms=1_000, factor=4))
    gap = Pulled([BatchModel(steps.keys, 4, 6)], 6, 6)
    for shortest_ms in (50, 200, 500):
        steps.step(gap)
        assert steps.requested(Acquire)
        steps.step(Acquired(0, (), 6, False))
        steps.step(Tick(), after_ms=shortest_ms - 1)
        assert not steps.requested(Pull)
        steps.step(Tick(), after_ms=shortest_ms + 2)
        assert [pull.offset for pull in steps.requested(Pull)] == [0]
    assert steps.want() == []


def test_part_of_an_answer_behind_a_gap_is_pulled_again():
    steps = Steps(*[A] * 6)
    steps.step(Pulled([BatchModel(steps.keys, 0, 2)], 2, 6, has_more=True))
    steps.step(Pulled([BatchModel(steps.keys, 4, 6)], 6, 6, has_more=True))
    steps.step(Acquired(0, (), 6, False))
    steps.step(Tick(), after_ms=2_000)
    assert [pull.offset for pull in steps.requested(Pull)] == [2]
    assert steps.want(6, run=6) == [0, 1]


def test_first_pull_begins_at_the_cursor():
    steps = Steps(*[A] * 4, acquired=Acquired(2, (), 4, False))
    assert [pull.offset for pull in steps.requested(Pull)] == [2]


def test_failed_tries_are_reported_until_the_broker_has_them():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    steps.step(WorkWanted(1), after_ms=100)
    steps.fail(0)
    steps.step(CallFailed(ack, UnreachableError("no answer")))
    steps.step(Tick(), after_ms=2_000)
    assert steps.requested(Ack)[0].failed == ((0, 2),)


def test_try_that_fails_while_the_last_one_is_reported_is_reported_too():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].failed == ((0, 1),)
    steps.step(WorkWanted(1), after_ms=100)
    steps.fail(0)
    steps.ack()
    assert steps.session.acks.tries == {0: 2}
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].failed == ((0, 2),)
    steps.ack()
    assert not steps.session.acks.tries


def test_renewal_during_a_hand_over_starts_no_handler():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want()
    steps.step(Stopped(500))
    steps.step(LeaseGranted(steps.now_ms + 2 * LEASE_MS))
    assert steps.want() == []
    assert steps.session.tenure.until_ms == steps.now_ms + 2 * LEASE_MS


def test_first_fence_is_kept():
    """Pulls and acks may both be refused."""
    steps = Steps(A)
    steps.pull(1)
    [pull] = steps.requested(Pull)
    message = steps.step(WorkWanted(1)).hand_out[0]
    steps.step(CallFailed(pull, FencedError(token=5, current_token=7)))
    steps.step(CallFailed(pull, FencedError(token=5, current_token=9)))
    assert steps.session.tenure.fence == 7
    steps.step(LeaseGranted(steps.now_ms + 2 * LEASE_MS))
    assert steps.session.tenure.until_ms < steps.now_ms + 2 * LEASE_MS
    steps.step(MessagesReturned([message]))
    assert steps.session.has_ended


def test_messages_removed_by_retention_are_counted_and_passed():
    steps = Steps(*[A] * 9)
    pull = Pull(*LEASE, 0, 1, 1)
    steps.step(CallFailed(pull, OffsetOutOfRangeError(offset=0, first_offset=4, next_offset=9)))
    assert steps.ready.notes == (Note(NoteKind.MISSED, 4, 4),)
    assert steps.requested(Pull)[0].offset == 4


def test_broker_that_stores_less_than_was_pulled_makes_the_session_hand_over():
    steps = Steps(A, A)
    steps.pull(2)
    [pull] = steps.requested(Pull)
    steps.step(CallFailed(pull, OffsetOutOfRangeError(offset=2, first_offset=0, next_offset=1)))
    assert steps.requested(Release)


def test_left_out_ranges_are_acked_without_a_handler():
    steps = Steps(*[A] * 6)
    batch = steps.pull()
    assert batch == []
    steps.step(Pulled([], 6, 6, left_out=((0, 6),)))
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].ranges == ((0, 6),)


def test_left_out_ranges_at_the_sealed_end_are_acked_at_once():
    """The children wait for that."""
    steps = Steps(*[A] * 4)
    steps.step(Pulled([], 4, 4, is_sealed=True, left_out=((0, 4),)))
    assert steps.requested(Ack)[0].ranges == ((0, 4),)
    steps.ack(4)
    assert steps.session.is_drained


def test_range_limit_halves_the_request_and_stops_pulls():
    steps = Steps(*[NONE] * 9)
    steps.pull(9)
    steps.want(9)
    steps.handle(1, 3, 5, 7)
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    steps.step(CallFailed(ack, OverloadedError("more acked ranges above the cursor")))
    [ack] = steps.requested(Ack)
    assert ack.ranges == ((1, 2), (3, 4))
    steps.step(Pulled([], 9, 9))
    assert not steps.requested(Pull)
    steps.ack(0)
    steps.ack(0)
    assert steps.requested(Pull)


def test_messages_without_a_key_wait_for_refused_acks_and_keys_go_on():
    steps = Steps(NONE, NONE, NONE, A, NONE, ack="each")
    steps.pull(5)
    steps.want()
    steps.handle(0)
    [ack] = steps.requested(Ack)
    steps.step(CallFailed(ack, OverloadedError("more acked ranges above the cursor")))
    assert steps.want(5) == [3]
    assert steps.want(5) == []
    steps.step(Tick(), after_ms=2_000)
    steps.ack(1)
    assert steps.want(5) == [1, 2, 4]


def test_sealed_partition_is_drained_when_all_is_acked():
    steps = Steps(A)
    steps.pull(1, sealed=True)
    assert not steps.requested(Pull)
    steps.ack(0)
    steps.want()
    steps.handle(0)
    assert steps.requested(Ack), "the last acks do not linger: its children wait"
    assert not steps.session.is_drained
    steps.ack(1)
    assert steps.session.is_drained


def test_session_whose_handler_runs_renews_the_pull_lock():
    steps = Steps(A, ttl_ms=9_000)
    steps.pull(1)
    steps.want()
    assert steps.ready.wait_until_ms == steps.now_ms + 3_000
    steps.step(Tick(), after_ms=3_000)
    assert steps.requested(Ack)[0].ranges == ()


def test_pull_lock_is_renewed_in_time_when_acks_linger_for_longer():
    steps = Steps(A, A, ttl_ms=9_000, ack_linger_ms=10_000)
    steps.pull(2)
    steps.want()
    steps.handle(0, wanted=1)
    steps.step(Tick(), after_ms=3_000)
    assert steps.requested(Ack)[0].ranges == ((0, 1),)


def test_paused_session_renews_the_pull_lock():
    steps = Steps(ttl_ms=9_000)
    steps.step(Paused(True))
    steps.step(Pulled([], 0, 0), after_ms=1_000)
    assert steps.ready.wait_until_ms == steps.now_ms + 2_000


def test_pull_that_waits_at_the_broker_keeps_the_lock_while_all_is_acked():
    steps = Steps(A, ttl_ms=9_000)
    assert steps.requested(Pull)
    assert steps.ready.wait_until_ms == steps.session.tenure.promise_due_ms(9_000)
    steps.step(Tick(), after_ms=20_000)
    assert not steps.requested(Ack)
    steps.pull(1)
    assert steps.requested(Ack)[0].ranges == (), "now a handler may take long"


def test_parked_keys_are_listed_before_anything_is_pulled():
    steps = Steps(A, acquired=Acquired(0, (), 1, False, (), 3))
    assert steps.requested(ListParked)
    assert not steps.requested(Pull)
    assert steps.want() == []


@pytest.mark.parametrize("count", [1, 3])
def test_worker_gets_no_more_than_it_takes(count):
    steps = Steps(*[NONE] * 5)
    steps.pull(5)
    assert steps.want(count) == list(range(count))
