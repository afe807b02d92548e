"""Batches never have a key together, and messages of a key run in their order, whatever fails, splits and pauses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.batch import Batch
from keylane.consumer.handling.batch_lanes import BatchLanes
from support.handling import Client

KEYS = [b"", b"a", b"b", b"c", b"d"]
MAX = 4


class SideDelivery:
    """As of messages that may have ended a process: they are of their client's queue, and acked here."""

    is_apart = False

    def __init__(self, client: Client) -> None:
        self.client = client


class BatchLanesMachine(RuleBasedStateMachine):
    """Workers take, end, fail and halve batches of two partitions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = BatchLanes(max_records=MAX)
        self.clients = [Client(0), Client(1)]
        self.careful = [SideDelivery(client) for client in self.clients]
        self.put_count = [0, 0]
        self.running: list[Batch] = []
        self.failed: list[Batch] = []
        self.ended: dict[bytes, list[tuple[int, int]]] = {}
        self.count = 0

    @rule(
        partition=st.integers(0, 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=9),
        careful=st.booleans(),
    )
    def put(self, partition: int, keys: list[bytes], careful: bool) -> None:
        start = self.put_count[partition]
        self.put_count[partition] += len(keys)
        own = [key and key + b"%d" % partition for key in keys]
        messages = self.clients[partition].messages(*own, start=start)
        if careful:
            for message in messages:
                message.delivery = self.careful[partition]
        self.lanes.put(messages)

    @rule()
    def take(self) -> None:
        batch = self.lanes.take()
        if batch is None:
            assert not self.lanes.arrived
            return
        assert 1 <= len(batch) <= MAX
        assert len({message.partition_id for message in batch.messages}) == 1
        offsets = [message.offset for message in batch.messages]
        assert offsets == sorted(set(offsets))
        assert batch.keys == {message.key for message in batch.messages} - {b""}
        plain = all(message.delivery is message.delivery.client for message in batch.messages)
        assert plain or batch.acked_each
        for other in self.running + self.failed:
            assert not other.keys & batch.keys
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for message in batch.messages:
            self.ended.setdefault(message.key, []).append((message.partition_id, message.offset))
            self.count += 1
        self.lanes.finish(batch.key)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), halves=st.booleans())
    def fail(self, data: st.DataObject, halves: bool) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        other = self.lanes.split(batch) if halves else None
        for each in [batch, *([other] if other else [])]:
            self.lanes.fail(each)
            self.failed.append(each)

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def try_again(self, data: st.DataObject) -> None:
        batch = self.failed.pop(data.draw(st.integers(0, len(self.failed) - 1)))
        self.lanes.put_first([batch])
        assert self.lanes.take() is batch
        self.running.append(batch)

    @rule(partition=st.integers(0, 1))
    def pause(self, partition: int) -> None:
        self.lanes.pause(partition)

    @rule(partition=st.integers(0, 1))
    def resume(self, partition: int) -> None:
        self.lanes.resume(partition)

    @rule()
    def drain(self) -> None:
        """Nothing is left behind when all that runs ends and all that failed is tried again."""
        for partition in (0, 1):
            self.lanes.resume(partition)
        for _ in range(1_000):
            if self.failed:
                self.lanes.put_first([self.failed.pop()])
            batch = self.running.pop() if self.running else self.lanes.take()
            if batch is None:
                break
            self.running.append(batch)
            for message in self.running.pop().messages:
                place = message.partition_id, message.offset
                self.ended.setdefault(message.key, []).append(place)
                self.count += 1
            self.lanes.finish(batch.key)
        assert self.count == sum(self.put_count)
        assert len(self.lanes) == 0

    @invariant()
    def order_of_each_key_is_kept(self) -> None:
        for key, places in self.ended.items():
            if key:
                assert places == sorted(places)


TestBatchLanes = BatchLanesMachine.TestCase


def test_batch_waits_until_it_is_full_or_ripe():
    lanes = BatchLanes(max_records=3, waits=True)
    client = Client(1)
    number = lanes.put(client.messages(b"a", b"b"))
    assert number
    assert not lanes.arrived
    assert lanes.take() is None
    lanes.ripen(client.messages(b"a")[0], number - 1)
    assert lanes.take() is None, "the end of an earlier wait"
    lanes.ripen(client.messages(b"a")[0], number)
    assert len(lanes.take()) == 2
    assert lanes.put(client.messages(b"c", b"d", b"e", start=2)) == 0, "it is full at once"
    assert len(lanes.take()) == 3


def test_failed_batch_holds_back_no_other_key():
    """However many messages wait for it."""
    lanes = BatchLanes(max_records=2)
    client = Client(1)
    lanes.put(client.messages(*[b"bad"] * 50, b"good"))
    failed = lanes.take()
    assert lanes.take() is None, "a batch's worth waits for the running one"
    lanes.fail(failed)
    good = lanes.take()
    assert [message.key for message in good.messages] == [b"good"]
    lanes.finish(failed.key)
    assert [message.offset for message in lanes.take().messages] == [2, 3]


def test_dropped_partition_leaves_nothing_behind():
    lanes = BatchLanes(max_records=2)
    client, other = Client(1), Client(2)
    lanes.put(client.messages(b"a", b"a", b"a", b"b"))
    running = lanes.take()
    assert lanes.take() is not None
    lanes.put(other.messages(b"x"))
    count, due = lanes.drop(1, client.is_of)
    assert (count, due) == (1, [])
    lanes.finish(running.key)
    assert [message.key for message in lanes.take().messages] == [b"x"]
    assert lanes.take() is None


def test_messages_of_a_shared_group_have_no_order():
    lanes = BatchLanes(max_records=2, ordered=False)
    lanes.put(Client(1).messages(b"a", b"a", b"a", b"a"))
    assert lanes.take() is not None
    assert lanes.take() is not None
