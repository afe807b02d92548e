"""Lanes: order per key, many keys at the same time."""

from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.lanes import Lanes
from keylane.protocol.message import Message


def message(key: bytes, offset: int, partition_id: int = 1) -> Message:
    delivery: Any = SimpleNamespace(leased_id=partition_id)
    return Message("s", key, b"", offset, partition_id, 0, delivery=delivery)


def test_keys_do_not_wait_for_each_other():
    """While one key's handler runs, messages of other keys run."""
    lanes = Lanes()
    lanes.put([message(b"a", 0), message(b"a", 1), message(b"b", 2)])
    assert lanes.take().offset == 0
    assert lanes.take().offset == 2
    assert lanes.take() is None
    assert lanes.finish(b"a").offset == 1
    assert lanes.finish(b"a") is None


def test_messages_without_a_key_never_wait():
    """Messages without a key have no order."""
    lanes = Lanes()
    lanes.put([message(b"", 0), message(b"", 1)])
    assert [lanes.take().offset, lanes.take().offset] == [0, 1]
    assert lanes.finish(b"") is None


def test_messages_without_a_key_wait_for_the_refused_acks_of_their_partition():
    """Other keys and partitions proceed; messages that are handed over no longer wait."""
    lanes = Lanes()
    refused = [message(b"", 0), message(b"", 1)]
    lanes.put([*refused, message(b"", 2), message(b"a", 3), message(b"", 9, 2), message(b"", 4)])
    assert [lanes.take(), lanes.take()] == refused
    for each in refused:
        lanes.hold_for_ack(each)
    assert [lanes.take().offset, lanes.take().offset, lanes.take()] == [3, 9, None]
    assert len(lanes) == 2
    lanes.release(refused[0])
    assert lanes.take() is None
    lanes.release(refused[1])
    assert [lanes.take().offset, lanes.take().offset] == [2, 4]
    lanes.hold_for_ack(message(b"", 2))
    lanes.put([message(b"", 5)])
    assert lanes.take() is None
    assert [each.offset for each in lanes.drop(1, lambda each: each.partition_id == 1)] == [5]


def test_drop_leaves_other_partitions():
    """Waiting messages of a partition that is handed over are dropped from the queue and
    the lanes.
    """
    lanes = Lanes()
    lanes.put([message(b"a", 0), message(b"a", 1), message(b"a", 2), message(b"b", 3, 2)])
    lanes.take()
    assert lanes.take().offset == 3
    assert [
        message.offset for message in lanes.drop(1, lambda message: message.partition_id == 1)
    ] == [1, 2]
    assert lanes.finish(b"a") is None
    assert len(lanes) == 0


def test_failed_message_blocks_its_lane_until_it_is_finished():
    """Later messages of its key wait in the queue or the lane; its retry runs before arrived
    messages.
    """
    lanes = Lanes()
    failed, later, other = message(b"a", 0), message(b"a", 1), message(b"b", 2)
    lanes.put([failed, later])
    assert lanes.take() is failed
    assert lanes.take() is None
    lanes.put([message(b"a", 3), other])
    failed.attempt = 2
    lanes.put_due([failed])
    assert lanes.take() is failed
    assert lanes.take() is other
    assert lanes.take() is None
    assert lanes.finish(b"a") is later


def test_collect_takes_what_waits_behind_a_failed_message_when_its_partition_is_paused():
    """After `resume` no message of the parked key runs; other keys and partitions are not
    affected.
    """
    lanes = Lanes()
    failed = message(b"a", 0)
    lanes.put([failed, message(b"a", 1), message(b"b", 2)])
    lanes.take()
    lanes.pause(1)
    lanes.put([message(b"a", 3), message(b"a", 9, 2)])
    behind = lanes.collect(failed, lambda each: each.partition_id == 1)
    assert [each.offset for each in behind] == [1, 3]
    lanes.resume(1)
    assert [lanes.take().offset, lanes.take().offset, lanes.take()] == [2, 9, None]


def test_dropped_try_frees_its_lane_for_other_partitions():
    """Messages of another partition that follow it in the lane run in order."""
    for waits_elsewhere in (False, True):
        lanes = Lanes()
        failed = message(b"a", 0)
        lanes.put([failed, message(b"a", 1), message(b"a", 7, 2), message(b"a", 8, 2)])
        lanes.take()
        lanes.take()
        failed.attempt = 2
        if waits_elsewhere:
            assert [
                message.offset
                for message in lanes.drop(1, lambda message: message.partition_id == 1)
            ] == [1]
            lanes.release(failed)
        else:
            lanes.put_due([failed])
            assert [
                message.offset
                for message in lanes.drop(1, lambda message: message.partition_id == 1)
            ] == [0, 1]
        assert lanes.take().offset == 7
        assert lanes.take() is None
        assert lanes.finish(b"a").offset == 8


