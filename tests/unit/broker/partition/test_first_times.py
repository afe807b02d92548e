"""The time of a partition's first message, for the parents that its broker has."""

from __future__ import annotations

from keylane.broker.partition.first_times import AHEAD_MS_MAX, counts, first_time_ms
from keylane.broker.partition.partition import HostedPartition
from sim.machines.store import facts

NOW_MS = 1_700_000_000_000


def ended(at_ms: int) -> HostedPartition:
    partition = HostedPartition(facts(1))
    partition.appended_at_ms = at_ms
    return partition


def test_partition_begins_where_the_last_of_its_parents_ends_when_the_calendar_is_behind():
    parents = [ended(NOW_MS + 2), None, ended(NOW_MS + 3), ended(0)]
    assert first_time_ms(parents, NOW_MS) == NOW_MS + 3


def test_partition_begins_with_the_calendar_when_that_is_past_its_parents():
    assert first_time_ms([ended(NOW_MS - 1), None], NOW_MS) == NOW_MS
    assert first_time_ms([], NOW_MS) == NOW_MS


def test_partition_begins_with_the_calendar_when_a_parent_ends_too_far_ahead():
    assert counts(NOW_MS + AHEAD_MS_MAX, NOW_MS)
    assert not counts(NOW_MS + AHEAD_MS_MAX + 1, NOW_MS)
    assert (
        first_time_ms([ended(NOW_MS + AHEAD_MS_MAX + 1), ended(NOW_MS + 1)], NOW_MS) == NOW_MS + 1
    )
