"""A copy beside the broker that it follows: what it has after messages, retention, restarts and
crashes, and what it refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from copy import deepcopy
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from keylane.broker.copies.commitment import Commitment
from keylane.broker.copies.copied_log import CopiedLog
from keylane.broker.copies.folding import Folding
from keylane.broker.copies.follow_service import REMEMBERED_MAX, FollowService
from keylane.broker.copies.follower import NOTED_EVERY_MS, Follower
from keylane.broker.metrics import collect_copies, collect_cuts
from keylane.broker.offline.promotion import demote_folder, promote_candidate, read_candidate
from keylane.broker.partition.damage import describe_damage
from keylane.broker.partition.image import encode_partition
from keylane.broker.storage.copy_file import CopyFile, read_copy_file
from keylane.broker.storage.data_folder import copy_origin
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.store.agenda import EmptyAgenda
from keylane.broker.store.group_commit import Entry
from keylane.broker.store.store import Store
from keylane.protocol.copies import TakeOver
from keylane.protocol.errors import (
    ConflictError,
    DataFolderError,
    DiskFullError,
    FolderRefusedError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    Reason,
    WrongBrokerError,
)
from keylane.protocol.frames import Follow, Followed
from keylane.testing.machines.disk import Crashed, SimDisk
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


def follower_of(broker: FollowedBroker, disk: SimDisk, *, seed: int | None = None) -> Follower:
    network: Any = broker
    return Follower(
        disk,
        "g1",
        meta=network,
        network=network,
        run_blocking=in_place,
        clock=broker.clock,
        rng=random.Random(seed),
    )


async def until_equal(broker: FollowedBroker, follower: Follower, task: asyncio.Task[None]) -> None:
    await eventually(lambda: task.done() or follower.end == broker.store.log.end, seconds=20)
    if task.done():
        task.result()


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


async def copy_whole(broker: FollowedBroker, disk: SimDisk) -> Follower:
    """Run a follower until it has the log of its broker."""
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await stop(task)
    return follower


def copy_of(disk: SimDisk) -> CopyFile:
    copy = read_copy_file(disk)
    assert copy is not None
    return copy


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

    promote_candidate(disk, read_candidate(disk))
    promoted = open_store(disk, segment_bytes=SEGMENT_BYTES)
    assert images(promoted) == images(broker.store)
    assert not describe_damage(promoted.state)


async def test_copy_keeps_a_segment_until_it_has_what_the_broker_repeated_of_it(monkeypatch):
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    await broker.send(40)
    await broker.remove(broker.store.log.bases[1])
    repeated_end = broker.store.log.end
    ends: list[int] = []
    remove = CopiedLog._remove

    def note(copied: CopiedLog, base: int) -> None:
        ends.append(copied.end)
        remove(copied, base)

    monkeypatch.setattr(CopiedLog, "_remove", note)
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    assert not ends, "the repeats are in the newest commit, which may have to be cut"
    await broker.send(1)
    await until_equal(broker, follower, task)
    await eventually(lambda: ends)
    assert min(ends) > repeated_end
    await stop(task)


async def test_folder_that_was_copied_from_that_of_another_follower_gets_another_id():
    """Two folders must not count as one. The later follower keeps the id."""
    broker, first = await filled(), SimDisk()
    await copy_whole(broker, first)
    second = deepcopy(first)
    followers = [follower_of(broker, first, seed=7), follower_of(broker, second, seed=8)]
    tasks = []
    for follower in followers:
        tasks.append(asyncio.ensure_future(follower.run()))
        await until_equal(broker, follower, tasks[-1])
        await asyncio.sleep(0.01)
    await broker.send(1)
    for follower, task in zip(followers, tasks, strict=True):
        await until_equal(broker, follower, task)
    await broker.send(1)
    for follower, task in zip(followers, tasks, strict=True):
        await until_equal(broker, follower, task)
        await stop(task)
    ids = [copy_of(disk).copy_id for disk in (first, second)]
    assert ids[0] != ids[1]
    assert {each.copy_id for each in broker.service.standings} == set(ids)
    assert segments(first) == segments(second) == segments(broker.disk)


async def test_copy_counts_on_when_many_others_begin():
    """A follower whose disk is full begins anew with another id at each start."""
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    counted: list[int] = []
    for number in range(REMEMBERED_MAX + 10):
        begin = Follow("g1", f"{number:032}", -1, 100, 0, follower=str(number))
        await broker.service.follow(begin, memoryview(b""))
        if number % 20 == 0:
            await broker.send(1)
            await until_equal(broker, follower, task)
    broker.service.on_report = lambda _copy_id, position, _place: counted.append(position)
    await broker.send(1)
    await until_equal(broker, follower, task)
    await eventually(lambda: broker.store.log.end in counted)
    await stop(task)


async def test_follower_ends_when_its_empty_folder_is_on_a_full_disk():
    broker, disk = await filled(), SimDisk()
    disk.free_space = 0
    with pytest.raises(DiskFullError):
        await follower_of(broker, disk).run()
    disk.free_space = None
    await copy_whole(broker, disk)
    assert segments(disk) == segments(broker.disk)


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
    await copy_whole(broker, disk)
    assert segments(disk) == segments(broker.disk)


async def test_follower_begins_anew_when_the_broker_has_removed_what_comes_next():
    """Until it has come as far as the broker then was, it cannot be promoted."""
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    await broker.send(60)
    await broker.remove(broker.store.log.bases[-1])
    follower = await copy_whole(broker, disk)
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
        promote_candidate(disk, read_candidate(disk))
    assert read_copy_file(disk) is not None


async def test_copy_with_other_bytes_is_refused_and_not_changed():
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    await broker.send(5)
    disk.contents[segment_path(max(segment_bases(disk)))].data[-400] ^= 1
    before = segments(disk)
    with raises(Reason.COPY_DIFFERS):
        await follower_of(broker, disk).run()
    assert segments(disk) == before


async def test_copy_fetches_its_last_commit_again_when_that_is_damaged():
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    disk.contents[segment_path(max(segment_bases(disk)))].data[-1] ^= 1
    await copy_whole(broker, disk)
    assert segments(disk) == segments(broker.disk)


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
    await copy_whole(broker, disk)
    before = segments(disk)
    await broker.send(60)
    await broker.remove(broker.store.log.bases[-1])
    broker.service._broker_id = "b2"
    with raises(Reason.COPY_DIFFERS):
        await follower_of(broker, disk).run()
    assert segments(disk) == before


async def test_follower_refuses_a_copy_that_has_lost_its_end():
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    path = f"log/{max(segments(disk))}"
    file = disk.open_append(path)
    file.truncate((disk.size(path) or 0) - 100)
    file.close()
    with pytest.raises(DataFolderError, match="had synced"):
        await follower_of(broker, disk).run()


async def restarted(broker: FollowedBroker, disk: SimDisk) -> FollowedBroker:
    """Start a broker anew on a disk."""
    await broker.store.close()
    again = FollowedBroker(disk)
    again.sequence = broker.sequence
    again.service._opening = "o2"
    return again


@pytest.mark.parametrize("count", [0, 1, 12])
async def test_copy_is_cut_when_its_broker_has_lost_what_was_not_durable(count: int):
    """And has stored other records since: the broker's disk had nothing of a commit that the copy
    has, and that nobody was told of.
    """
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    lost = deepcopy(broker.disk)
    commit = broker.store.commit
    broker.service.may_be_ahead = lambda _copy_id: True
    commit.copy_wait.copies = Commitment(frozenset({COPY_ID}))
    for number in range(60):  # one commit, over several segments
        commit.add(Entry(batch(sequence=1_000 + number)), lambda _error: None)
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    log = broker.store.log
    await eventually(lambda: follower.end == log.written_end > log.end, seconds=20)
    assert segment_bases(disk)[-2] >= log.end
    await stop(task)
    commit.copy_wait.give_up("the broker stops")
    again = await restarted(broker, lost)
    await again.send(count)
    await copy_whole(again, disk)
    assert segments(disk) == segments(lost)
    promote_candidate(disk, read_candidate(disk))
    promoted = open_store(disk, segment_bytes=SEGMENT_BYTES)
    assert images(promoted) == images(again.store)


async def test_copy_is_cut_when_its_broker_was_restarted_and_has_stored_more_since():
    """What the broker has durable then says nothing of the bytes of the copy before they were
    compared.
    """
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    lost = deepcopy(broker.disk)
    commit, log = broker.store.commit, broker.store.log
    broker.service.may_be_ahead = lambda _copy_id: True
    commit.copy_wait.copies = Commitment(frozenset({COPY_ID}))
    for number in range(3):  # one commit
        commit.add(Entry(batch(sequence=1_000 + number)), lambda _error: None)
    await eventually(lambda: follower.end == log.written_end > log.end, seconds=20)
    broker.is_silent = True
    commit.copy_wait.give_up("the broker stops")
    again = await restarted(broker, lost)
    await again.send(20)
    broker.service, broker.is_silent = again.service, False
    await eventually(lambda: task.done() or follower.end == again.store.log.end, seconds=20)
    assert not task.done()
    assert segments(disk) == segments(lost)
    [cut] = await collect_cuts(follower)
    assert cut.name == "keylane_copy_cut_bytes"
    assert cut.samples[0].value > 0
    await stop(task)


async def test_copy_is_cut_when_its_broker_lost_its_place_before_the_copies_had_its_log():
    """
    The broker was restarted in a commit. It sends the end of its log to one copy; the other one,
    which acks wait for too, does not have it and gets the place.
    """
    broker, disk = await filled(), SimDisk()
    others = deepcopy(broker.disk)
    await broker.send(1)
    broker.service = service_of(broker.store, broker.clock, broker.desk)
    broker.service.knows_durable_end = lambda: False
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    broker.clock.advance(NOTED_EVERY_MS)
    broker.store.commit.copy_wait.on_write()  # an answer when it has everything
    await asyncio.sleep(0.01)
    assert copy_of(disk).durable_end == 0
    broker.is_silent = True
    again = await restarted(broker, others)
    again.sequence -= 2  # its producer sends the last batch again
    await again.send(20)
    broker.service, broker.is_silent = again.service, False
    await eventually(lambda: task.done() or follower.end == again.store.log.end, seconds=20)
    assert not task.done()
    assert segments(disk) == segments(others)
    await stop(task)


async def test_copy_is_not_cut_when_its_broker_has_lost_what_was_durable():
    """Its disk was put back, or has lost what it had synced; the follower was restarted since."""
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    lost = deepcopy(broker.disk)
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await broker.send(1)
    await until_equal(broker, follower, task)
    broker.clock.advance(NOTED_EVERY_MS)
    await eventually(lambda: copy_of(disk).durable_end == broker.store.log.end)
    await stop(task)
    kept = segments(disk)
    again = await restarted(broker, lost)
    with raises(Reason.COPY_DIFFERS):
        await copy_whole(again, disk)
    assert segments(disk) == kept
    promote_candidate(disk, read_candidate(disk))
    promoted = open_store(disk, segment_bytes=SEGMENT_BYTES)
    assert images(promoted) == images(broker.store)


async def test_follower_ends_when_its_folder_is_removed_under_it():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    for path in list(disk.contents):
        del disk.contents[path]
    await broker.send(1)
    with pytest.raises(DataFolderError, match="was removed"):
        await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("seed", range(20))
async def test_cut_of_a_copy_goes_on_after_a_crash(seed: int):
    rng = random.Random(seed)
    broker, disk = await filled(), SimDisk()
    await broker.send(100)
    await copy_whole(broker, disk)
    before = segments(disk)
    position = rng.choice(segment_bases(disk)[2:])
    copied = CopiedLog(disk)
    disk.crash_at = disk.steps + rng.randint(1, 12)
    with contextlib.suppress(Crashed):
        copied.cut(position)
    disk = disk.disk_after_crash(rng)
    left = CopiedLog(disk)
    assert position <= left.end <= broker.store.log.end
    assert not left.has_lost_bytes
    for name, data in segments(disk).items():
        assert before[name].startswith(data)
    await copy_whole(broker, disk)
    assert segments(disk) == segments(broker.disk)


async def test_copy_is_not_cut_to_what_an_older_folder_of_its_broker_has():
    """The broker had called the rest durable: the copy may be all that has it."""
    broker, disk = await filled(), SimDisk()
    older = deepcopy(broker.disk)
    await broker.send(1)
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    before = segments(disk)
    again = FollowedBroker(older)
    again.service._opening = "o2"
    broker.service = again.service
    with raises(Reason.COPY_DIFFERS):
        await asyncio.wait_for(task, 20)
    assert segments(disk) == before


async def test_follower_looks_for_another_broker_when_no_metaserver_accepts_its_own():
    broker, disk = await filled(), SimDisk()
    broker.service._is_accepted = lambda: False
    request = Follow("g1", COPY_ID, 0, 100, 0)
    with pytest.raises(WrongBrokerError):
        await broker.service.follow(request, memoryview(b""))
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await asyncio.sleep(0.05)
    broker.service._is_accepted = lambda: True
    await until_equal(broker, follower, task)
    await stop(task)


async def test_copy_gets_nothing_of_a_plan_that_is_not_written_to_its_end():
    """A disk that is full may undo the part which is in the segment before."""
    broker = await filled()
    log = broker.store.log
    end, base = log.end, log.bases[-1]
    broker.disk.contents[segment_path(base)].data[end - base : end - base + 300] = b"x" * 300
    log._bases = [*log.bases, end + 300]
    request = Follow("g1", COPY_ID, end - 50, 1_000, 0)
    _, data = await broker.service.follow(request, memoryview(b""))
    assert len(data) == 50


@pytest.mark.parametrize("index", [1, -1])
async def test_copy_that_has_lost_bytes_is_not_promoted(index: int):
    broker, disk = await filled(), SimDisk()
    await broker.send(60)
    await copy_whole(broker, disk)
    path = segment_path(segment_bases(disk)[index])
    disk.unprotect(path)
    file = disk.open_append(path)
    file.truncate((disk.size(path) or 0) - 100)
    file.close()
    with pytest.raises(DataFolderError, match="has lost bytes"):
        read_candidate(disk)


async def test_follower_ends_when_its_disk_is_full_and_goes_on_where_it_ended():
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    await broker.send(20)
    disk.free_space = 1_000
    with pytest.raises(DiskFullError):
        await asyncio.wait_for(follower_of(broker, disk).run(), 20)
    disk.free_space = None
    await copy_whole(broker, disk)
    assert segments(disk) == segments(broker.disk)


async def test_follower_refuses_a_copy_of_another_broker_group():
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    follower = follower_of(broker, disk)
    follower._broker_group = "g2"
    with pytest.raises(DataFolderError, match="is a copy of broker group g1, not of g2"):
        await follower.run()


@pytest.mark.parametrize("tail_start", [-1, 0])
async def test_copy_that_is_ahead_of_its_broker_is_refused(tail_start: int):
    broker = await filled()
    end = broker.store.log.end
    request = Follow("g1", COPY_ID, end + 1, 100, 0, tail_start)
    with raises(Reason.COPY_DIFFERS) as refused:
        await broker.service.follow(request, memoryview(b""))
    assert isinstance(refused.value, FolderRefusedError)
    assert (refused.value.log_end, refused.value.known_log_end) == (end + 1, end)


async def test_tail_that_begins_behind_its_end_is_refused():
    broker = await filled()
    end = broker.store.log.end
    with pytest.raises(InvalidRequestError):
        await broker.service.follow(Follow("g1", COPY_ID, end, 100, 0, end + 1), memoryview(b""))


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
    request = Follow("g1", COPY_ID, end - 96, 100, 0, machine="m1", zone="a")
    await broker.service.follow(request, memoryview(b""))
    expected = {
        "bytes_behind": 96,
        "machine": "m1",
        "zone": "a",
        "shared_machine": "",
        "reads_at": "",
    }
    assert broker.service.view({COPY_ID}, {}) == {COPY_ID: {**expected, "in_set": True}}
    shared = {COPY_ID: "it is on the machine of the broker"}
    expected["shared_machine"] = shared[COPY_ID]
    assert broker.service.view((), shared) == {COPY_ID: {**expected, "in_set": False}}
    [metric, *_] = await collect_copies(broker.service)
    assert [(sample.labels, sample.value) for sample in metric.samples] == [({"copy": COPY_ID}, 96)]


async def test_scrape_says_how_long_ago_a_copy_had_everything_and_what_it_was_sent():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await eventually(lambda: broker.service.lag_bytes() == {copy_of(disk).copy_id: 0})
    await stop(task)
    broker.clock.advance(3_000)
    assert list(broker.service.lag_ms().values()) == [0]
    await broker.send(1)
    broker.clock.advance(1_500)
    _, seconds, sent = await collect_copies(broker.service)
    assert seconds.name == "keylane_broker_copy_lag_seconds"
    assert [sample.value for sample in seconds.samples] == [4.5]
    assert [sample.value for sample in sent.samples] == [follower.end]


async def test_copy_counts_only_once_its_log_was_compared():
    """Where it ends says nothing of the bytes before: the broker may be on another folder."""
    broker = await filled()
    counted: list[int] = []
    broker.service.on_report = lambda _copy_id, position, _place: counted.append(position)
    end = broker.store.log.end
    await broker.service.follow(Follow("g1", COPY_ID, end, 100, 0), memoryview(b""))
    assert not counted
    start, _, crc = CopiedLog(deepcopy(broker.disk)).tail(end, -1)
    await broker.service.follow(Follow("g1", COPY_ID, end, 100, 0, start, crc), memoryview(b""))
    await broker.service.follow(Follow("g1", COPY_ID, end, 100, 0), memoryview(b""))
    assert counted == [end, end]


async def test_copy_is_behind_by_a_commit_that_waits_for_it():
    broker = await filled()
    broker.service.may_be_ahead = lambda copy_id: copy_id == COPY_ID
    broker.store.commit.copy_wait.copies = Commitment(frozenset({COPY_ID}))
    sending = asyncio.ensure_future(broker.send(1))
    log = broker.store.log
    await eventually(lambda: log.written_end > log.end)
    await broker.service.follow(Follow("g1", COPY_ID, log.end, 100, 0), memoryview(b""))
    assert broker.service.lag_bytes() == {COPY_ID: log.written_end - log.end}
    await broker.service.follow(Follow("g1", COPY_ID, log.written_end, 100, 0), memoryview(b""))
    assert broker.service.lag_bytes() == {COPY_ID: 0}
    broker.store.commit.copy_wait.give_up("the test is over")
    await asyncio.gather(sending, return_exceptions=True)


async def test_folder_of_a_replaced_broker_becomes_a_copy_of_the_one_in_its_place():
    """It is cut to what both have, and serves again with the state of the other one."""
    broker, disk = await filled(), SimDisk()
    await copy_whole(broker, disk)
    sequence = broker.sequence
    await broker.send(1)  # of which no copy has synced anything
    assert await broker.store.snapshotter.write()
    replaced = deepcopy(broker.disk)
    copy_origin(replaced, broker_group="g1", broker_id="b1", opening="o1")
    promote_candidate(disk, read_candidate(disk))
    successor = FollowedBroker(disk)
    await successor.desk.append(batch(sequence=sequence, count=3))
    successor.sequence = sequence + 3

    demote_folder(replaced, copy_id=COPY_ID)
    follower = follower_of(successor, replaced)
    task = asyncio.ensure_future(follower.run())
    await until_equal(successor, follower, task)
    await successor.send(2)
    await until_equal(successor, follower, task)
    await stop(task)
    assert segments(replaced) == segments(disk)
    assert copy_of(replaced).copy_id == COPY_ID
    promote_candidate(replaced, read_candidate(replaced))
    assert images(open_store(replaced, segment_bytes=SEGMENT_BYTES)) == images(successor.store)


async def test_follower_has_the_place_of_its_broker_when_a_metaserver_gives_it():
    """It asks only while the broker cannot be reached, and follows again if it is told to wait."""
    broker, disk = await filled(), SimDisk()
    answers: list[KeylaneError | None] = [ConflictError(Reason.BROKER_SERVES, "it serves"), None]
    asked: list[TakeOver] = []

    async def call(_endpoint: object, request: TakeOver, *, group: str) -> None:
        assert group == "g1"
        asked.append(request)
        if error := answers.pop(0):
            broker.is_silent = False
            raise error

    follower = follower_of(broker, disk)
    follower._takes_over = True
    follower._meta = SimpleNamespace(health=broker.health, call=call)  # type: ignore[assignment]
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    broker.is_silent = True
    await eventually(lambda: asked)
    await broker.send(2)
    await until_equal(broker, follower, task)
    broker.is_silent = True
    await asyncio.wait_for(task, 20)
    assert [each.log_end for each in asked] == [asked[0].log_end, broker.store.log.end]
    assert asked[0].copy_id == copy_of(disk).copy_id
    promote_candidate(disk, read_candidate(disk))


async def test_copy_follows_the_one_that_has_the_place_while_its_old_broker_hangs() -> None:
    """An attempt to connect to the old one does not hold it up."""
    broker, disk = await filled(), SimDisk()
    addresses, asked = ["old:1"], asyncio.Event()

    async def health() -> object:
        return SimpleNamespace(
            details={"brokers": [{"broker_group": "g1", "address": addresses[-1]}]}
        )

    async def call(_endpoint: object, _request: TakeOver, *, group: str) -> None:
        asked.set()
        raise ConflictError(Reason.BROKER_SERVES, f"{group} was given to another copy")

    async def open_channel(address: str, *, timeout_ms: int) -> object:
        if address == "old:1" and broker.is_silent:
            await asyncio.Event().wait()
        return broker

    follower = follower_of(broker, disk)
    follower._takes_over = True
    follower._meta = SimpleNamespace(health=health, call=call)  # type: ignore[assignment]
    follower._network = SimpleNamespace(open_channel=open_channel)  # type: ignore[assignment]
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    broker.is_silent = True  # the connection ends, and the next one does not come
    await asyncio.wait_for(asked.wait(), 20)
    asked.clear()
    await asyncio.wait_for(asked.wait(), 20)  # while it tries to connect
    broker.is_silent, addresses[-1] = False, "new:1"
    await broker.send(2)
    await until_equal(broker, follower, task)
    await stop(task)


async def test_copy_says_once_why_it_does_not_take_the_place_of_its_broker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, disk = await filled(), SimDisk()
    asked: list[TakeOver] = []

    async def call(_endpoint: object, request: TakeOver, *, group: str) -> None:
        asked.append(request)
        raise ConflictError(Reason.COPY_LACKS_ACKED, f"acks of {group} do not wait for it")

    follower = follower_of(broker, disk)
    follower._takes_over = True
    follower._meta = SimpleNamespace(health=broker.health, call=call)  # type: ignore[assignment]
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    broker.is_silent = True
    await eventually(lambda: len(asked) > 2)
    told = [each for each in caplog.messages if "does not take the place" in each]
    assert len(told) == 1
    assert told[0].endswith("of the broker of group g1: acks of g1 do not wait for it")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_copy_follows_on_when_its_metaserver_does_not_know_take_overs():
    """A metaserver of the version before."""
    broker, disk = await filled(), SimDisk()
    asked: list[TakeOver] = []

    async def call(_endpoint: object, request: TakeOver, *, group: str) -> None:
        asked.append(request)
        raise InvalidRequestError(f"404 Not Found: {group}", unknown_call=1)

    follower = follower_of(broker, disk)
    follower._takes_over = True
    follower._meta = SimpleNamespace(health=broker.health, call=call)  # type: ignore[assignment]
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    broker.is_silent = True
    await eventually(lambda: len(asked) > 1)
    broker.is_silent = False
    await broker.send(1)
    await until_equal(broker, follower, task)
    assert segments(disk) == segments(broker.disk)
    await stop(task)


async def test_copy_that_is_kept_ready_has_the_state_that_a_start_reads() -> None:
    """Over a removal of segments, and after its log was begun anew."""
    broker, disk = await filled(), SimDisk()
    clock = ManualClock()
    folding = Folding(disk, "file", make_agenda=EmptyAgenda, clock=clock, run_blocking=in_place)
    follower = follower_of(broker, disk)
    follower._folding = folding
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)
    await broker.send(40)
    await broker.remove(segment_bases(broker.disk)[-2])
    await until_equal(broker, follower, task)
    folding.begin_anew()
    await broker.send(2)
    await until_equal(broker, follower, task)
    end = broker.store.log.end

    def applied() -> bool:
        return folding._recovery is not None and folding._recovery.position == end

    await eventually(applied)  # it knows after the next answer that all is durable
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    recovery = await folding.finish()
    assert recovery is not None
    ours = recovery.finish().state.partitions
    theirs = broker.store.state.partitions
    assert sorted(ours.ids()) == sorted(theirs.ids())
    for each in theirs.ids():
        assert ours[each].next_offset == theirs[each].next_offset
        assert ours[each].producers.keys() == theirs[each].producers.keys()


async def test_follower_finds_its_broker_again_when_no_metaserver_answers():
    broker, disk = await filled(), SimDisk()
    follower = follower_of(broker, disk)
    task = asyncio.ensure_future(follower.run())
    await until_equal(broker, follower, task)

    async def health() -> None:
        raise NotSentError("no metaserver answers")

    follower._meta = SimpleNamespace(health=health)  # type: ignore[assignment]
    broker.is_silent = True
    await eventually(lambda: follower._broker is None)
    broker.is_silent = False
    await broker.send(2)
    await until_equal(broker, follower, task)
    await stop(task)


async def test_copy_does_not_count_with_what_it_is_about_to_store():
    broker = await filled()
    counted: list[int] = []
    broker.service.on_report = lambda _copy_id, position, _place: counted.append(position)
    end = broker.store.log.end
    start, _, crc = CopiedLog(deepcopy(broker.disk)).tail(end, -1)
    request = Follow("g1", COPY_ID, end, 100, 0, start, crc)
    await broker.service.follow(request, memoryview(b""))
    ahead = msgspec.structs.replace(request, tail_start=-1, unsynced_bytes=40)
    await broker.service.follow(ahead, memoryview(b""))
    assert counted == [end, end - 40]
    for wrong in (-1, end + 1):
        request = msgspec.structs.replace(ahead, unsynced_bytes=wrong)
        with raises(InvalidRequestError):
            await broker.service.follow(request, memoryview(b""))


async def test_follower_asks_ahead_while_it_stores_when_its_broker_has_more():
    broker, disk = await filled(), SimDisk()
    asked: list[tuple[int, int, int]] = []
    follow = broker.service.follow

    async def note(request: Follow, payload: memoryview) -> Any:
        answer = await follow(request, payload)
        asked.append((request.position, request.unsynced_bytes, len(answer[1])))
        return answer

    broker.service.follow = note  # type: ignore[method-assign]
    task = asyncio.ensure_future(follower_of(broker, disk).run())
    await eventually(lambda: asked and asked[-1][:2] == (broker.store.log.end, 0))
    await stop(task)
    assert segments(disk) == segments(broker.disk)
    stored = [0, *accumulate(length for _, _, length in asked[1:])]
    assert [position for position, _, _ in asked[1:]] == stored[: len(asked) - 1]
    lengths = [length for _, _, length in asked]
    assert [ahead for _, ahead, _ in asked[2:-1]] == lengths[1:-2], "of the answer before"


async def test_copy_that_waits_is_answered_when_the_broker_stops():
    broker = await filled()
    end = broker.store.log.end
    request = Follow("g1", COPY_ID, end, 100, 20_000)
    waiting = asyncio.ensure_future(broker.service.follow(request, memoryview(b"")))
    await asyncio.sleep(0)
    broker.service.close()
    for answer in (await waiting, await broker.service.follow(request, memoryview(b""))):
        assert (answer[0].position, answer[1]) == (end, b"")
