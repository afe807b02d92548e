"""Parked messages of any key on any partition of a subject that is resized again and again: each
passes to one descendant, and what the others release leaves it at its source.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane.broker.partition.park_views import build_adoption_page
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.parked_key import NO_LOGICAL_PARTITION
from keylane.consumer.parked_reads import inherits_loose
from keylane.protocol.operations import PartitionHistory, SubjectHistory
from keylane.protocol.parked import Adopt, AncestorReleased, Failure, Freeze, Park, ParkKey
from keylane.protocol.routing import Partition, PartitionState, logical_partition, split_ranges
from support.running.examples import examples

KEYS = (b"b", b"o", b"a", b"d", None)
FAILURE = Failure("E", "text", "c", 1, 1)
PLACES = st.frozensets(st.tuples(st.integers(0, 3), st.sampled_from(KEYS)), max_size=8)
"""(index of the partition, key) of messages that are parked."""
GENERATIONS = st.lists(st.tuples(st.integers(1, 4), PLACES), min_size=2, max_size=4)
"""The number of partitions, and the messages that are parked on them before they are replaced."""
Place = tuple[ParkKey, int, int]


class Lineage:
    """The partitions of a subject, and what a group has parked on each."""

    def __init__(self) -> None:
        self.partitions: list[Partition] = []
        self.newest: list[Partition] = []
        self.parked: dict[int, Parked] = {}

    def resize(self, count: int) -> list[Partition]:
        """Replace the newest partitions, and have the new ones adopt what is parked there."""
        parents, newest = self.newest, list[Partition]()
        for range_start, range_end in split_ranges(count):
            child = Partition(
                partition_id=len(self.partitions) + 1,
                name="p",
                queue=0,
                range_start=range_start,
                range_end=range_end,
                broker_group="g1",
                state=PartitionState.OPEN,
                parents=tuple(
                    each.partition_id
                    for each in parents
                    if each.range_start < range_end and range_start < each.range_end
                ),
            )
            newest.append(child)
            self.partitions.append(child)
            self.parked[child.partition_id] = self._adopted(child)
        self.newest = newest
        return newest

    def _adopted(self, child: Partition) -> Parked:
        parked = Parked(child.partition_id, (child.range_start, child.range_end))
        for parent_id in child.parents:
            parent = self.parked[parent_id]
            parent.apply(Freeze(), at_ms=1)

            def is_adopted(number: int, first: int = parent.logical_partitions[0]) -> bool:
                number = first if number == NO_LOGICAL_PARTITION else number
                return child.range_start <= number < child.range_end

            keys, following = build_adoption_page(parent, is_adopted)
            assert following is None
            parked.apply(Adopt(parent_id, tuple(keys), last=True), at_ms=1)
        return parked

    def descendants(self, partition_id: int) -> list[Partition]:
        """The newest partitions that descend from a partition."""
        ids = {partition_id}
        for each in self.partitions:
            if not ids.isdisjoint(each.parents):
                ids.add(each.partition_id)
        return [each for each in self.newest if each.partition_id in ids]

    @property
    def history(self) -> SubjectHistory:
        past = [PartitionHistory(partition=each) for each in self.partitions]
        return SubjectHistory(subject="s", route_version=1, partitions=past)


def places_of(parked: Parked) -> set[Place]:
    return {
        (key, source, offset)
        for key, each in parked.items()
        for source, start, end in each.rows()
        for offset in range(start, end)
    }


@settings(max_examples=examples(300), deadline=None)
@given(GENERATIONS)
@example([(2, {(0, b"a"), (1, b"a")}), (1, {(0, b"a")}), (2, frozenset())])
@example([(3, {(1, b"b"), (1, b"a"), (1, None)}), (4, {(1, b"b")}), (3, {(1, b"a")})])
def test_each_parked_message_has_one_heir_and_only_that_releases_it(generations):
    homes = [logical_partition(key) // 256 for key in KEYS if key]
    assert homes == [0, 1, 2, 3]
    lineage, sent = Lineage(), set[Place]()
    for count, places in generations:
        newest = lineage.resize(count)
        for offset, (index, key) in enumerate(sorted(places, key=repr)):
            partition_id = newest[index % count].partition_id
            change = Park(key, ((offset, offset + 1),), FAILURE)
            lineage.parked[partition_id].apply(change, at_ms=1)
            sent.add((key, partition_id, offset))
    heirs = {each.partition_id: places_of(lineage.parked[each.partition_id]) for each in newest}
    assert sum(map(len, heirs.values())) == len(sent)
    assert set().union(*heirs.values()) == sent

    for source in [each for each in lineage.partitions if each not in newest]:
        number = source.partition_id
        image = lineage.parked[number].image()
        for heir in lineage.descendants(number):
            parked = Parked.of_image(number, image, (source.range_start, source.range_end))
            for other in lineage.descendants(number):
                if other is not heir:
                    inherits = inherits_loose(lineage.history, number, other.partition_id)
                    release = AncestorReleased(other.range_start, other.range_end, inherits)
                    parked.apply(release, at_ms=1)
            own = {place for place in places_of(parked) if place[1] == number}
            assert own == {place for place in heirs[heir.partition_id] if place[1] == number}
