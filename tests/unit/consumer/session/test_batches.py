"""Batches of a session: the promises of docs/CONSUMING.md about `batch_handler`, each as a story."""

import gc
import inspect
import random

import pytest

from keylane.consumer.session.events import (
    BatchFailed,
    CallFailed,
    CancelHandlers,
    FailureOutcome,
    FlightsPulled,
    KeysListed,
    LeaseGranted,
    MessageHangs,
    MessagesHandled,
    MessagesReturned,
    OperatorChanged,
    ReadWindow,
    Ready,
    SendChanges,
    Stopped,
    Tick,
    TurnTaken,
    WindowRead,
    WorkWanted,
)
from keylane.consumer.session.failure import Treatment
from keylane.consumer.session.lanes import BatchFill, MessageBatch
from keylane.consumer.session.state import PartitionSession, Taking
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import UnreachableError
from keylane.protocol.frames import Ack, Acquired, ParkedChanged, Pull, Release
from keylane.protocol.message import Message
from keylane.protocol.parked import Park, ParkedKeyRow, ParkState, Unpark, hanging_failure
from support.session.partition_model import BatchModel
from support.session.steps import FAILURE, LEASE, LEASE_MS, Steps, offsets_of

A, B, C, NONE = b"a", b"b", b"c", b""
PAUSE_MS = 100


class BatchSteps(Steps):
    """A session whose handler gets batches."""

    def __init__(self, *keys: bytes, acquired: Acquired | None = None, **settings: object) -> None:
        super().__init__(*keys)
        settings.setdefault("max_records", 4)
        settings.setdefault("handler_backoff", Backoff(first_ms=PAUSE_MS, max_ms=PAUSE_MS))
        self.session = PartitionSession(
            LEASE, ConsumerSettings(**settings), random.Random(1), taking=Taking(in_batches=True)
        )
        self.step(LeaseGranted(self.now_ms + LEASE_MS))
        self.step(acquired or Acquired(0, (), len(keys), False))

    def take(self, *, after_ms: int = 0) -> list[Message]:
        """A worker asks for a batch."""
        return self.step(WorkWanted(1), after_ms=after_ms).hand_out

    def handled(self, batch: list[Message], *, wanted: int = 0) -> list[int]:
        return offsets_of(self.step(MessagesHandled(batch, wanted)).hand_out)

    def failed(self, batch: list[Message], **given: object) -> Ready:
        return self.step(BatchFailed(batch, FAILURE, **given))

    def parks(self) -> list[Park]:
        sent = self.requested(SendChanges)
        return [each for one in sent for each in one.changes if isinstance(each, Park)]

    def answer_acks(self, cursor: int = 0) -> list[int]:
        """The broker answers all acks; returns what that hands out."""
        self.step(Tick(), after_ms=20)
        begun: list[int] = []
        while self.session.acks.sent is not None:
            begun += offsets_of(self.ack(cursor).hand_out)
        return begun

    def next_ack(self) -> Ack:
        self.step(Tick(), after_ms=20)
        [ack] = self.requested(Ack)
        return ack


def taken(steps: BatchSteps, count: int = 9, **given: int) -> list[list[Message]]:
    """All batches that workers get now, one after another."""
    batches = []
    while len(batches) < count and (batch := steps.take(**given)):
        batches.append(batch)
    return batches


def test_batch_has_up_to_max_records_messages():
    steps = BatchSteps(*[A, B, C] * 3)
    steps.pull(2, 3, 4)
    batch = steps.take()
    assert offsets_of(batch) == [0, 1, 2, 3]
    assert steps.ready.has_more
    assert steps.handled(batch, wanted=1) == [4, 5, 6, 7]


def test_batches_that_were_pulled_together_are_handed_out_as_one():
    steps = BatchSteps(*[NONE] * 4)
    steps.pull(2, 2)
    assert offsets_of(steps.take()) == [0, 1, 2, 3]


def test_batch_may_have_several_messages_of_a_key_in_order():
    steps = BatchSteps(A, A, B, A)
    steps.pull(4)
    assert offsets_of(steps.take()) == [0, 1, 2, 3]


def test_batch_is_acked_as_a_whole():
    steps = BatchSteps(A, B, C)
    steps.pull(3)
    steps.handled(steps.take())
    assert steps.next_ack().ranges == ((0, 3),)
    assert steps.session.intake.held == 0


