"""A copy beside the broker that it follows: what it has after messages, retention, restarts and
crashes, and what it refuses.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from keylane.broker.copies.follow_service import FollowService
from keylane.broker.copies.follower import Follower
from keylane.broker.metrics import collect_copies
from keylane.broker.offline.promotion import promote_copy
from keylane.broker.partition.damage import describe_damage
from keylane.broker.partition.image import encode_partition
from keylane.broker.storage.copy_file import read_copy_file
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.store.store import Store
from keylane.protocol.errors import (
    DataFolderError,
    FolderRefusedError,
    InvalidRequestError,
    NotSentError,
    Reason,
    WrongBrokerError,
)
from keylane.protocol.frames import Follow, Followed
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, in_place, open_store
from support.cluster import eventually
from support.raising import raises

SEGMENT_BYTES = 4_096
COPY_ID = "c" * 32


class FollowedBroker:
    """A broker that a follower in the same event loop calls without a network."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.clock = ManualClock()
        self.desk = Desk(
            open_store(disk, clock=self.clock, segment_bytes=SEGMENT_BYTES), self.clock
        )
        self.service = service_of(self.desk.store, self.clock, self.desk)
        self.sequence = 0
        self.is_silent = False
        self.closed = False

    @property
    def store(self) -> Store:
        return self.desk.store

    async def send(self, count: int) -> None:
        for _ in range(count):
            await self.desk.append(batch(sequence=self.sequence))
            self.sequence += 2

    async def remove(self, position: int) -> None:
        """As retention does."""
        await self.store.carry_over.rewrite_described(position)
        await self.store.carry_over.remove_segments(position)

    # ── as a network, and its channel ─────────────────────────────────────────────────────────────
    async def health(self) -> Any:
        return SimpleNamespace(details={"brokers": [{"broker_group": "g1", "address": "g1:1"}]})

    async def open_channel(self, _address: str, *, timeout_ms: int) -> Any:
        if self.is_silent:
            raise NotSentError("it is silent")
        return self

    async def call(self, request: Any, _payload: bytes = b"", *, timeout_ms: int) -> Any:
        if self.is_silent:
            raise NotSentError("it is silent")
        answer, data = await self.service.follow(request, memoryview(b""))
        return answer, memoryview(data)

    async def close(self) -> None:
        return None


def service_of(store: Store, clock: ManualClock, desk: Desk) -> FollowService:
    return FollowService(
        store,
        broker_group="g1",
        broker_id="b1",
        opening="o1",
        clock=clock,
        run_read=in_place,
        background_turn=desk.service.wait_background_turn,
    )


def follower_of(broker: FollowedBroker, disk: SimDisk) -> Follower:
    network: Any = broker
    return Follower(
        disk,
        "g1",
        meta=network,
        network=network,
        run_blocking=in_place,
        clock=broker.clock,
        rng=random.Random(1),
    )


async def until_equal(broker: FollowedBroker, follower: Follower, task: asyncio.Task[None]) -> None:
    await eventually(lambda: task.done() or follower.end == broker.store.log.end, seconds=20)
    if task.done():
        task.result()


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


def segments(disk: SimDisk) -> dict[str, bytes]:
    return {
        name: disk.pread(f"log/{name}", 0, disk.size(f"log/{name}") or 0).rstrip(b"\0")
        for name in disk.list("log")
        if name.endswith(".log")
    }


def images(store: Store) -> dict[int, bytes]:
    """The state of each partition; a start corrects first offsets, which follow the log."""
    for partition in store.state.partitions.values():
        partition.first_offset = 0
    return {number: encode_partition(each) for number, each in store.state.partitions.items()}


async def filled() -> FollowedBroker:
    broker = FollowedBroker(SimDisk())
    await broker.desk.host()
    await broker.desk.acquire(4)
    await broker.send(30)
    return broker


async def test_follower_has_the_same_segments_and_state_when_messages_come_and_segments_go():
    """Segments that the broker removes are removed here once the copy has what was repeated."""
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    for _ in range(4):
        await broker.send(40)
        await broker.remove(broker.store.log.bases[-1])
        await broker.send(2)
        await until_equal(broker, follower, task)
        await eventually(lambda: segments(disk).keys() == segments(broker.disk).keys())
    assert segments(disk) == segments(broker.disk)
    assert follower.is_complete
    await stop(task)

    promote_copy(disk)
    promoted = open_store(disk, segment_bytes=SEGMENT_BYTES)
    assert images(promoted) == images(broker.store)
    assert not describe_damage(promoted.state)


@pytest.mark.parametrize("seed", range(8))
async def test_follower_goes_on_when_it_crashes_and_when_its_broker_is_silent(seed: int):
    rng = random.Random(seed)
    broker, disk = await filled(), SimDisk()
    for _ in range(6):
        follower = follower_of(broker, disk)
        task = asyncio.ensure_future(follower.run())
        broker.is_silent = rng.random() < 0.3
        await broker.send(rng.randint(1, 12))
        for _ in range(rng.randint(0, 40)):
            await asyncio.sleep(0)
        broker.is_silent = False
        await stop(task)
        disk = disk.disk_after_crash(rng)
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    assert segments(disk) == segments(broker.disk)


