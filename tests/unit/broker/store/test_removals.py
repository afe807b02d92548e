"""Groups that brokers forget and partitions that they drop: durable, fenced, never undone by a
restart or a late call.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from keylane.broker import metrics as series_of_metrics
from keylane.broker.control import BrokerControl
from keylane.broker.metrics import expire_series_loop
from keylane.broker.partition import dropped
from keylane.broker.partition.image import decode_partition, encode_partition
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.store.group_changes import drop_partition
from keylane.broker.store.holds import correct_first_offsets
from keylane.broker.store.traffic import SERIES_KEPT_MS
from keylane.protocol.control import DropPartition, HostPartition
from keylane.protocol.errors import (
    FencedError,
    FlushFailedError,
    GroupDeletedError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    TokenUnknownError,
)
from keylane.protocol.progress import ForgetGroup, RegisterGroups, SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, in_place, open_store, settings_of
from support.raising import raises

SEGMENT = 4096
GROUP = "audit"


class Shed:
    """A broker on a simulated disk."""

    def __init__(self) -> None:
        self.disk, self.clock = SimDisk(), ManualClock()
        self.open()

    def open(self) -> None:
        self.store = open_store(self.disk, clock=self.clock, segment_bytes=SEGMENT)
        self.desk = Desk(self.store, self.clock)
        self.control = BrokerControl(
            self.store, broker_group="g1", broker_id="id", clock=self.clock, registration=lambda: ""
        )

    def kill(self) -> None:
        """The power goes: what was not synced may be gone."""
        self.disk = self.disk.disk_after_crash(random.Random(1))
        self.open()

    async def fill(self, *partitions: int, start: int = 0, batches: int = 10) -> None:
        for number in range(start, start + batches):
            for partition_id in partitions:
                await self.desk.append(
                    batch(partition_id=partition_id, sequence=2 * number), partition_id
                )

    async def drop(self, number: int, *, subject: str = "", last_id: int = 9) -> None:
        body = DropPartition(subject=subject or facts(number).subject, last_id=last_id)
        await self.control.drop(body, {"id": str(number)})

    async def forget(self, token: int, *, group: str = GROUP) -> int:
        body = ForgetGroup(group=group, token=token)
        return (await self.control.forget(body, {"id": "1"})).token

    def groups(self) -> set[str]:
        return set(self.store.state.partition(1).groups)

    def cleaning(self) -> RetentionLoop:
        return RetentionLoop(
            self.store,
            self.disk,
            settings_of(segment_bytes=SEGMENT),
            clock=self.clock,
            run_commit=in_place,
            run_read=in_place,
        )


@pytest.fixture
async def shed() -> Shed:
    shed = Shed()
    for number in (1, 2):
        await shed.desk.host(number)
    return shed


# ── groups ────────────────────────────────────────────────────────────────────────────────────────
async def test_forgotten_group_is_gone_and_its_tokens_are_refused_when_the_broker_restarts(
    shed: Shed,
):
    await shed.fill(1)
    await shed.desk.acquire(4)
    await shed.desk.ack(4, (0, 7))
    assert await shed.forget(5) == 5
    for _ in range(2):
        assert shed.groups() == set()
        with pytest.raises(FencedError):
            await shed.desk.acquire(5)
        with pytest.raises(TokenUnknownError):
            await shed.desk.ack(4, (7, 8))
        with pytest.raises(FencedError):
            await shed.control.set_cursor(SetCursor(group=GROUP, token=5, cursor=0), {"id": "1"})
        shed.kill()


async def test_later_group_of_the_name_begins_at_the_first_message_when_its_token_is_higher(
    shed: Shed,
):
    await shed.fill(1)
    await shed.desk.acquire(4)
    await shed.desk.ack(4, (0, 7))
    await shed.forget(5)
    assert (await shed.desk.acquire(6)).cursor == 0
    await shed.desk.ack(6, (0, 3))
    assert await shed.forget(5) == 5  # a repeat that comes late
    shed.kill()
    assert shed.store.state.partition(1).groups[GROUP].acked.cursor == 3


async def test_announcement_from_before_the_deletion_is_refused_when_it_comes_late(shed: Shed):
    await shed.forget(5)
    for late in (RegisterGroups(groups=(GROUP,)), RegisterGroups(groups=(GROUP,), tokens_above=4)):
        with pytest.raises(GroupDeletedError):
            await shed.control.register_groups(late, {"id": "1"})
    told = facts(1)
    late_host = HostPartition(subject=told.subject, partition=told.partition, groups=(GROUP,))
    with pytest.raises(GroupDeletedError):
        await shed.control.host(late_host, {})
    assert shed.groups() == set()
    await shed.control.register_groups(RegisterGroups(groups=(GROUP,), tokens_above=5), {"id": "1"})
    assert shed.groups() == {GROUP}


async def test_ack_that_waits_for_its_commit_does_not_bring_the_group_back_when_it_is_forgotten(
    shed: Shed,
):
    """The record of an ack is made when the commit is taken, which may be after the group was
    forgotten.
    """
    await shed.fill(1)
    await shed.desk.acquire(4)
    partition = shed.store.state.partition(1)
    group = partition.groups[GROUP]
    group.acked.add(0, 3)
    group.mark_changed()
    saved = shed.store.save_progress(partition, group)
    await shed.forget(5)
    await saved
    shed.kill()
    assert shed.groups() == set()


async def test_image_has_the_tokens_of_forgotten_groups(shed: Shed):
    await shed.forget(5)
    partition = shed.store.state.partition(1)
    assert decode_partition(1, encode_partition(partition)).forgotten == {GROUP: 5}
    assert partition.status(now_ms=0).forgotten_token == 5


# ── partitions ────────────────────────────────────────────────────────────────────────────────────
async def test_dropped_partition_is_unknown_and_never_hosted_again_when_the_broker_restarts(
    shed: Shed,
):
    await shed.fill(1, 2)
    await shed.drop(1)
    for _ in range(2):
        with pytest.raises(PartitionUnknownError):
            await shed.fill(1, start=10)
        with raises(Reason.PARTITION_IN_USE):
            await shed.desk.host(1)
        assert [
            status.partition_id for status in (await shed.control.list(None, {})).partitions
        ] == [2]
        assert shed.store.state.problems == []
        shed.kill()
    await shed.drop(1)


async def test_call_to_host_is_refused_when_the_partition_was_dropped_before(shed: Shed):
    """A call may be overtaken by the deletion of its subject."""
    await shed.drop(7)
    with raises(Reason.PARTITION_IN_USE):
        await shed.desk.host(7)


async def test_partition_of_another_subject_is_not_dropped(shed: Shed):
    with pytest.raises(InvalidRequestError, match="belongs to subject"):
        await shed.drop(1, subject="other")
    await shed.fill(1)


async def test_partition_of_a_hidden_subject_is_dropped_under_its_name(shed: Shed):
    """Its facts name the subject that it was to be published in."""
    shed.store.host(msgspec.structs.replace(facts(3), hidden="flights.hidden-a"))
    await shed.drop(3, subject="flights.hidden-a")
    shed.kill()
    assert 3 not in shed.store.state.partitions
    assert shed.store.state.dropped.subjects == {"flights.hidden-a": 9}


async def test_whole_snapshot_does_not_bring_a_partition_back_when_only_changes_were_saved_since(
    shed: Shed,
):
    await shed.fill(1, 2)
    assert await shed.store.snapshotter.write()
    await shed.drop(1)
    assert await shed.store.snapshotter.write()
    shed.kill()
    assert set(shed.store.state.partitions) == {2}
    page = await shed.control.list(None, {})
    assert (page.dropped, page.dropped_id) == ({facts(1).subject: 9}, 1)


async def test_hosted_partition_stays_when_a_snapshot_joins_the_dropped_ones_around_it(
    shed: Shed, monkeypatch
):
    """Also after a kill, with the snapshot; an id that was never hosted between old ones is refused
    then.
    """
    monkeypatch.setattr(dropped, "RANGES_KEPT", 4)
    await shed.desk.host(16)
    for number in range(5, 40, 2):
        await shed.drop(number, subject="s")
    for _ in range(2):
        assert await shed.store.snapshotter.write()
        ranges = [each for body in shed.store.state.dropped.record_bodies() for each in body.ranges]
        assert ranges == [(5, 16), (17, 36), (37, 38), (39, 40)]
        assert set(shed.store.state.partitions) == {1, 2, 16}
        shed.kill()
    with raises(Reason.PARTITION_IN_USE):
        await shed.desk.host(6)
    await shed.desk.host(38)
    await shed.desk.host(41)


async def test_segments_go_at_any_age_when_all_their_messages_are_of_dropped_partitions(shed: Shed):
    """Only messages of partition 2 keep segments, and the ids of dropped partitions outlive their
    records.
    """
    await shed.fill(1, batches=100)
    await shed.fill(2, batches=20)
    cleaning = shed.cleaning()
    assert await cleaning.check() == 0
    before = len(shed.store.log.bases)
    await shed.drop(1)
    assert await cleaning.check() > 0
    assert len(shed.store.log.bases) < before / 2
    assert shed.store.state.partition(2).first_offset == 0
    for name in shed.disk.list("snapshot"):
        shed.disk.remove(f"snapshot/{name}")
    shed.kill()
    assert shed.store.state.problems == []
    with raises(Reason.PARTITION_IN_USE):
        await shed.desk.host(1)
    assert shed.store.state.partition(2).next_offset == 40


async def test_index_forgets_dropped_partitions_when_their_segments_are_gone(shed: Shed):
    """Subjects that come and go for years leave nothing in the index; a kill brings back what the
    next check takes.
    """
    cleaning = shed.cleaning()
    for number in range(3, 13):
        if number == 11:
            shed.kill()
            cleaning = shed.cleaning()
        await shed.desk.host(number)
        await shed.fill(number, batches=60)
        await shed.drop(number)
        assert await cleaning.check() > 0
        assert (
            len(shed.store.queues.partitions()) <= 2
        )  # the last two still have, or had until now, messages


async def test_segments_that_a_crash_left_go_at_the_next_start(shed: Shed):
    await shed.fill(1, batches=100)
    await shed.drop(1)
    shed.kill()
    assert await shed.cleaning().check() > 0


async def test_drop_and_forget_are_undone_when_the_write_fails(shed: Shed):
    await shed.fill(1)
    await shed.desk.acquire(4)
    before = encode_partition(shed.store.state.partition(1))
    shed.disk.failing_operation = "fdatasync"
    with pytest.raises(FlushFailedError):
        await shed.forget(5)
    assert encode_partition(shed.store.state.partition(1)) == before

    shed.disk.failing_operation = ""
    shed.kill()
    shed.disk.failing_operation = "fdatasync"
    with pytest.raises(FlushFailedError):
        await shed.drop(2)
    assert 2 in shed.store.state.partitions
    assert 2 not in shed.store.state.dropped


async def test_index_keeps_bounds_when_a_drop_is_undone(shed: Shed):
    """Retention comes between the drop and the sync that fails: the partition is hosted again, with
    its offsets.
    """
    await shed.fill(1)
    store = shed.store
    end, (_, following) = store.log.end, store.queues.bounds(1)
    ask = DropPartition(subject=facts(1).subject, last_id=9)
    undone = drop_partition(store, 1, ask, now_ms=shed.clock.boot_ms())
    assert 1 in store.state.dropped
    for _ in range(2):  # the first takes the batches, the second what has none
        correct_first_offsets(store.state, store.queues, first_position=end)
        store.queues.checkpoint(end)
    shed.disk.failing_operation = "fdatasync"
    with pytest.raises(FlushFailedError):
        await undone
    assert 1 in store.state.partitions
    assert store.queues.bounds(1) == (following, following)


async def test_series_of_a_deleted_subject_end_when_it_is_gone_for_five_minutes(shed: Shed) -> None:
    """Not while another partition of it is hosted; retention has no part in it."""
    await shed.fill(1, 2)
    subject, stored = facts(1).subject, shed.store.traffic.stored

    async def looked_at_after(milliseconds: int) -> set[str]:
        shed.clock.advance(milliseconds)
        running = asyncio.create_task(expire_series_loop(shed.store, shed.clock))
        for _ in range(50):  # turns of its first check
            await asyncio.sleep(0)
        running.cancel()
        return set(stored)

    await shed.drop(1)
    assert await looked_at_after(SERIES_KEPT_MS) == {subject}
    await shed.drop(2)
    assert await looked_at_after(SERIES_KEPT_MS - 1) == {subject}
    assert await looked_at_after(1) == set()


async def test_series_end_when_retention_waits_or_fails(shed: Shed, monkeypatch) -> None:
    """A check of retention that does not end holds up no series, and a fault of series is not told
    as one of retention.
    """
    await shed.fill(1)
    monkeypatch.setattr(series_of_metrics, "expire_series", failing := _Failing())
    cleaning = shed.cleaning()
    running = [
        asyncio.create_task(cleaning.run()),
        asyncio.create_task(expire_series_loop(shed.store, shed.clock)),
    ]
    for _ in range(50):
        await asyncio.sleep(0)
    for each in running:
        each.cancel()
    assert failing.calls == 1
    assert "bug" not in cleaning.problem


class _Failing:
    calls = 0

    async def __call__(self, *_told: object, **_more: object) -> None:
        self.calls += 1
        raise RuntimeError("a bug of series")