def test_batches_beside_each_other_have_no_key_in_common():
    steps = BatchSteps(A, A, B, A, A, C, NONE, B)
    steps.pull(8)
    first, second = steps.take(), steps.take()
    assert offsets_of(second) == [5, 6]
    assert steps.handled(first, wanted=1) == [4, 7]


def test_keys_of_a_batch_that_is_alone_are_not_looked_at():
    steps = BatchSteps(A, B, C)
    steps.pull(3)
    batch = steps.take()
    [known] = steps.session.lanes.batches.in_hand.values()
    assert known.keys is None
    steps.handled(batch)
    assert not steps.session.lanes.busy


def test_no_batch_begins_while_a_batch_of_messages_waits_for_those_in_hand():
    steps = BatchSteps(*[A] * 8, B, buffer_messages=100)
    steps.pull(9)
    first = steps.take()
    assert steps.take() == [], "all of the next four wait for the key"
    assert not steps.ready.has_more
    assert steps.handled(first, wanted=1) == [4, 5, 6, 7]
    assert offsets_of(steps.take()) == [8]


# ── waiting for a full batch ──────────────────────────────────────────────────────────────────────
def test_batch_begins_when_it_is_full():
    steps = BatchSteps(*[A] * 5, max_wait_ms=200)
    steps.pull(3)
    assert not steps.ready.has_more
    assert steps.take() == []
    steps.pull(2)
    assert steps.ready.has_more
    assert offsets_of(steps.take()) == [0, 1, 2, 3]


def test_smaller_batch_begins_when_its_messages_have_waited_long_enough():
    steps = BatchSteps(A, B, max_wait_ms=200)
    steps.pull(2)
    assert steps.ready.wait_until_ms == steps.now_ms + 200
    steps.step(Tick(), after_ms=200)
    assert steps.ready.has_more
    assert offsets_of(steps.take()) == [0, 1]


def test_later_messages_have_a_wait_of_their_own():
    fill = BatchFill(200)
    fill.arrive(2, 1_000)
    fill.arrive(3, 1_150)
    fill.expire(3, 1_200)
    assert (fill.is_over, fill.until_ms) == (False, 1_400)
    fill.expire(3, 1_400)
    assert fill.is_over


def test_rest_of_a_full_batch_waits_no_longer_than_others():
    """Its wait began when it came; what comes after that has a wait of its own."""
    steps = BatchSteps(*[NONE] * 8, max_records=3, max_wait_ms=200)
    steps.pull(4)
    assert offsets_of(steps.take()) == [0, 1, 2]
    assert steps.take() == []
    steps.step(Tick(), after_ms=150)
    steps.pull(1)
    steps.step(Tick(), after_ms=50)
    assert offsets_of(steps.take()) == [3, 4], "what has come meanwhile goes with it"
    steps.pull(1)
    steps.step(Tick(), after_ms=199)
    assert steps.take() == []
    steps.step(Tick(), after_ms=1)
    assert offsets_of(steps.take()) == [5]


def test_stored_batch_is_opened_when_less_than_a_batch_is_ready():
    steps = BatchSteps(*[A, B, C] * 3, max_records=2)
    stored = steps.pull(3, 3, 3)
    first = steps.take()
    assert [batch.opened for batch in stored] == [1, 0, 0]
    assert (offsets_of(first), offsets_of(steps.take())) == ([0, 1], [2])
    assert steps.take() == []
    assert stored[2].opened == 0, "a batch of messages waits for their keys"
    steps.step(Stopped(500))
    assert steps.session.intake.held == 3, "what no worker has is forgotten"
    steps.handled(first)
    assert steps.take() == []


def test_messages_of_a_freed_key_come_before_others_in_the_order_of_their_offsets():
    """They are in no batch with later ones that were opened before them."""
    acquired = Acquired(0, (), 4, False, (), 1)
    steps = BatchSteps(C, A, C, B, acquired=acquired, on_failure="park")
    steps.step(KeysListed(1, [ParkedKeyRow(C, ParkState.REDRIVING, 0)]))
    steps.pull(3)
    first = steps.take()
    assert offsets_of(first) == [1], "the key is being freed"
    steps.pull(1)
    steps.step(ParkedChanged(1))
    assert [offsets_of(batch) for batch in taken(steps)] == [[0, 2], [3]]


