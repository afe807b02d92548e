"""Plans of operations on partitions: exact cover, least movement, the right parents, balance."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.metaserver.operations.plan import (
    OpenPartition,
    Plan,
    plan_evacuation,
    plan_growth,
    plan_merge,
    plan_move,
    plan_resize,
    plan_split,
)
from keylane.protocol.errors import (
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.routing import split_ranges
from support.raising import raises

GROUPS = ("g1", "g2", "g3")
hosts = st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 50), min_size=1)


@st.composite
def subjects(draw: st.DrawFn) -> list[OpenPartition]:
    """Open partitions that cover everything, cut anywhere, placed anywhere."""
    edges = draw(st.sets(st.integers(1, LOGICAL_PARTITIONS - 1), max_size=12))
    if draw(st.booleans()):
        count = draw(st.integers(1, 16))
        edges = {start for start, _end in split_ranges(count)} - {0}
    cuts = [0, *sorted(edges), LOGICAL_PARTITIONS]
    return [
        OpenPartition(
            partition_id=number + 10,
            range_start=cuts[number],
            range_end=cuts[number + 1],
            broker_group=draw(st.sampled_from(GROUPS)),
            queue=number,
        )
        for number in range(len(cuts) - 1)
    ]


def after(current: list[OpenPartition], plan: Plan) -> list[tuple[int, int, str]]:
    """The open ranges once the plan is done, by range; checks what holds for every plan."""
    sealed = [partition for partition in current if partition.partition_id in plan.sealed]
    assert len(sealed) == len(plan.sealed)
    kept = [partition for partition in current if partition not in sealed]
    opened = sorted(
        (partition.range_start, partition.range_end, partition.broker_group) for partition in kept
    ) + [
        (partition.range_start, partition.range_end, partition.broker_group)
        for partition in plan.children
    ]
    opened.sort()
    edge = 0
    for start, end, _group in opened:
        assert start == edge
        assert end > start
        edge = end
    assert edge == LOGICAL_PARTITIONS
    for child in plan.children:
        overlapping = {
            partition.partition_id
            for partition in sealed
            if partition.range_start < child.range_end and child.range_start < partition.range_end
        }
        assert set(child.parents) == overlapping
        assert overlapping
    places = {
        (partition.range_start, partition.range_end, partition.broker_group) for partition in sealed
    }
    children = {
        (partition.range_start, partition.range_end, partition.broker_group)
        for partition in plan.children
    }
    assert not places & children, "a partition was sealed to begin again in its own place"
    return opened


@given(subjects(), st.integers(1, 40), hosts)
def test_resize_ends_in_the_exact_split_and_keeps_equal_ranges(current, count, groups):
    """The ranges are those of the exact split; a partition that has such a range stays."""
    plan = plan_resize(current, count, groups)
    opened = after(current, plan)
    assert [(start, end) for start, end, _ in opened] == split_ranges(count)
    wanted = set(split_ranges(count))
    stays = {
        partition.partition_id
        for partition in current
        if (partition.range_start, partition.range_end) in wanted
    }
    assert stays == {partition.partition_id for partition in current} - set(plan.sealed)


@given(st.integers(1, 64), st.integers(1, 64), st.sets(st.sampled_from(GROUPS), min_size=1))
def test_repeated_resize_stays_balanced(first, second, names):
    """From a balanced subject over the available groups a resize leaves them within one of each
    other.
    """
    groups = dict.fromkeys(sorted(names), 0)
    current = [
        OpenPartition(
            partition_id=number + 1,
            range_start=start,
            range_end=end,
            broker_group=sorted(names)[number % len(names)],
            queue=number,
        )
        for number, (start, end) in enumerate(split_ranges(first))
    ]
    plan = plan_resize(current, second, groups)
    opened = after(current, plan)
    counts = Counter(group for _start, _end, group in opened)
    kept = Counter(
        partition.broker_group for partition in current if partition.partition_id not in plan.sealed
    )
    fewest = min(counts[group] for group in groups)
    assert all(counts[group] - fewest <= 1 or counts[group] == kept[group] for group in groups)


@given(subjects(), st.data(), hosts)
def test_split_cuts_a_partition_in_the_middle(current, data, groups):
    """Two children of one parent, their ranges within one of each other; the others stay."""
    partition = data.draw(st.sampled_from(current))
    if partition.range_end - partition.range_start == 1:
        with pytest.raises(InvalidRequestError):
            plan_split(current, partition.partition_id, groups)
        return
    plan = plan_split(current, partition.partition_id, groups)
    after(current, plan)
    assert plan.sealed == (partition.partition_id,)
    sizes = [child.range_end - child.range_start for child in plan.children]
    assert len(sizes) == 2
    assert abs(sizes[0] - sizes[1]) <= 1


def grown(current: list[OpenPartition], plan: Plan) -> list[OpenPartition]:
    """The open partitions once a growth is done; checks what holds for every growth."""
    after(current, plan)
    by_id = {partition.partition_id: partition for partition in current}
    opened = [partition for partition in current if partition.partition_id not in plan.sealed]
    for number, child in enumerate(plan.children, max(by_id) + 1):
        (parent,) = (by_id[parent_id] for parent_id in child.parents)
        assert child.queue is not None
        assert (child.queue == parent.queue) is (child.range_start == parent.range_start)
        opened.append(
            OpenPartition(
                partition_id=number,
                range_start=child.range_start,
                range_end=child.range_end,
                broker_group=child.broker_group,
                queue=child.queue,
            )
        )
    assert sorted(partition.queue for partition in opened) == list(range(len(opened)))
    return sorted(opened, key=lambda partition: partition.range_start)


def ranges(opened: list[OpenPartition]) -> dict[int, tuple[int, int]]:
    """Queue → its range."""
    return {partition.queue: (partition.range_start, partition.range_end) for partition in opened}


@given(subjects(), st.data(), hosts)
def test_growth_cuts_chosen_queues_in_the_middle(current, data, groups):
    """A chosen queue keeps its number and the first half of its range; new queues have the next
    numbers; others stay.
    """
    queues = data.draw(st.sets(st.sampled_from([each.queue for each in current]), min_size=1))
    before = ranges(current)
    if any(before[queue][1] - before[queue][0] == 1 for queue in queues):
        with pytest.raises(InvalidRequestError):
            plan_growth("s", current, groups, queues=queues)
        return
    plan = plan_growth("s", current, groups, queues=queues)
    assert set(plan.sealed) == {each.partition_id for each in current if each.queue in queues}
    now = ranges(grown(current, plan))
    assert len(now) == len(before) + len(queues)
    for new, queue in enumerate(sorted(queues), len(before)):
        start, end = before.pop(queue)
        middle = (start + end) // 2
        assert (now[queue], now[new]) == ((start, middle), (middle, end))
    assert before.items() <= now.items()


@given(subjects(), st.integers(0, 40), st.integers(0, 40), hosts)
def test_growth_by_steps_ends_in_the_same_queues_as_at_once(current, first, second, groups):
    """The widest queues are cut; numbers and ranges depend on the count alone."""
    middle, count = len(current) + first, len(current) + first + second
    once = grown(current, plan_growth("s", current, groups, count=count))
    stepped = grown(current, plan_growth("s", current, groups, count=middle))
    stepped = grown(stepped, plan_growth("s", stepped, groups, count=count))
    assert len(once) == count
    assert ranges(once) == ranges(stepped)
    widest = max(each.range_end - each.range_start for each in once)
    halved = [each for each in current if ranges(once)[each.queue] != ranges(current)[each.queue]]
    assert all(2 * (each.range_end - each.range_start) >= widest for each in halved)


@given(subjects(), st.data(), hosts)
def test_merge_takes_neighbours_only(current, data, groups):
    """Partitions without a gap become one; with a gap, or fewer than two, nothing is planned."""
    chosen = sorted(data.draw(st.sets(st.integers(0, len(current) - 1))))
    ids = [current[index].partition_id for index in chosen]
    gapless = len(chosen) >= 2 and chosen == list(range(chosen[0], chosen[-1] + 1))
    if not gapless:
        with pytest.raises(InvalidRequestError):
            plan_merge(current, ids, groups)
        return
    plan = plan_merge(current, ids, groups)
    after(current, plan)
    assert list(plan.sealed) == ids
    assert len(plan.children) == 1


@given(subjects(), st.data(), st.sampled_from(GROUPS))
def test_move_changes_the_broker_group_only(current, data, target):
    """Each partition has one child of its range and queue on the target; partitions on the target
    stay.
    """
    ids = data.draw(
        st.sets(st.sampled_from([partition.partition_id for partition in current]), min_size=1)
    )
    plan = plan_move(current, ids, target)
    after(current, plan)
    moved = {
        partition.partition_id
        for partition in current
        if partition.partition_id in ids and partition.broker_group != target
    }
    assert set(plan.sealed) == moved
    by_id = {partition.partition_id: partition for partition in current}
    for child in plan.children:
        (parent,) = (by_id[parent_id] for parent_id in child.parents)
        assert (child.range_start, child.range_end) == (parent.range_start, parent.range_end)
        assert child.queue == parent.queue
        assert child.broker_group == target


@given(subjects(), st.sampled_from(GROUPS), hosts)
def test_evacuation_empties_its_source(current, source, groups):
    """No partition is open on the group afterwards; the others stay; without another group it is
    refused.
    """
    concerned = {
        partition.partition_id for partition in current if partition.broker_group == source
    }
    if concerned and not set(groups) - {source}:
        with raises(Reason.NOT_ENOUGH_BROKERS):
            plan_evacuation(current, source, groups)
        return
    plan = plan_evacuation(current, source, groups)
    opened = after(current, plan)
    assert set(plan.sealed) == concerned
    assert source not in {group for _start, _end, group in opened}


@pytest.mark.parametrize("count", [0, -1, LOGICAL_PARTITIONS + 1])
def test_impossible_counts_are_refused(count):
    """A subject has 1 to 1024 partitions."""
    with pytest.raises(InvalidRequestError):
        plan_resize([], count, {"g1": 0})


def test_plan_is_refused_without_open_partitions_or_brokers():
    """An unknown partition, no partition, and no broker have an error each."""
    whole = OpenPartition(partition_id=1, range_start=0, range_end=1024, broker_group="g1", queue=0)
    with pytest.raises(PartitionUnknownError):
        plan_split([whole], 2, {"g1": 0})
    with pytest.raises(PartitionUnknownError):
        plan_move([whole], [2], "g2")
    with pytest.raises(InvalidRequestError):
        plan_move([whole], [], "g2")
    with raises(Reason.NOT_ENOUGH_BROKERS):
        plan_resize([whole], 2, {})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({}, InvalidRequestError),
        ({"count": 3, "queues": [0]}, InvalidRequestError),
        ({"count": 1}, InvalidRequestError),
        ({"count": -1}, InvalidRequestError),
        ({"count": LOGICAL_PARTITIONS + 1}, InvalidRequestError),
        ({"queues": [2]}, Reason.QUEUE_UNKNOWN),
        ({"queues": [-1, 0]}, Reason.QUEUE_UNKNOWN),
    ],
)
def test_growth_is_refused_when_its_queues_are_impossible(asked, error):
    """A growth has either a count or queues, takes no queue away, and cuts queues that the subject
    has.
    """
    current = [
        OpenPartition(
            partition_id=queue + 1, range_start=start, range_end=end, broker_group="g1", queue=queue
        )
        for queue, (start, end) in enumerate(split_ranges(2))
    ]
    with raises(error):
        plan_growth("s", current, {"g1": 0}, **asked)
    assert plan_growth("s", current, {"g1": 0}, count=2) == Plan()
    whole = grown(current, plan_growth("s", current, {"g1": 0}, count=LOGICAL_PARTITIONS))
    assert {each.range_end - each.range_start for each in whole} == {1}
