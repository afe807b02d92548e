"""Both indexes against a list: every offset and time, after any flush, restart, truncation and
retention.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import ConsumeQueues
from keylane.protocol.control import TimeBound
from keylane.testing.machines.disk import SimDisk
from support.indexes import ListIndex, opener
from support.running.examples import examples

PARTITIONS = 3
partitions = st.integers(1, PARTITIONS)


class IndexAgainstAList(RuleBasedStateMachine):
    """The model of an index; the index can be reopened any number of times on the files of the one
    before.
    """

    def __init__(self, open_queues: Callable[[], ConsumeQueues]) -> None:
        super().__init__()
        self.open = open_queues
        self.queues = open_queues()
        self.queues.recover(0)
        self.model = ListIndex()
        self.now_ms = 1000

    @rule(
        partition_id=partitions,
        counts=st.lists(st.integers(1, 9), max_size=300),
        step_ms=st.integers(-3, 5),
    )
    def dispatch(self, partition_id: int, counts: list[int], step_ms: int) -> None:
        units = []
        for count in counts:
            self.now_ms += step_ms
            units.append(
                (partition_id, self.model.add(partition_id, count, 100 + count, self.now_ms))
            )
        self.queues.dispatch(units)

    @rule(partition_id=partitions, data=st.data(), bytes_max=st.integers(1, 40_000))
    def find(self, partition_id: int, data, bytes_max: int) -> None:
        end = self.model.next.get(partition_id, 0)
        offset = data.draw(st.integers(0, end + 2))
        limit = data.draw(st.integers(offset, end + 2))
        wanted = self.model.find(partition_id, offset, end=limit, bytes_max=bytes_max)
        answer = self.queues.find(partition_id, offset, end=limit, bytes_max=bytes_max)
        assert answer == wanted

    @rule(partition_id=partitions, data=st.data(), bound=st.sampled_from(TimeBound))
    def find_by_time(self, partition_id: int, data, bound: TimeBound) -> None:
        live = self.model.live(partition_id)
        times = [unit.appended_at_ms for unit in live] or [0]
        at_ms = data.draw(st.sampled_from(times)) + data.draw(st.integers(-1, 1))
        wanted = self.model.find_by_time(partition_id, at_ms, bound)
        assert self.queues.find_by_time(partition_id, at_ms, bound) == wanted

    @rule()
    def bounds(self) -> None:
        assert self.queues.partitions() == sorted(self.model.next)
        for partition_id in range(1, PARTITIONS + 1):
            assert self.queues.bounds(partition_id) == self.model.bounds(partition_id)

    @rule(data=st.data())
    def retain(self, data) -> None:
        position = data.draw(st.integers(0, self.model.position))
        answer = dict(pair for step in self.queues.retain(position) for pair in step)
        assert answer == self.model.retain(position)

    @rule()
    def checkpoint(self) -> None:
        self.queues.checkpoint(self.model.position)

    @rule(data=st.data())
    def restart(self, data) -> None:
        """What was written is read again; a truncation forgets exactly what lies behind its
        position.
        """
        self.queues.close()
        self.queues = self.open()
        starts = {unit.position for units in self.model.units.values() for unit in units}
        position = data.draw(st.sampled_from(sorted({0, *starts, self.model.position})))
        known = self.queues.recover(position)
        assert known <= position
        if known:
            self.model.truncate(known)
        else:
            self.model = ListIndex()

    def teardown(self) -> None:
        self.queues.close()


class FileIndex(IndexAgainstAList):
    def __init__(self) -> None:
        super().__init__(partial(FileConsumeQueues, SimDisk()))


class RocksIndex(IndexAgainstAList):
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(opener("rocksdb", Path(self.folder.name)))

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestFileIndex = FileIndex.TestCase
TestFileIndex.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestRocksIndex = RocksIndex.TestCase
TestRocksIndex.settings = settings(
    max_examples=examples(15),
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a real database shrinks too slowly
)