def test_failed_batch_holds_back_no_other_key_however_many_messages_wait_for_it():
    steps = BatchSteps(*[A] * 50, B, max_records=2, buffer_messages=100)
    steps.pull(51)
    failed = steps.take()
    assert steps.take() == [], "a batch of messages waits for the running one"
    steps.failed(failed)
    good = steps.take()
    assert offsets_of(good) == [50]
    steps.handled(good)
    again = steps.take(after_ms=PAUSE_MS)
    assert steps.handled(again, wanted=1) == [2, 3]


def test_batch_is_gone_when_it_has_ended():
    """Without the garbage collector, which would keep the messages of thousands of batches."""
    steps = BatchSteps(A, B)
    steps.pull(2)
    steps.take()
    [batch] = steps.session.lanes.batches.in_hand.values()
    steps.handled(list(batch.messages))
    holders = [each for each in gc.get_referrers(batch) if not inspect.isframe(each)]
    assert holders == []


def test_messages_that_wait_for_a_key_go_with_their_partition():
    steps = BatchSteps(*[A] * 4, max_records=2)
    steps.pull(4)
    batch = steps.take()
    assert steps.take() == []
    steps.step(Stopped(500))
    assert steps.session.intake.held == 2
    steps.handled(batch)
    assert steps.session.intake.held == 0
    assert not steps.session.lanes.busy


def test_messages_that_waited_for_a_key_wait_for_no_full_batch():
    steps = BatchSteps(*[A] * 5, max_wait_ms=200)
    steps.pull(5)
    first = steps.take()
    steps.step(Tick(), after_ms=200)
    assert steps.take() == []
    assert steps.handled(first, wanted=1) == [4]


# ── failed batches ────────────────────────────────────────────────────────────────────────────────
def test_failed_batch_is_tried_again_as_a_whole_before_later_messages_of_its_keys():
    steps = BatchSteps(A, B, A, C, A, NONE)
    steps.pull(6)
    steps.failed(steps.take())
    assert offsets_of(steps.take()) == [5], "other keys go on"
    again = steps.take(after_ms=PAUSE_MS)
    assert offsets_of(again) == [0, 1, 2, 3]
    assert {message.attempt for message in again} == {2}
    assert steps.handled(again, wanted=1) == [4]


def test_each_message_of_a_failed_batch_is_reported_with_its_own_tries():
    steps = BatchSteps(A, B, acquired=Acquired(0, (), 2, False, ((1, 1),)))
    steps.pull(2)
    steps.failed(steps.take())
    ack = steps.next_ack()
    assert ack.failed == ((0, 1), (1, 2))
    assert (ack.failing.offset, ack.failing.attempts) == (0, 1)


def test_batch_that_fails_again_is_tried_in_two_halves_by_key():
    steps = BatchSteps(A, B, A, C)
    steps.pull(4)
    steps.failed(steps.take())
    steps.failed(steps.take(after_ms=PAUSE_MS))
    halves = [offsets_of(steps.take(after_ms=PAUSE_MS)), offsets_of(steps.take())]
    assert sorted(halves) == [[0, 1, 2], [3]]


def test_newer_half_of_the_only_key_waits_for_the_older_one():
    steps = BatchSteps(*[A] * 5)
    steps.pull(5)
    steps.failed(steps.take())
    steps.failed(steps.take(after_ms=PAUSE_MS))
    half = steps.take(after_ms=PAUSE_MS)
    assert offsets_of(half) == [0, 1]
    assert steps.take(after_ms=PAUSE_MS) == []
    steps.handled(half)
    rest = steps.take()
    assert offsets_of(rest) == [2, 3, 4]
    assert [message.attempt for message in rest] == [2, 2, 1]


def test_bad_message_ends_up_alone_and_is_parked_with_those_that_wait_for_it():
    steps = BatchSteps(B, A, A, C, A, NONE, on_failure="park", tries_max=3)
    steps.pull(6)
    parks: list[Park] = []
    for _ in range(30):
        batch = steps.take(after_ms=PAUSE_MS)
        if 1 in offsets_of(batch):
            steps.failed(batch)
        elif batch:
            steps.handled(batch)
        parks += steps.parks()
    assert [(park.key, park.ranges) for park in parks] == [(A, ((1, 3), (4, 5)))]
    assert steps.session.intake.held == 0


def test_half_that_is_parked_with_its_key_is_named_no_more():
    steps = BatchSteps(A, A, on_failure="park", tries_max=3)
    steps.pull(2)
    for _ in range(3):
        steps.failed(steps.take(after_ms=PAUSE_MS))
    assert [park.ranges for park in steps.parks()] == [((0, 2),)]
    steps.answer_acks()
    assert not steps.session.acks.failing
    assert not steps.session.acks.tries


