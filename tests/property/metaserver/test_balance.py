"""Plans that balance broker groups: short, complete, repeatable, and only where they may go."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from keylane.metaserver.operations.balance_plan import (
    GAIN_PERCENT,
    RATE_MIN,
    PlacedPartition,
    plan_balance,
)

GROUPS = ("g1", "g2", "g3", "g4")
MB = 1_000_000
RATES = st.integers(0, 40 * MB)


@st.composite
def layouts(draw, *, groups_max=4, partitions_max=24, rates=RATES):
    """Partitions on some of the broker groups, which may all get partitions."""
    groups = GROUPS[: draw(st.integers(1, groups_max))]
    subjects = st.sampled_from(["a", "b", "c", "d"][: draw(st.integers(1, 4))])
    rows = draw(
        st.lists(st.tuples(subjects, st.sampled_from(groups), rates), max_size=partitions_max)
    )
    return groups, [
        PlacedPartition(partition_id=number, subject=subject, broker_group=group, bytes_per_s=rate)
        for number, (subject, group, rate) in enumerate(rows, 1)
    ]


def after(partitions, moves):
    targets = {move.partition_id: move.target for move in moves}
    return [
        replace(each, broker_group=targets.get(each.partition_id, each.broker_group))
        for each in partitions
    ]


def spread(groups, places):
    counts = Counter(places)
    return max(counts[group] for group in groups) - min(counts[group] for group in groups)


def is_even(groups, partitions):
    by_subject = defaultdict(list)
    for each in partitions:
        by_subject[each.subject].append(each.broker_group)
    return spread(groups, [each.broker_group for each in partitions]) <= 1 and all(
        spread(groups, places) <= 1 for places in by_subject.values()
    )


def rates_of(groups, partitions):
    rates = dict.fromkeys(groups, 0)
    for each in partitions:
        rates[each.broker_group] += each.bytes_per_s
    return rates


@given(layouts())
def test_plan_ends_balanced_and_is_empty_when_it_runs_again(layout):
    groups, partitions = layout
    moves = plan_balance(partitions, groups)
    assert len({move.partition_id for move in moves}) == len(moves)
    assert all(move.source != move.target for move in moves)
    balanced = after(partitions, moves)
    assert is_even(groups, balanced)
    assert plan_balance(balanced, groups) == []


@given(layouts(), st.randoms())
def test_plan_is_the_same_when_the_input_is_the_same_in_another_order(layout, random):
    groups, partitions = layout
    moves = plan_balance(partitions, groups)
    random.shuffle(partitions)
    shuffled_groups = list(groups)
    random.shuffle(shuffled_groups)
    assert plan_balance(partitions, shuffled_groups) == moves


@given(layouts(groups_max=3, partitions_max=6, rates=st.just(0)))
def test_plan_has_the_fewest_moves_when_only_counts_matter(layout):
    groups, partitions = layout
    fewest = min(
        sum(place != each.broker_group for place, each in zip(places, partitions, strict=True))
        for places in product(groups, repeat=len(partitions))
        if is_even(
            groups,
            [
                replace(each, broker_group=place)
                for place, each in zip(places, partitions, strict=True)
            ],
        )
    )
    assert len(plan_balance(partitions, groups)) == fewest


@given(layouts())
def test_last_move_is_needed_when_it_is_left_out(layout):
    groups, partitions = layout
    moves = plan_balance(partitions, groups)
    if moves:
        assert plan_balance(after(partitions, moves[:-1]), groups)


@given(layouts())
def test_hottest_group_gets_no_hotter_when_rates_are_balanced_alone(layout):
    """A layout that is even by counts only gets exchanges, each of which closes a gap."""
    groups, partitions = layout
    even = after(
        partitions, plan_balance([replace(each, bytes_per_s=0) for each in partitions], groups)
    )
    before = rates_of(groups, even)
    moves = plan_balance(even, groups)
    rates = rates_of(groups, after(even, moves))
    assert max(rates.values()) <= max(before.values())
    if moves:
        gain_min = max(RATE_MIN, sum(rates.values()) // len(groups) * GAIN_PERCENT // 100)
        assert max(before.values()) - min(before.values()) > gain_min


@given(
    layouts(),
    st.sets(st.sampled_from(GROUPS)),
    st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 9)),
)
def test_partitions_only_move_between_given_groups_when_others_exist(layout, left_out, fixed):
    groups, partitions = layout
    allowed = [group for group in groups if group not in left_out]
    movable = [each for each in partitions if each.broker_group in allowed]
    moves = plan_balance(movable, allowed, fixed=fixed)
    for move in moves:
        assert move.source in allowed
        assert move.target in allowed
    balanced = after(movable, moves)
    by_subject = defaultdict(list)
    for each in balanced:
        by_subject[each.subject].append(each.broker_group)
    assert all(spread(allowed, places) <= 1 for places in by_subject.values())
    totals = Counter(each.broker_group for each in balanced)
    for source, target in product(allowed, repeat=2):
        more = totals[source] + fixed.get(source, 0) - totals[target] - fixed.get(target, 0)
        is_stuck = all(
            places.count(source) <= places.count(target) for places in by_subject.values()
        )
        assert more <= 1 or is_stuck
    assert plan_balance(balanced, allowed, fixed=fixed) == []
