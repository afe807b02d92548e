"""Planning returns one fixed half-open range per physical partition, or a typed error."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.arrow.planner import (
    bounds_request,
    check_batch,
    check_named_partitions,
    lineage_depths,
    lineage_ids,
    plan_ranges,
    select_partitions,
)
from keylane.arrow.selection import (
    EARLIEST,
    LATEST,
    CursorOf,
    Edge,
    ReadBound,
    ReadOptions,
    StoredAt,
)
from keylane.protocol.errors import (
    ConfigError,
    DataLossError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.reading.bounds import PartitionBounds
from keylane.protocol.routing import (
    OrderStrategy,
    Partition,
    PartitionState,
    Route,
    logical_partition,
    split_ranges,
)


def partition(
    number: int,
    state: str = "open",
    address: str | None = "127.0.0.1:1",
    parents: tuple[int, ...] = (),
) -> Partition:
    return Partition(
        partition_id=number,
        name=f"p{number}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group=f"g{number}",
        state=PartitionState(state),
        address=address,
        parents=parents,
        logic_start=100 * number,
    )


def route(*partitions: Partition) -> Route:
    return Route(
        subject="flights", version=1, order_strategy=OrderStrategy.STRICT, partitions=partitions
    )


def bounds(number: int, first: int, after: int, **more) -> PartitionBounds:
    return PartitionBounds(partition_id=number, first_offset=first, next_offset=after, **more)


def options(**more) -> ReadOptions:
    return ReadOptions(meta=("127.0.0.1:1",), subjects=("flights",), **more)


def starts(**offsets: int) -> ReadBound:
    return ReadBound(Edge.EARLIEST, {int(name[1:]): offset for name, offset in offsets.items()})


def ends(**offsets: int) -> ReadBound:
    return ReadBound(Edge.LATEST, {int(name[1:]): offset for name, offset in offsets.items()})


def ids_of(routes: list[Route], chosen: ReadOptions) -> list[int]:
    return [each.partition.partition_id for each in select_partitions(routes, chosen)]


def planned(chosen: ReadOptions) -> dict[int, tuple[int, int]]:
    """Two partitions: 3 holds [5, 20), 4 holds [0, 0)."""
    table = route(partition(4), partition(3, "sealed"))
    parts = select_partitions([table], chosen)
    ranges = plan_ranges(
        parts, {3: bounds(3, 5, 20, first_at_ms=1_700_000_000_000), 4: bounds(4, 0, 0)}, chosen
    )
    return {range_.partition_id: (range_.start, range_.end) for range_ in ranges}


@pytest.mark.parametrize(
    ("chosen", "ranges"),
    [
        ({}, {3: (5, 20), 4: (0, 0)}),
        ({"start": LATEST}, {3: (20, 20), 4: (0, 0)}),
        ({"end": EARLIEST}, {3: (5, 5), 4: (0, 0)}),
        ({"start": starts(p3=7)}, {3: (7, 20), 4: (0, 0)}),
        ({"start": starts(p3=7), "end": ends(p3=9)}, {3: (7, 9), 4: (0, 0)}),
        ({"start": starts(p3=5, p4=0), "end": ends(p3=20, p4=0)}, {3: (5, 20), 4: (0, 0)}),
        ({"start": starts(p3=9), "end": ends(p3=9)}, {3: (9, 9), 4: (0, 0)}),
        ({"partitions": frozenset({4})}, {4: (0, 0)}),
        ({"partitions": frozenset({3}), "end": ends(p3=6)}, {3: (5, 6)}),
    ],
    ids=str,
)
def test_each_partition_has_one_pinned_range(chosen, ranges):
    """Every physical partition gets one half-open range, in order of ids, even if it is empty."""
    plan = planned(options(**chosen))
    assert plan == ranges
    assert list(plan) == sorted(plan)


@pytest.mark.parametrize(
    ("chosen", "details"),
    [
        (
            {"start": starts(p3=21)},
            {"partition_id": 3, "offset": 21, "first_offset": 5, "next_offset": 20},
        ),
        (
            {"end": ends(p3=21)},
            {"partition_id": 3, "offset": 21, "first_offset": 5, "next_offset": 20},
        ),
        (
            {"end": ends(p4=1)},
            {"partition_id": 4, "offset": 1, "first_offset": 0, "next_offset": 0},
        ),
        (
            {"start": starts(p3=9), "end": ends(p3=8)},
            {"partition_id": 3, "offset": 9, "first_offset": 5, "next_offset": 8},
        ),
        (
            {"start": LATEST, "end": EARLIEST},
            {"partition_id": 3, "offset": 20, "first_offset": 5, "next_offset": 5},
        ),
    ],
    ids=str,
)
def test_offset_that_is_not_there_is_refused(chosen, details):
    """A range of explicit offsets is read completely or refused with the stored offsets."""
    with pytest.raises(OffsetOutOfRangeError) as caught:
        planned(options(**chosen))
    assert caught.value.details == details
    assert str(caught.value.message).startswith(f"{next(iter(chosen))}: offset ")


@pytest.mark.parametrize(
    "chosen",
    [{"partitions": frozenset({3, 9})}, {"start": starts(p9=0)}, {"end": ends(p9=0)}],
    ids=str,
)
def test_unknown_partition_is_refused(chosen):
    """A partition that the subject does not have is refused with its id and the option that names
    it.
    """
    option = next(iter(chosen))
    with pytest.raises(PartitionUnknownError, match=f"{option}: .* partition 9") as caught:
        check_named_partitions([route(partition(4), partition(3, "sealed"))], options(**chosen))
    assert caught.value.details == {"partition_id": 9, "subject": "flights"}


def test_partitions_without_data_are_left_out():
    """Planned and expired partitions are not read, sealed ones are."""
    table = route(
        *(partition(n, s) for n, s in enumerate(["planned", "open", "sealed", "expired"], 1))
    )
    assert ids_of([table], options()) == [2, 3]
    with pytest.raises(PartitionUnknownError):
        check_named_partitions([table], options(partitions=frozenset({4})))


def test_subject_without_partitions_plans_nothing():
    """No partitions, no ranges, no error."""
    assert select_partitions([route()], options()) == []
    assert plan_ranges([], {}, options()) == []


def test_partition_whose_broker_is_away_is_told_at_planning():
    """Reading a part of the subject without a warning would be worse than an error."""
    table = route(partition(3, address=None), partition(4))
    with pytest.raises(NotSentError, match=r"broker group g3, .* is not available.*`partitions`"):
        select_partitions([table], options())
    assert ids_of([table], options(partitions=frozenset({4}))) == [4]


def test_partition_no_broker_knows_is_told_at_planning():
    """A partition of the route that its broker does not host is a typed error."""
    with pytest.raises(PartitionUnknownError):
        plan_ranges(select_partitions([route(partition(3))], options()), {}, options())


def test_partition_is_refused_when_its_id_does_not_fit_the_column():
    with pytest.raises(ConfigError, match="partition 2147483648 cannot be read"):
        select_partitions([route(partition(2**31))], options())


def test_range_says_where_its_partition_is_in_queue_and_lineage():
    """Subject, logic queue and its start, the depth below all parents that the route knows, and
    what is connected.
    """
    table = route(
        partition(2),
        partition(7, "sealed", parents=(5,)),
        partition(8, parents=(2, 7)),
        partition(5, "sealed", parents=(1,)),
        partition(9),
    )
    assert lineage_depths(table) == {2: 0, 5: 0, 7: 1, 8: 2, 9: 0}
    assert lineage_ids(table) == {2: 2, 5: 2, 7: 2, 8: 2, 9: 9}
    selected = select_partitions([table], options())
    answers = {n: bounds(n, 0, 1, message_bytes=7) for n in (2, 5, 7, 8, 9)}
    ranges = plan_ranges(selected, answers, options())
    assert [
        (each.subject, each.queue, each.logic_start, each.epoch, each.lineage, each.size_bytes)
        for each in ranges
    ] == [
        ("flights", 0, 200, 0, 2, 7),
        ("flights", 0, 500, 0, 2, 7),
        ("flights", 0, 700, 1, 2, 7),
        ("flights", 0, 800, 2, 2, 7),
        ("flights", 0, 900, 0, 9, 7),
    ]


def test_times_and_groups_are_asked_for_and_become_offsets():
    """The start's come first in question and answer; no message at a time is the end, no cursor the
    beginning.
    """
    chosen = options(
        start=ReadBound(StoredAt(1_000), {4: CursorOf("billing"), 5: 9, 6: Edge.LATEST}),
        end=ReadBound(
            StoredAt(2_000), {4: CursorOf("audit"), 5: Edge.LATEST, 7: CursorOf("billing")}
        ),
    )
    selected = select_partitions([route(*map(partition, (3, 4, 5, 6, 7)))], chosen)
    asked = [bounds_request(each.partition, chosen) for each in selected]
    assert [(each.at_ms, each.groups) for each in asked] == [
        ((1_000, 2_000), ()),
        ((), ("billing", "audit")),
        ((), ()),
        ((2_000,), ()),
        ((1_000,), ("billing",)),
    ]
    answers = [
        bounds(3, 5, 50, offsets_at=(3, 20)),  # retention has passed the first of them
        bounds(4, 0, 40, cursors=(7, 60)),
        bounds(5, 0, 50),
        bounds(6, 0, 60, offsets_at=(None,)),
        bounds(7, 4, 70, offsets_at=(4,), cursors=(None,)),
    ]
    ranges = plan_ranges(selected, {each.partition_id: each for each in answers}, chosen)
    assert [(each.start, each.end) for each in ranges] == [
        (5, 20),
        (7, 40),
        (9, 50),
        (60, 60),
        (4, 4),
    ]


def test_lost_rows_are_told_with_partition_range_count_and_time():
    """Rows that retention has removed are reported in full, or skipped with
    failOnDataLoss=false.
    """
    with pytest.raises(DataLossError) as caught:
        planned(options(start=starts(p3=2)))
    error = caught.value
    assert (error.partition_id, error.offset, error.lost_until, error.rows) == (3, 2, 5, 3)
    assert error.message == (
        "partition 3 of subject flights has lost [2, 5), 3 rows: retention has removed messages "
        "that were stored before 2023-11-14T22:13:20.000+00:00; it now begins at 5"
    )
    with pytest.raises(DataLossError, match=r"has lost \[2, 4\), 2 rows"):
        planned(options(start=starts(p3=2), end=ends(p3=4)))
    assert planned(options(start=starts(p3=2), fail_on_data_loss=False)) == {3: (5, 20), 4: (0, 0)}
    left_out = options(start=starts(p3=2, p9=1), end=ends(p3=4), fail_on_data_loss=False)
    assert planned(left_out) == {3: (5, 5), 4: (0, 0)}


def test_cursor_behind_retention_is_a_loss():
    chosen = options(start=ReadBound(CursorOf("billing")))
    selected = select_partitions([route(partition(3))], chosen)
    with pytest.raises(DataLossError):
        plan_ranges(selected, {3: bounds(3, 5, 20, cursors=(4,))}, chosen)


def split(count: int, first_id: int) -> list[Partition]:
    return [
        replace(partition(first_id + index), range_start=start, range_end=end)
        for index, (start, end) in enumerate(split_ranges(count))
    ]


def test_keys_are_looked_for_only_where_they_can_be():
    """By hash, in sealed partitions too; everywhere where a keyed message may have left its
    partition.
    """
    keys = frozenset({b"a", b"order-1"})
    parts = [*(replace(each, state=PartitionState.SEALED) for each in split(4, 1)), *split(64, 10)]
    held = {
        each.partition_id
        for each in parts
        for key in keys
        if each.range_start <= logical_partition(key) < each.range_end
    }
    assert len(held) == 4
    assert set(ids_of([route(*parts)], options(keys=keys))) == held
    loose = replace(route(*parts), order_strategy=OrderStrategy.BEST_TRIED)
    assert len(ids_of([loose], options(keys=keys))) == len(parts)


def test_partitions_of_several_subjects_are_selected_by_subject():
    flights, visits = (
        route(partition(4), partition(3)),
        replace(route(partition(1)), subject="visits"),
    )
    selected = select_partitions([flights, visits], options())
    assert [(each.subject, each.partition.partition_id) for each in selected] == [
        ("flights", 3),
        ("flights", 4),
        ("visits", 1),
    ]


def test_times_are_placed_in_order_when_a_child_is_behind_in_time():
    """Partition 8 continues 4 through 5, which has no data; no message of a key is between the two
    ranges, or in none.
    """
    table = route(
        partition(3, "sealed"),
        partition(4, "sealed", parents=(3,)),
        partition(5, "expired", parents=(4,)),
        partition(8, parents=(5,)),
        partition(9),
    )

    def ranges(**bound: ReadBound) -> dict[int, tuple[int, int]]:
        chosen = options(**bound)
        answers = [
            bounds(3, 0, 10, offsets_at=(6,)),
            bounds(4, 2, 10, offsets_at=(None,)),
            bounds(8, 1, 10, offsets_at=(7,)),
            bounds(9, 0, 10, offsets_at=(4,)),
        ]
        planned = plan_ranges(
            select_partitions([table], chosen),
            {each.partition_id: each for each in answers},
            chosen,
        )
        return {each.partition_id: (each.start, each.end) for each in planned}

    at = ReadBound(StoredAt(1_000))
    assert ranges(start=at) == {3: (6, 10), 4: (2, 10), 8: (1, 10), 9: (4, 10)}
    assert ranges(end=at) == {3: (0, 6), 4: (2, 2), 8: (1, 1), 9: (0, 4)}


def test_partition_that_is_read_alone_is_placed_by_its_own_times():
    chosen = options(start=ReadBound(StoredAt(1_000)), partitions=frozenset({4}))
    table = route(partition(3, "sealed"), partition(4, parents=(3,)))
    selected = select_partitions([table], chosen)
    (planned,) = plan_ranges(selected, {4: bounds(4, 0, 10, offsets_at=(6,))}, chosen)
    assert planned.start == 6


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"start": ReadBound(0, manifest="/data")},
            "only a stream or a consumer group can begin at",
        ),
        ({"commit_group": "billing"}, "a group can follow only a stream"),
        (
            {"max_rows_per_trigger": 10},
            "maxRowsPerTrigger: the option limits the batches of a stream",
        ),
    ],
)
def test_batch_refuses_an_option_that_only_a_stream_has(option, says):
    """Otherwise a program would silently read only a part of the data."""
    with pytest.raises(ConfigError, match=says):
        check_batch(ReadOptions(meta=("h:1",), subjects=("s",), **option))