def test_batch_that_asks_for_another_try_stays_whole():
    steps = BatchSteps(A, B)
    steps.pull(2)
    for _ in range(4):
        batch = steps.take(after_ms=1_000)
        assert offsets_of(batch) == [0, 1]
        steps.failed(batch, asked_ms=0, is_asked=True)


def test_batch_that_asks_for_another_try_sets_each_message_aside_for_retry():
    steps = BatchSteps(A, A, B, on_failure="retry")
    steps.pull(3)
    steps.failed(steps.take(), asked_ms=500, is_asked=True)
    assert [(park.key, park.ranges) for park in steps.parks()] == [
        (1, ((0, 1),)),
        (1, ((1, 2),)),
        (1, ((2, 3),)),
    ]
    assert steps.session.intake.held == 0
    assert not steps.session.lanes.busy


@pytest.mark.parametrize(("failed", "size"), [(1, 64), (2, 4), (3, 1)])
def test_messages_that_failed_often_under_earlier_owners_are_in_smaller_batches(failed, size):
    """Otherwise a batch that ends its consumer each time would always be handed out whole."""
    tries = tuple((offset, failed) for offset in range(64))
    steps = BatchSteps(*[A] * 64, max_records=64, acquired=Acquired(0, (), 64, False, tries))
    steps.pull(64)
    assert offsets_of(steps.take()) == list(range(size))


def test_batch_whose_lease_ended_counts_its_try_for_the_next_owner():
    steps = BatchSteps(A, B)
    steps.pull(2)
    batch = steps.take()
    steps.step(Stopped(500))
    steps.failed(batch)
    assert steps.requested(Ack)[0].failed == ((0, 1), (1, 1))
    steps.ack()
    assert steps.requested(Release)


def test_returned_batch_is_handed_out_again_without_a_try():
    steps = BatchSteps(A, B, A)
    steps.pull(3)
    steps.step(MessagesReturned(steps.take()))
    again = steps.take()
    assert offsets_of(again) == [0, 1, 2]
    assert {message.attempt for message in again} == {1}


def test_hand_over_waits_for_the_batch():
    steps = BatchSteps(A, B)
    steps.pull(2)
    batch = steps.take()
    steps.step(Stopped(500))
    assert not steps.requested(Release)
    steps.step(Tick(), after_ms=500)
    assert steps.requested(CancelHandlers)
    steps.step(MessagesReturned(batch))
    assert steps.requested(Release)


def test_hanging_batch_is_named_by_its_first_message():
    steps = BatchSteps(A, B)
    steps.pull(2)
    batch = steps.take()
    failure = hanging_failure("it has not returned", client="till", at_ms=20_000, attempts=0)
    steps.step(MessageHangs(batch[0], failure, 10_000))
    failing = steps.next_ack().failing
    assert (failing.offset, failing.running_ms) == (0, 10_000)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_split_halves_messages(is_ordered):
    messages = [Message("s", key, b"", offset, 1, 0) for offset, key in enumerate((A, B, A, NONE))]
    batch = MessageBatch(messages, {A, B} if is_ordered else set())
    other = batch.split()
    expected = ([0, 1, 2], [3]) if is_ordered else ([0, 1], [2, 3])
    assert (offsets_of(batch.messages), offsets_of(other)) == expected


# ── ack modes ─────────────────────────────────────────────────────────────────────────────────────
def test_ack_each_holds_the_keys_until_all_acks_are_stored():
    steps = BatchSteps(A, B, A, C, B, NONE, ack="each")
    steps.pull(6)
    assert steps.handled(steps.take(), wanted=1) == [5]
    [ack] = steps.requested(Ack)
    assert ack.ranges == ((0, 4),)
    steps.step(CallFailed(ack, UnreachableError("no answer")))
    assert steps.take() == []
    steps.step(Tick(), after_ms=2_000)
    steps.ack(4)
    assert offsets_of(steps.take()) == [4]


