"""Consume queues against a list: every offset is found, by any budget, after any flush and truncation."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from keylane.broker.storage.consume_queue import Unit
from keylane.broker.storage.index_file import FileConsumeQueues
from sim.disk import SimDisk

PARTITIONS = 3
partitions = st.integers(1, PARTITIONS)


class IndexAgainstAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.queues = FileConsumeQueues(self.disk)
        self.model: dict[int, list[Unit]] = {number: [] for number in range(1, PARTITIONS + 1)}
        self.position = 0

    @rule(partition_id=partitions, counts=st.lists(st.integers(1, 9), max_size=300))
    def dispatch(self, partition_id: int, counts: list[int]) -> None:
        units = []
        for count in counts:
            known = self.model[partition_id]
            base = known[-1].next_offset if known else 0
            unit = Unit(base, count, self.position, 100 + count, self.position)
            self.position = unit.end_position
            known.append(unit)
            units.append((partition_id, unit))
        self.queues.dispatch(units)

    @rule(partition_id=partitions, data=st.data(), bytes_max=st.integers(1, 40_000))
    def find(self, partition_id: int, data, bytes_max: int) -> None:
        known = self.model[partition_id]
        end = known[-1].next_offset if known else 0
        offset = data.draw(st.integers(0, end + 2))
        limit = data.draw(st.integers(offset, end + 2))
        expected: list[Unit] = []
        left = bytes_max
        for unit in known:
            if unit.next_offset <= offset:
                continue
            if unit.base_offset >= limit or (expected and unit.length > left):
                break
            expected.append(unit)
            left -= unit.length
        assert self.queues.find(partition_id, offset, end=limit, bytes_max=bytes_max) == expected

    @rule()
    def flush(self) -> None:
        self.queues.flush()

    @rule(data=st.data())
    def restart(self, data) -> None:
        """What was written is there again; a truncation forgets exactly what lies behind it."""
        self.queues.close()
        self.queues = FileConsumeQueues(self.disk)
        position = data.draw(st.integers(0, self.position))
        self.queues.truncate(position)
        for known in self.model.values():
            known[:] = [unit for unit in known if unit.position < position]


TestIndex = IndexAgainstAList.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
