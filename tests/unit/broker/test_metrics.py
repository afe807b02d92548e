"""How far groups are behind, as a scrape counts it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.broker import metrics as metrics_module
from keylane.broker.metrics import BrokerMetrics, lag_of
from keylane.broker.partition.partition import Group, HostedPartition
from keylane.broker.store.traffic import OTHER
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import HostPartition
from keylane.protocol.routing import Partition, PartitionState
from keylane.rpc.operating.metrics import largest
from keylane.testing.machines.disk import SimDisk
from support.parked.desk import ParkedDesk


def hosted(readable_offset: int, first_offset: int) -> HostedPartition:
    partition = HostedPartition(
        HostPartition(
            subject="orders",
            partition=Partition(
                partition_id=1,
                name="orders-1",
                queue=0,
                range_start=0,
                range_end=1024,
                broker_group="g1",
                state=PartitionState.OPEN,
            ),
        )
    )
    partition.first_offset, partition.readable_offset = first_offset, readable_offset
    return partition


@given(st.sets(st.integers(0, 40)), st.tuples(st.integers(0, 41), st.integers(0, 41)))
def test_lag_is_the_messages_stored_and_not_acked(acked: set[int], bounds: tuple[int, int]) -> None:
    """As a count of offsets by hand, with acks above the cursor, and messages that are removed."""
    first, end = sorted(bounds)
    group = Group("billing")
    for offset in sorted(acked):
        if offset < end:
            group.acked.add(offset, offset + 1)
    left = set(range(first, end)) - acked
    assert lag_of(hosted(end, first), group) == len(left)


@pytest.fixture
async def desk() -> ParkedDesk:
    return await ParkedDesk(SimDisk()).fill()


async def test_figures_leave_out_partitions_beyond_the_limit_of_a_scan(
    desk: ParkedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say how many they have left out."""
    monkeypatch.setattr(metrics_module, "SCANNED_MAX", 0)
    figures = BrokerMetrics(desk.store, desk.disk, clock=SystemClock())
    families = {family.name: family for family in await figures.collect()}
    (left_out,) = families["keylane_broker_partitions_left_out"].samples
    assert left_out.value == len(desk.store.state.partitions)
    assert not families["keylane_group_lag_messages"].samples


async def test_rest_of_the_subjects_never_goes_back_when_one_of_them_is_deleted(
    desk: ParkedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from where it was with what others store."""
    monkeypatch.setattr(metrics_module, "largest", partial(largest, most=1))
    traffic = desk.store.traffic
    figures = BrokerMetrics(desk.store, desk.disk, clock=SystemClock())

    async def rest() -> float:
        families = {family.name: family for family in await figures.collect()}
        samples = families["keylane_broker_stored_messages"].samples
        return sum(sample.value for sample in samples if sample.labels == {"subject": OTHER})

    traffic.stored.clear()
    for subject, messages in (("a", 100), ("b", 5), ("c", 7)):
        traffic.count_stored(subject, messages=messages, size_bytes=1)
    assert await rest() == 12
    traffic.remove_series({"c"}, hosted=())
    assert await rest() == 12
    traffic.count_stored("b", messages=2, size_bytes=1)
    assert await rest() == 14
    traffic.remove_series({"b"}, hosted=())
    assert await rest() == 14


async def families_of(figures: BrokerMetrics) -> dict[str, dict[str, float]]:
    """Maps the samples of each metric of groups to their values, by group."""
    return {
        family.name: {
            f"{sample.labels['group']} {sample.labels.get('le', '')}".strip(): sample.value
            for sample in family.samples
            if not sample.name.endswith("_sum")
        }
        for family in await figures.collect()
        if family.name.startswith("keylane_group_")
    }


async def test_largest_groups_have_figures_of_their_own_when_there_are_too_many(
    desk: ParkedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that came first; the rest is one sample, which never falls."""
    monkeypatch.setattr(metrics_module, "largest", partial(largest, most=2))
    monkeypatch.setattr(metrics_module, "LATENCIES_MAX", 2)
    traffic = desk.store.traffic
    monkeypatch.setattr(traffic, "remove_groups", lambda hosted: None)
    figures = BrokerMetrics(desk.store, desk.disk, clock=SystemClock())
    traffic.groups.clear()

    def act(group: str, count: int) -> None:
        flow = traffic.group("orders", group)
        flow.dead += count
        for _ in range(count):
            flow.latency.observe(2_000_000)

    for group, count in (("a", 1), ("b", 2), ("c", 9), ("d", 8)):
        act(group, count)
    dead, latency = "keylane_group_dead_letters", "keylane_group_latency_seconds"
    first = await families_of(figures)
    assert first[dead] == {"c": 9, "d": 8, OTHER: 3}
    counts = {name: value for name, value in first[latency].items() if name.endswith("+Inf")}
    assert counts == {"c +Inf": 9, "d +Inf": 8, f"{OTHER} +Inf": 3}
    act("b", 8)
    later = await families_of(figures)
    assert later[dead] == {"c": 9, "b": 10, OTHER: 9}
    del traffic.groups["orders", "d"]
    last = await families_of(figures)
    assert (last[dead][OTHER], last[latency][f"{OTHER} +Inf"]) == (9, 9)