def test_ack_before_hands_a_batch_out_when_all_its_acks_are_stored():
    steps = BatchSteps(A, A, B, C, A, ack="before")
    steps.pull(5)
    assert steps.take() == []
    assert steps.requested(Ack)[0].ranges == ((0, 4),)
    assert not steps.ready.has_more, "no further batch is acked meanwhile: it could be lost"
    batch = steps.ack(4).hand_out
    assert offsets_of(batch) == [0, 1, 2, 3]
    steps.handled(batch)
    assert steps.take() == []
    assert steps.requested(Ack)[0].ranges == ((4, 5),)


def test_batch_acked_before_is_lost_when_its_handler_fails():
    steps = BatchSteps(A, B, ack="before")
    steps.pull(2)
    steps.take()
    batch = steps.ack(2).hand_out
    steps.failed(batch)
    assert steps.ready.notes == (FailureOutcome(batch[0], Treatment.LOST),)
    assert steps.session.intake.held == 0
    assert not steps.session.lanes.busy


def test_pulls_stop_at_the_limit_while_batches_are_in_hand():
    steps = BatchSteps(*[NONE] * 8, buffer_messages=8)
    steps.pull(8)
    assert not steps.requested(Pull)
    first, second = steps.take(), steps.take()
    steps.handled(first)
    assert steps.requested(Pull)
    assert offsets_of(second) == [4, 5, 6, 7]


# ── redriven messages, and suspects ───────────────────────────────────────────────────────────────
def test_redriven_messages_are_in_batches_of_their_own():
    steps = BatchSteps(A, B, on_failure="park")
    steps.pull(2)
    steps.step(OperatorChanged(1))
    steps.step(KeysListed(1, [ParkedKeyRow(C, ParkState.REDRIVING, 2)]))
    [window] = steps.requested(ReadWindow)
    redriven = [Message("s", C, b"", offset, 4, 0) for offset in (7, 8)]
    steps.step(WindowRead(window.number, redriven))
    first, second = taken(steps)
    assert (offsets_of(first), offsets_of(second)) == ([7, 8], [0, 1])
    steps.handled(first)
    [sent] = steps.requested(SendChanges)
    assert sent.changes == (Unpark(C, 4, ((7, 8),)), Unpark(C, 4, ((8, 9),)))


def test_suspects_are_handed_out_one_by_one_whatever_fits_into_a_batch():
    acquired = Acquired(0, (), 3, False, suspects_upto=2)
    steps = BatchSteps(A, B, C, acquired=acquired)
    steps.pull(3)
    for offset in (0, 1):
        assert steps.take() == []
        steps.step(TurnTaken())
        batch = steps.ack(offset).hand_out
        assert offsets_of(batch) == [offset]
        steps.handled(batch)
        steps.ack(offset + 1)
    assert offsets_of(steps.take()) == [2]


def test_suspect_that_fails_is_tried_again_alone():
    steps = BatchSteps(A, A, acquired=Acquired(0, (), 2, False, suspects_upto=2))
    steps.pull(2)
    steps.take()
    steps.step(TurnTaken())
    steps.failed(steps.ack().hand_out)
    again = steps.take(after_ms=PAUSE_MS)
    assert [(message.offset, message.attempt) for message in again] == [(0, 2)]
    steps.handled(again)
    steps.answer_acks(1)
    assert steps.take() == []
    steps.step(TurnTaken())
    assert steps.answer_acks(1) == [1]


def test_batch_of_a_shared_group_holds_no_keys():
    steps = BatchSteps(A, A, A, A, A, consume_strategy="shared")
    batch = BatchModel(steps.keys, 0, 5)
    steps.step(FlightsPulled([batch], ((0, 5),), steps.now_ms, 0, 5))
    first, second = taken(steps)
    assert (offsets_of(first), offsets_of(second)) == ([0, 1, 2, 3], [4])
    steps.failed(first)
    steps.failed(steps.take(after_ms=PAUSE_MS))
    halves = [offsets_of(each) for each in taken(steps, after_ms=PAUSE_MS)]
    assert sorted(halves) == [[0, 1], [2, 3]]
    steps.answer_acks()
    steps.step(Tick(), after_ms=10_000)
    assert steps.requested(Ack)[0].held == ((0, 5),), "what handlers have is renewed"


def test_late_messages_leave_a_batch_that_waited():
    steps = BatchSteps(A, B, consume_strategy="shared", in_flight_ms=3_000)
    steps.step(FlightsPulled([BatchModel(steps.keys, 0, 2)], ((0, 2),), steps.now_ms, 0, 2))
    steps.failed(steps.take())
    assert steps.take(after_ms=2_000) == []
    assert steps.session.intake.held == 0