async def test_follower_begins_anew_when_the_broker_has_removed_what_comes_next():
    """Until it has come as far as the broker then was, it cannot be promoted."""
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    await broker.send(60)
    await broker.remove(broker.store.log.bases[-1])
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    assert segments(disk) == segments(broker.disk)
    copy = read_copy_file(disk)
    assert copy is not None
    assert copy.complete_at <= follower.end


async def test_copy_is_not_promoted_when_it_was_never_complete():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    follower._open()
    answer, data = await broker.service.follow(Follow("g1", COPY_ID, -1, 100, 0), memoryview(b""))
    assert isinstance(answer, Followed)
    follower._store(answer, memoryview(data))
    with pytest.raises(DataFolderError, match="never complete"):
        promote_copy(disk)
    assert read_copy_file(disk) is not None


async def test_copy_with_other_bytes_is_refused_and_not_changed():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    other = await filled()
    await other.send(5)
    before = segments(disk)
    disk.contents[segment_path(max(broker.store.log.bases))].data[-1] ^= 1
    with raises(Reason.COPY_DIFFERS):
        await follower_of(other, disk).run()
    assert segments(disk).keys() == before.keys()


async def test_follower_compares_again_when_its_broker_was_restarted_on_another_log():
    """The connection is opened anew without a word to the follower; the name of the opening
    tells it.
    """
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    other = FollowedBroker(SimDisk())
    await other.desk.host(subject="other_one")
    await other.desk.acquire(4)
    await other.send(60)
    other.service._opening = "o2"
    broker.service = other.service
    await broker.send(1)
    with raises(Reason.COPY_DIFFERS):
        await asyncio.wait_for(task, 20)
    assert segments(disk) == segments(broker.disk)


async def test_follower_refuses_another_folder_of_the_group():
    """As after a loss that was accepted: the copy may be all that is left."""
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    before = segments(disk)
    await broker.send(60)
    await broker.remove(broker.store.log.bases[-1])
    broker.service._broker_id = "b2"
    with raises(Reason.COPY_DIFFERS):
        await follower_of(broker, disk).run()
    assert segments(disk) == before


async def test_follower_refuses_a_copy_that_has_lost_its_end():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    path = f"log/{max(segments(disk))}"
    file = disk.open_append(path)
    file.truncate((disk.size(path) or 0) - 100)
    file.close()
    with pytest.raises(DataFolderError, match="had synced"):
        await follower_of(broker, disk).run()


async def test_copy_that_is_ahead_of_its_broker_is_refused():
    broker = await filled()
    end = broker.store.log.end
    with raises(Reason.COPY_DIFFERS) as refused:
        await broker.service.follow(Follow("g1", COPY_ID, end + 1, 100, 0), memoryview(b""))
    assert isinstance(refused.value, FolderRefusedError)
    assert (refused.value.log_end, refused.value.known_log_end) == (end + 1, end)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Follow("g2", COPY_ID, 0, 100, 0), WrongBrokerError),
        (Follow("g1", "", 0, 100, 0), InvalidRequestError),
        (Follow("g1", COPY_ID, 0, 0, 0), InvalidRequestError),
        (Follow("g1", COPY_ID, 0, 100, -1), InvalidRequestError),
        (Follow("g1", COPY_ID, 0, 100, 1 << 40), InvalidRequestError),
    ],
)
async def test_follow_is_refused_when_it_is_wrong(request_: Follow, error: type[Exception]):
    broker = await filled()
    with pytest.raises(error):
        await broker.service.follow(request_, memoryview(b""))
    assert broker.service.standings == []


async def test_broker_knows_how_far_its_copies_have_come():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await broker.send(1)
    await until_equal(broker, follower, task)
    await eventually(
        lambda: [each.position for each in broker.service.standings] == [broker.store.log.end]
    )
    await stop(task)
    broker.clock.advance(60_000)
    assert broker.service.standings == []


async def test_operators_see_how_far_a_copy_is_behind():
    broker = await filled()
    end = broker.store.log.end
    await broker.service.follow(Follow("g1", COPY_ID, end - 96, 100, 0), memoryview(b""))
    assert broker.service.view() == {COPY_ID: "96 bytes behind"}
    [metric] = await collect_copies(broker.service.lag_bytes)
    assert [(sample.labels, sample.value) for sample in metric.samples] == [({"copy": COPY_ID}, 96)]


async def test_copy_that_waits_is_answered_when_the_broker_stops():
    broker = await filled()
    end = broker.store.log.end
    request = Follow("g1", COPY_ID, end, 100, 20_000)
    waiting = asyncio.ensure_future(broker.service.follow(request, memoryview(b"")))
    await asyncio.sleep(0)
    broker.service.close()
    for answer in (await waiting, await broker.service.follow(request, memoryview(b""))):
        assert (answer[0].position, answer[1]) == (end, b"")
