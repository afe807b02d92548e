"""Two batches never share a key, and messages of a key run in order, whatever fails, splits or
pauses.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.batch import Batch
from keylane.consumer.handling.batch_lanes import BatchLanes
from keylane.protocol.message import Message
from support.handling import Client

KEYS = [b"", b"a", b"b", b"c", b"d"]
MAX = 4


class SideDelivery:
    """The delivery of suspects: they are in their client's queue, but acked here."""

    is_apart = False

    def __init__(self, client: Client) -> None:
        self.client = client


class LateBatch:
    """A batch that is opened later; the message at `parked`, if set, is parked then."""

    has_only_first_attempts = True

    def __init__(
        self,
        client: Client,
        messages: list[Message],
        park: Callable[[Message], None] = lambda _message: None,
        parked: int = -1,
    ) -> None:
        self.client, self.count = client, len(messages)
        self.opened = False
        self._messages, self._park, self._parked = messages, park, parked

    def messages(self) -> list[Message]:
        assert not self.opened
        self.opened = True
        for message in self._messages[self._parked : self._parked + 1]:
            self._park(message)
        return [message for at, message in enumerate(self._messages) if at != self._parked]


class BatchLanesMachine(RuleBasedStateMachine):
    """Takes, ends, fails and halves batches of two partitions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = BatchLanes(max_records=MAX)
        self.clients = [Client(0), Client(1)]
        self.careful = [SideDelivery(client) for client in self.clients]
        self.put_count = [0, 0]
        self.stored: list[list[LateBatch]] = [[], []]
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
        assume(all(batch.opened for batch in self.stored[partition]))  # they are older
        start = self.put_count[partition]
        self.put_count[partition] += len(keys)
        own = [key and key + b"%d" % partition for key in keys]
        messages = self.clients[partition].messages(*own, start=start)
        if careful:
            for message in messages:
                message.delivery = self.careful[partition]
        self.lanes.put(messages)

    @rule(
        partition=st.integers(0, 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=9),
        parked=st.integers(0, 9),
    )
    def put_batch(self, partition: int, keys: list[bytes], parked: int) -> None:
        """Put a batch of which one message is parked when it is opened."""
        start = self.put_count[partition]
        self.put_count[partition] += len(keys)
        own = [key and key + b"%d" % partition for key in keys]
        messages = self.clients[partition].messages(*own, start=start)
        batch = LateBatch(self.clients[partition], messages, self.park, parked)
        self.stored[partition].append(batch)
        self.lanes.put_batch(batch)

    def park(self, _message: Message) -> None:
        self.count += 1

    @rule()
    def take(self) -> None:
        batch = self.lanes.take()
        if batch is None:
            assert not self.lanes.arrivals
            return
        assert 1 <= len(batch) <= MAX
        assert len({message.partition_id for message in batch.messages}) == 1
        offsets = [message.offset for message in batch.messages]
        assert offsets == sorted(set(offsets))
        assert batch.keys == {message.key for message in batch.messages} - {b""}
        plain = all(message.delivery is message.delivery.client for message in batch.messages)
        assert plain or batch.acks_per_delivery
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
        self.lanes.put_due([batch])
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
        """Check that nothing is left when all running batches end and all failed ones are
        retried.
        """
        for partition in (0, 1):
            self.lanes.resume(partition)
        for _ in range(1_000):
            if self.failed:
                self.lanes.put_due([self.failed.pop()])
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
    lanes = BatchLanes(max_records=3, lingers=True)
    client = Client(1)
    number = lanes.put(client.messages(b"a", b"b"))
    assert number
    assert not lanes.arrivals
    assert lanes.take() is None
    lanes.end_linger(1, number - 1)
    assert lanes.take() is None, "the end of an earlier wait"
    lanes.end_linger(1, number)
    assert len(lanes.take()) == 2
    lanes.put(client.messages(b"c", b"d", b"e", start=2))
    assert len(lanes.take()) == 3, "it is full at once"


def test_rest_of_a_full_batch_waits_no_longer_than_others():
    """Its wait began when it was put; a message that arrives after the batch has a separate
    wait.
    """
    lanes = BatchLanes(max_records=3, lingers=True)
    client = Client(1)
    number = lanes.put(client.messages(b"a", b"b", b"c", b"d"))
    assert number
    assert len(lanes.take()) == 3
    assert lanes.take() is None
    assert lanes.end_linger(1, number) == 0
    assert len(lanes.take()) == 1
    number = lanes.put(client.messages(b"e", b"f", b"g", start=4))
    assert len(lanes.take()) == 3
    assert lanes.put(client.messages(b"h", start=7)) == 0, "the wait of the full batch goes on"
    number = lanes.end_linger(1, number)
    assert number, "all that it was for is gone"
    assert lanes.take() is None
    lanes.end_linger(1, number)
    assert len(lanes.take()) == 1


def test_batch_is_opened_when_less_than_a_batch_is_ready():
    lanes = BatchLanes(max_records=2)
    client = Client(1)
    stored = [LateBatch(client, client.messages(b"a", b"b", b"c", start=3 * at)) for at in range(3)]
    for batch in stored:
        lanes.put_batch(batch)
    assert len(lanes) == 9
    assert not stored[0].opened
    taken = [lanes.take().messages for _ in range(2)]
    assert [message.offset for batch in taken for message in batch] == [0, 1, 2]
    assert [batch.opened for batch in stored] == [True, True, False], "a key was busy"
    assert lanes.drop_batches(client) == 3
    assert lanes.drop(1, client.has_handed_out) == (3, [])
    assert lanes.take() is None
    assert len(lanes) == 0


def test_keys_of_a_batch_that_runs_alone_are_noted_when_others_are_taken():
    lanes = BatchLanes(max_records=1)
    client = Client(1)
    lanes.put(client.messages(b"a", b"a", b"b"))
    first = lanes.take()
    assert lanes.take() is None, "its key is busy, and a batch's worth waits for it"
    lanes.finish(first.key)
    second = lanes.take()
    assert [message.offset for message in second.messages] == [1]
    assert [message.offset for message in lanes.take().messages] == [2]
    assert lanes.take() is None


def test_messages_of_a_freed_key_are_in_their_place_of_a_batch():
    """They arrive after later ones, but a batch acks its messages in offset order."""
    lanes = BatchLanes(max_records=4)
    client = Client(1)
    lanes.put(client.messages(b"a", b"b", start=5))
    lanes.put(client.messages(b"freed", start=2))
    lanes.put(client.messages(b"c", start=7))
    assert [message.offset for message in lanes.take().messages] == [2, 5, 6, 7]


def test_batch_is_gone_when_it_ended():
    """It is freed without the garbage collector, which would keep the messages of thousands of
    batches.
    """
    lanes = BatchLanes(max_records=2)
    client = Client(1)
    lanes.put(client.messages(b"a", b"b"))
    batch = lanes.take()
    lanes.finish(batch.key)
    assert [holder for holder in gc.get_referrers(batch) if not inspect.isframe(holder)] == []


def test_failed_batch_holds_back_no_other_key():
    """Other keys proceed however many messages wait for the failed batch."""
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
    count, due = lanes.drop(1, client.has_handed_out)
    assert (count, due) == (1, [])
    lanes.finish(running.key)
    assert [message.key for message in lanes.take().messages] == [b"x"]
    assert lanes.take() is None


def test_messages_of_a_shared_group_have_no_order():
    lanes = BatchLanes(max_records=2, ordered=False)
    lanes.put(Client(1).messages(b"a", b"a", b"a", b"a"))
    assert lanes.take() is not None
    assert lanes.take() is not None


def test_batch_is_a_sixteenth_when_its_first_message_failed_under_earlier_owners():
    """Otherwise a batch that ends its consumer every time would always be delivered whole."""
    lanes = BatchLanes(max_records=64)
    client = Client(1)
    sizes = []
    for attempt in (2, 3, 4):
        messages = client.messages(*(b"k%d" % number for number in range(64)))
        for message in messages:
            message.attempt = attempt
        lanes.put(messages)
        batch = lanes.take()
        sizes.append(len(batch))
        lanes.finish(batch.key)
        lanes.drop(1, lambda _message: True)
    assert sizes == [64, 4, 1]


def test_queue_goes_with_its_partition_when_messages_are_held_behind_a_busy_key():
    lanes = BatchLanes(max_records=2)
    lanes.put(Client(1).messages(*[b"k"] * 4))
    batch = lanes.take()
    assert lanes.take() is None  # the others wait for the key
    assert lanes.drop(1, lambda _message: True) == (2, [])
    lanes.finish(batch.key)
    assert lanes.take() is None
    assert not lanes._queues
