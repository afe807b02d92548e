"""Lanes: order per key, many keys at once."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.lanes import Lanes
from keylane.protocol.message import Message


def message(key: bytes, offset: int, partition_id: int = 1) -> Message:
    return Message("s", key, b"", offset, partition_id, 0)


def test_keys_do_not_wait_for_each_other():
    """While one key's handler runs, messages of other keys run."""
    lanes = Lanes()
    lanes.put([message(b"a", 0), message(b"a", 1), message(b"b", 2)])
    assert lanes.take().offset == 0
    assert lanes.take().offset == 2
    assert lanes.take() is None
    assert lanes.finish(b"a").offset == 1
    assert lanes.finish(b"a") is None


def test_without_a_key_nothing_waits():
    """Messages without a key have no order."""
    lanes = Lanes()
    lanes.put([message(b"", 0), message(b"", 1)])
    assert [lanes.take().offset, lanes.take().offset] == [0, 1]
    assert lanes.finish(b"") is None


def test_a_dropped_partition_leaves_the_others():
    """What waits of a partition that is handed over is forgotten, in the queue and in the lanes."""
    lanes = Lanes()
    lanes.put([message(b"a", 0), message(b"a", 1), message(b"a", 2), message(b"b", 3, 2)])
    lanes.take()
    assert lanes.take().offset == 3
    assert lanes.drop(1) == 2
    assert lanes.finish(b"a") is None
    assert len(lanes) == 0


class LanesMachine(RuleBasedStateMachine):
    """Against a plain list: at most one of a key runs, and in order."""

    def __init__(self):
        super().__init__()
        self.lanes = Lanes()
        self.offset = 0
        self.put_keys = {}
        self.taken_keys = {}
        self.running = {}

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
            assert taken.order_key not in self.running
            self.running[taken.order_key] = taken.offset
            self.taken_keys.setdefault(taken.order_key, []).append(taken.offset)

    @rule()
    def take(self):
        self.began(self.lanes.take())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[key]
        self.began(self.lanes.finish(key))

    @invariant()
    def in_order(self):
        for key, taken in self.taken_keys.items():
            assert taken == self.put_keys[key][: len(taken)]

    @invariant()
    def nothing_lost(self):
        taken = sum(map(len, self.taken_keys.values()))
        assert len(self.lanes) == self.offset - taken


TestLanesMachine = LanesMachine.TestCase
