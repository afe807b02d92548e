"""Plans that balance broker groups, by example; tests/property/metaserver/ has their promises."""

from __future__ import annotations

import pytest

from keylane.metaserver.operations.balance_plan import MOVES_MAX, PlacedPartition, plan_balance

MB = 1_000_000
TWO = ("g1", "g2")


def placed(*rows: tuple[str, str, int]) -> list[PlacedPartition]:
    """Partitions 1, 2, …, of subjects, on broker groups, with megabytes a second."""
    return [
        PlacedPartition(
            partition_id=number, subject=subject, broker_group=group, bytes_per_s=mb * MB
        )
        for number, (subject, group, mb) in enumerate(rows, 1)
    ]


def planned(partitions, groups=TWO, **rest):
    return [
        (move.partition_id, move.source, move.target)
        for move in plan_balance(partitions, groups, **rest)
    ]


def test_new_broker_gets_a_part_of_each_subject_when_it_joins():
    rows = [("a", group, 0) for group in TWO for _ in range(3)]
    rows += [("b", group, 0) for group in TWO for _ in range(3)]
    moves = plan_balance(placed(*rows), ("g1", "g2", "g3"))
    assert sorted((move.subject, move.source) for move in moves) == [
        *(("a", "g1"), ("a", "g2"), ("b", "g1"), ("b", "g2"))
    ]
    assert moves[0].reason == "g1 has 3 of the subject's partitions, g3 has 0"


def test_subjects_with_one_partition_are_spread_when_a_broker_joins():
    rows = [(f"s{number}", "g1", 0) for number in range(6)]
    moves = plan_balance(placed(*rows), TWO)
    assert len(moves) == 3
    assert moves[0].reason == "g1 has 6 partitions, g2 has 0"


def test_partition_that_evens_the_rates_moves_when_any_of_them_could():
    assert planned(placed(("a", "g1", 5), ("a", "g1", 9), ("a", "g1", 7))) == [(2, "g1", "g2")]


def test_partitions_are_exchanged_when_one_broker_has_the_hot_ones():
    partitions = placed(("a", "g1", 30), ("a", "g1", 20), ("a", "g2", 1), ("a", "g2", 1))
    moves = plan_balance(partitions, TWO)
    assert [move.partition_id for move in moves] == [1, 3]
    assert {move.reason for move in moves} == {"g1 stores 50 MB/s, g2 2.0 MB/s"}


@pytest.mark.parametrize(
    "rates",
    [
        (30, 0, 0, 0),  # a single hot partition is hot anywhere
        (10, 9, 8, 8),  # less than a quarter of what a broker stores
        (0, 0, 0, 0),
    ],
)
def test_partition_stays_when_rates_gain_little(rates):
    places = ("g1", "g1", "g2", "g2")
    partitions = placed(*(("a", place, rate) for place, rate in zip(places, rates, strict=True)))
    assert planned(partitions) == []


def test_hot_partition_stays_when_only_the_rates_of_a_small_cluster_differ():
    partitions = [
        PlacedPartition(partition_id=1, subject="a", broker_group="g1", bytes_per_s=400_000),
        PlacedPartition(partition_id=2, subject="a", broker_group="g1", bytes_per_s=400_000),
        PlacedPartition(partition_id=3, subject="a", broker_group="g2"),
        PlacedPartition(partition_id=4, subject="a", broker_group="g2"),
    ]
    assert planned(partitions) == []


def test_partitions_that_stay_count_when_a_broker_has_others():
    """The other broker has four partitions of subjects that are being resized."""
    rows = [(f"s{number}", "g1", 0) for number in range(4)]
    assert planned(placed(*rows), fixed={"g2": 4}) == []
    assert len(planned(placed(*rows), fixed={"g2": 2})) == 1


@pytest.mark.parametrize("groups", [(), ("g1",)])
def test_plan_is_empty_when_there_are_not_two_broker_groups(groups):
    assert planned(placed(*(("a", group, 5) for group in groups for _ in range(3))), groups) == []


def test_plan_ends_when_it_is_long():
    rows = [(f"s{number}", "g1", 0) for number in range(3 * MOVES_MAX)]
    assert len(plan_balance(placed(*rows), TWO)) == MOVES_MAX