class LanesMachine(RuleBasedStateMachine):
    """Compares lanes with a list: at most one message of a key runs, and in order."""

    def __init__(self):
        super().__init__()
        self.lanes = Lanes()
        self.offset = 0
        self.put_keys = {}
        self.taken_keys = {}
        self.running = {}
        self.failed = {}
        self.due = []

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=5))
    def put(self, keys):
        messages = []
        for key in keys:
            messages.append(message(key, self.offset))
            self.put_keys.setdefault(key, []).append(self.offset)
            self.offset += 1
        self.lanes.put(messages)

    def began(self, taken):
        if taken is not None:
            assert taken.key not in self.running
            if taken in self.due:
                self.due.remove(taken)
                self.running[taken.key] = taken
                return
            assert taken.key not in self.failed
            assert all(message.key != taken.key for message in self.due)
            self.running[taken.key] = taken
            self.taken_keys.setdefault(taken.key, []).append(taken.offset)

    @rule()
    def take(self):
        self.began(self.lanes.take())

    @precondition(lambda self: self.lanes.arrivals and self.lanes.unregistered is None)
    @rule()
    def take_unregistered(self):
        """Take a message without registering it, as workers do when no other was taken that way."""
        if self.lanes.arrivals[0].key not in self.lanes.busy_lanes:
            self.lanes.unregistered = self.lanes.arrivals.popleft()
            self.began(self.lanes.unregistered)

    @precondition(lambda self: self.lanes.unregistered is not None)
    @rule()
    def finish_alone(self):
        """Finish it, as workers do if nothing else was taken since."""
        del self.running[self.lanes.unregistered.key]
        self.lanes.unregistered = None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[key]
        self.began(self.lanes.finish(key))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.failed[key] = self.running.pop(key)
        self.lanes.register_running()

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def try_again(self, data):
        key = data.draw(st.sampled_from(sorted(self.failed)))
        failed = self.failed.pop(key)
        failed.attempt += 1
        self.due.append(failed)
        self.lanes.put_due([failed])

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def give_up(self, data):
        key = data.draw(st.sampled_from(sorted(self.failed)))
        self.lanes.release(self.failed.pop(key))

    @invariant()
    def in_order(self):
        for key, taken in self.taken_keys.items():
            assert taken == self.put_keys[key][: len(taken)]

    @invariant()
    def nothing_lost(self):
        taken = sum(map(len, self.taken_keys.values()))
        assert len(self.lanes) == self.offset - taken + len(self.due)


TestLanesMachine = LanesMachine.TestCase


class SuspectsDelivery:
    has_priority = True
    leased_id = 2


def test_suspect_is_taken_before_what_has_arrived():
    """All other suspects wait for it, and thousands of messages of other partitions may; none is
    taken twice.
    """
    lanes = Lanes()
    lanes.put([message(b"a", 0), message(b"b", 1), message(b"c", 2)])
    assert lanes.take().offset == 0
    suspect = message(b"d", 7, 2)
    suspect.delivery = SuspectsDelivery()
    lanes.put([suspect])
    assert [lanes.take().offset for _ in range(3)] == [7, 1, 2]
    assert lanes.take() is None


def test_suspect_waits_when_its_partition_is_paused():
    lanes = Lanes()
    lanes.pause(2)
    suspect = message(b"d", 7, 2)
    suspect.delivery = SuspectsDelivery()
    lanes.put([suspect])
    assert lanes.take() is None
    lanes.resume(2)
    assert lanes.take() is suspect


class Pulling:
    reports_runs = True


class WaitingBatch:
    """An unopened batch with one message for each offset."""

    has_only_first_attempts = True

    def __init__(self, client: Pulling, partition_id: int, *offsets: int) -> None:
        self.client, self.count = client, len(offsets)
        self._messages = [message(b"k%d" % offset, offset, partition_id) for offset in offsets]

    def messages(self) -> list[Message]:
        return self._messages


def test_partitions_take_turns_when_batches_of_several_wait():
    """Otherwise the last one would wait for everything that was pulled from the others."""
    lanes, first, second = Lanes(), Pulling(), Pulling()
    for batch in (
        WaitingBatch(first, 1, 0, 1),
        WaitingBatch(first, 1, 2),
        WaitingBatch(first, 1, 3),
    ):
        lanes.put_batch(batch)
    for batch in (WaitingBatch(second, 2, 10), WaitingBatch(second, 2, 11)):
        lanes.put_batch(batch)
    assert len(lanes) == 6
    taken = [lanes.take().offset for _ in range(4)]
    assert taken == [0, 1, 10, 2]
    assert lanes.drop_batches(second) == 1
    assert [lanes.take().offset, lanes.take()] == [3, None]


def test_run_has_small_batches_of_one_partition_when_those_of_others_wait_between():
    lanes, first, second = Lanes(), Pulling(), Pulling()
    for batch in (
        WaitingBatch(first, 1, 0),
        WaitingBatch(second, 2, 10),
        WaitingBatch(first, 1, 1),
    ):
        lanes.put_batch(batch)
    run = lanes.begin_run(100, None)
    assert [each.offset for each in run.messages] == [0, 1]
    lanes.end_run(run, 2)
    assert [each.offset for each in lanes.begin_run(100, None).messages] == [10]
