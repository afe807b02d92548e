"""What each request does, in which order, and what it is refused for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from keylane.broker.store.group_changes import drop_partition
from keylane.protocol.batch import batch_starts
from keylane.protocol.control import DropPartition
from keylane.protocol.errors import (
    CorruptBatchError,
    FencedError,
    InvalidRequestError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    SequenceGapError,
    StaleRouteError,
    TokenUnknownError,
)
from keylane.protocol.frames import Ack, Acquire, Append, Pull, Read, Release
from keylane.protocol.message import pack_properties
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, facts, open_store
from support.raising import raises

OTHER = "b" * 16


@pytest.fixture
async def desk() -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock), clock)
    await desk.host()
    return desk


async def turns(count: int = 5) -> None:
    """Let the tasks that can run, run."""
    for _ in range(count):
        await asyncio.sleep(0)


# ── append ────────────────────────────────────────────────────────────────────────────────────────
async def test_pipelined_appends_keep_their_order(desk):
    """Batches sent without waiting are stored in the order of arrival."""
    answers = await asyncio.gather(
        *(desk.append(batch(sequence=3 * n, count=3)) for n in range(20))
    )
    assert [answer.base_offset for answer in answers] == list(range(0, 60, 3))
    assert {answer.durable for answer in answers} == {"fsync"}


async def test_after_a_refused_batch_the_following_are_refused(desk):
    """A hole in the pipeline stops everything behind it, and the same batches go through when sent
    again.
    """
    damaged = bytearray(batch(sequence=2))
    damaged[-1] ^= 1
    first, *failed = await asyncio.gather(
        desk.append(batch(sequence=0)),
        desk.append(bytes(damaged)),
        desk.append(batch(sequence=4)),
        desk.append(batch(sequence=6)),
        return_exceptions=True,
    )
    assert first.base_offset == 0
    assert [type(error) for error in failed] == [
        CorruptBatchError,
        SequenceGapError,
        SequenceGapError,
    ]
    again = [await desk.append(batch(sequence=n)) for n in (0, 2, 4, 6)]
    assert [answer.base_offset for answer in again] == [0, 2, 4, 6]
    assert [answer.duplicate for answer in again] == [True, False, False, False]


async def test_duplicate_is_answered_only_when_the_first_is_durable(desk):
    """A batch sent twice at once is stored once, and neither is answered before the sync."""
    first, second = await asyncio.gather(desk.append(batch()), desk.append(batch()))
    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.base_offset == second.base_offset == 0
    assert desk.store.state.partition(1).next_offset == 2


async def test_duplicate_waits_for_the_sync_of_the_first(desk):
    """While the first is at the disk, the answer to the second is held back as well."""
    gate = asyncio.Event()

    async def slow(function, /, *args):
        await gate.wait()
        return function(*args)

    desk.store.commit._run_blocking = slow
    first = asyncio.create_task(desk.append(batch()))
    await turns()
    second = asyncio.create_task(desk.append(batch()))
    acquire = [asyncio.create_task(desk.acquire(1)) for _ in range(2)]
    await turns()
    assert not any(task.done() for task in (first, second, *acquire))
    gate.set()
    assert (await second).duplicate
    await asyncio.gather(first, *acquire)


@pytest.mark.parametrize(
    ("data", "partition_id", "error"),
    [
        (b"", 1, CorruptBatchError),
        (b"x" * 500, 1, CorruptBatchError),
        (batch()[:-1], 1, CorruptBatchError),
        (batch() + b"x", 1, CorruptBatchError),
        (batch() + batch(sequence=2), 1, CorruptBatchError),
        (batch(partition_id=2), 1, InvalidRequestError),
        (batch(partition_id=9), 9, PartitionUnknownError),
        (batch(partition_id=2**63), 2**63, PartitionUnknownError),
        (batch(sequence=10), 1, SequenceGapError),
    ],
)
async def test_bad_appends_store_nothing(desk, data, partition_id, error):
    """Whatever is wrong with an append, it is a typed error and the log does not grow."""
    end = desk.store.log.end
    with raises(error):
        await desk.append(data, partition_id)
    assert desk.store.log.end == end
    assert (await desk.append(batch())).base_offset == 0


async def test_sealed_partition_takes_no_append(desk):
    """After the seal an append is told to look for a new route; a duplicate is still known; readers
    see the end.
    """
    await desk.append(batch())
    _, durable = desk.store.seal(1)
    await durable
    with pytest.raises(StaleRouteError):
        await desk.append(batch(sequence=2))

    assert (await desk.append(batch())).duplicate
    answer, _ = await desk.read(2)
    assert (answer.sealed, answer.next_offset, answer.upto) == (True, 2, 2)


# ── read and pull ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_batches_come_back_as_they_were_sent(cache_bytes):
    """Memory or disk: the bodies are byte for byte what the producer packed, contiguous, bounded,
    at least one.
    """
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, cache_bytes=cache_bytes, segment_bytes=4096)
    desk = Desk(store, clock)
    await desk.host()
    await desk.host(2)
    sent = [batch(sequence=10 * n, count=10) for n in range(40)]
    for number, data in enumerate(sent):
        await desk.append(data)
        await desk.append(batch(partition_id=2, sequence=2 * number), 2)
    offset = 0
    bodies = []
    while offset < 400:
        answer, payload = await desk.read(offset, bytes_max=3 * len(sent[0]) + 50)
        assert len(payload) <= 3 * len(sent[0]) + 50
        headers = batch_starts(payload)
        assert headers[0][1].base_offset == offset
        assert headers[-1][1].next_offset == answer.upto
        bodies += [payload[start + 96 : start + header.length] for start, header in headers]
        offset = answer.upto
    assert bodies == [data[96:] for data in sent]

    answer, payload = await desk.read(0, bytes_max=1)
    assert (answer.upto, answer.first_offset, answer.next_offset) == (10, 0, 400)
    answer, payload = await desk.read(15, bytes_max=1)
    assert batch_starts(payload)[0][1].base_offset == 10
    assert answer.upto == 20


@pytest.mark.parametrize(
    ("offset", "error"),
    [
        (-1, Reason.OFFSET_INVALID),
        (2**63, Reason.OFFSET_INVALID),
        (2**80, Reason.OFFSET_INVALID),
        (3, OffsetOutOfRangeError),
        (2**63 - 1, OffsetOutOfRangeError),
    ],
)
async def test_impossible_offsets_are_refused(desk, offset, error):
    """A negative, huge or future offset is a typed error, the last with the range that exists."""
    await desk.append(batch())
    await desk.acquire(1)
    for ask in (desk.read(offset), desk.pull(1, offset)):
        with raises(error) as caught:
            await ask
        if error is OffsetOutOfRangeError:
            assert caught.value.first_offset == 0
            assert caught.value.next_offset == 2


@pytest.mark.parametrize(("bytes_max", "wait_ms"), [(0, 0), (-5, 0), (100, -1), (100, 30_001)])
async def test_impossible_limits_are_refused(desk, bytes_max, wait_ms):
    """A pull of no bytes, or one that waits too long, is refused."""
    await desk.acquire(1)
    with pytest.raises(InvalidRequestError):
        await desk.pull(1, 0, bytes_max=bytes_max, wait_ms=wait_ms)


async def test_waiting_pull_is_woken_by_the_commit(desk):
    """A long poll at the end is answered as soon as a batch is durable."""
    await desk.acquire(1)
    waiting = asyncio.create_task(desk.pull(1, 0, wait_ms=30_000))
    await turns()
    assert not waiting.done()
    await desk.append(batch())
    answer, payload = await asyncio.wait_for(waiting, 1)

    assert (answer.upto, answer.next_offset) == (2, 2)
    assert len(payload) == len(batch())


async def test_pull_with_nothing_to_give_is_empty(desk):
    """When the wait is over without a message, the answer is empty and says where the partition
    stands.
    """
    await desk.acquire(1)
    answer, payload = await desk.pull(1, 0, wait_ms=5)
    assert (answer.upto, answer.next_offset, payload) == (0, 0, b"")


async def test_pull_at_the_end_of_a_sealed_partition_does_not_wait(desk):
    """Who drained a sealed partition learns it at once, also when it is sealed during the wait."""
    await desk.append(batch())
    await desk.acquire(1)
    waiting = asyncio.create_task(desk.pull(1, 2, wait_ms=30_000))
    await turns()
    _, durable = desk.store.seal(1)
    await durable
    assert (await asyncio.wait_for(waiting, 1))[0].sealed
    assert (await asyncio.wait_for(desk.pull(1, 2, wait_ms=30_000), 1))[0].sealed


async def test_waiting_read_is_woken_by_the_commit_and_by_no_other_news(desk):
    """A read without a group waits as a pull does; what a group does meanwhile does not end its
    wait.
    """
    await desk.acquire(1)
    waiting = asyncio.create_task(desk.read(0, wait_ms=30_000))
    await turns()
    desk.service._long_polls.wake(1)
    await turns()
    assert not waiting.done()
    await desk.append(batch())
    answer, payload = await asyncio.wait_for(waiting, 1)
    assert (answer.upto, answer.next_offset) == (2, 2)
    assert payload


async def test_read_does_not_wait_when_a_client_of_an_earlier_version_asks(desk):
    """Its frame lacks the field."""
    asked = msgspec.msgpack.decode(msgspec.msgpack.encode([6, 1, 0, 100, False]), type=Read)
    answer, payload = await asyncio.wait_for(desk.ask(asked, memoryview(b"")), 1)
    assert (answer.upto, payload) == (0, b"")


async def test_wait_of_a_read_ends_when_its_time_is_over_or_the_broker_closes(desk):
    answer, payload = await desk.read(0, wait_ms=5)
    assert (answer.upto, payload) == (0, b"")
    waiting = asyncio.create_task(desk.read(0, wait_ms=30_000))
    await turns()
    desk.service.close()
    assert (await asyncio.wait_for(waiting, 1))[0].upto == 0


async def test_wait_of_a_read_ends_when_the_partition_is_sealed(desk):
    """As by a resize or a move: the reader goes on with what continues the partition."""
    waiting = asyncio.create_task(desk.read(0, wait_ms=30_000))
    await turns()
    _, durable = desk.store.seal(1)
    await durable
    assert (await asyncio.wait_for(waiting, 1))[0].sealed
    assert (await asyncio.wait_for(desk.read(0, wait_ms=30_000), 1))[0].sealed


async def test_wait_of_a_read_ends_when_the_partition_is_dropped(desk):
    """As by a deletion."""
    waiting = asyncio.create_task(desk.read(0, wait_ms=30_000))
    await turns()
    asked = DropPartition(subject=facts().subject, last_id=1)
    await drop_partition(desk.store, 1, asked, now_ms=0)
    with pytest.raises(PartitionUnknownError):
        await asyncio.wait_for(waiting, 1)


@pytest.mark.parametrize("wait_ms", [-1, 30_001])
async def test_read_is_refused_when_it_waits_for_no_time_or_too_long(desk, wait_ms):
    with pytest.raises(InvalidRequestError, match="cannot wait"):
        await desk.read(0, wait_ms=wait_ms)


# ── the pull lock ─────────────────────────────────────────────────────────────────────────────────
async def test_fence_is_durable_before_the_cursor_is_told():
    """When Acquire is answered, a broker started from that very disk refuses the owner before."""
    disk, clock = SimDisk(), ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    await desk.append(batch())
    await desk.acquire(1)
    await desk.ack(1, (0, 1))
    answer = await desk.acquire(2, OTHER)
    assert (answer.cursor, answer.next_offset) == (1, 2)

    reopened = Desk(open_store(disk, clock=clock), clock)
    with pytest.raises(FencedError):
        await reopened.ack(1)
    with pytest.raises(FencedError):
        await reopened.acquire(2, SESSION)
    assert (await reopened.ack(2, (1, 2), session=OTHER)).cursor == 2


async def test_newer_owner_ends_the_waiting_pulls_of_the_older(desk):
    """A waiting pull of a lower token is refused at the moment of the newer grant, with nothing
    delivered.
    """
    await desk.acquire(1)
    waiting = asyncio.create_task(desk.pull(1, 0, wait_ms=30_000))
    await turns()
    await desk.acquire(2, OTHER)
    with pytest.raises(FencedError):
        await asyncio.wait_for(waiting, 1)
    with pytest.raises(FencedError):
        await desk.release(1)


async def test_pull_that_reads_while_it_is_fenced_is_refused():
    """The fence is looked at again after a read from the disk."""
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, cache_bytes=0)
    desk = Desk(store, clock)
    await desk.host()
    await desk.append(batch())
    await desk.acquire(1)
    gate = asyncio.Event()

    async def slow(function, /, *args):
        await gate.wait()
        return function(*args)

    store.run_read = slow
    pull = asyncio.create_task(desk.pull(1, 0))
    await turns()
    await desk.acquire(2, OTHER)
    gate.set()
    with pytest.raises(FencedError):
        await pull


async def test_of_two_acquires_at_once_the_higher_token_wins(desk):
    """The lower of two grants decided in one commit is refused, though its fence was written."""
    lower, higher = await asyncio.gather(
        desk.acquire(3), desk.acquire(4, OTHER), return_exceptions=True
    )
    assert isinstance(lower, FencedError)
    assert higher.cursor == 0


async def test_acquiring_again_is_harmless(desk):
    """A repeated Acquire, also while the first is on its way, is answered alike and writes one
    fence.
    """
    first, second = await asyncio.gather(desk.acquire(1), desk.acquire(1))
    end = desk.store.log.end
    third = await desk.acquire(1)
    assert first == second == third
    assert desk.store.log.end == end


async def test_tokens_of_the_future_and_unknown_groups_are_refused(desk):
    """A pull, ack or release under a token that was never acquired changes nothing."""
    for token in (1, 2):
        for ask in (desk.pull(token, 0), desk.ack(token), desk.release(token)):
            with pytest.raises(TokenUnknownError):
                await ask
        if token == 1:
            await desk.acquire(1)


async def test_released_lock_is_free(desk):
    """After a release the broker shows no holder, and the old owner's pulls and acks are
    refused.
    """
    await desk.append(batch())
    await desk.acquire(1)
    now_ms = desk.clock.boot_ms()
    partition = desk.store.state.partition(1)
    assert partition.status(now_ms=now_ms).groups[0].holder == SESSION
    await desk.release(1)

    assert partition.status(now_ms=now_ms).groups[0].holder is None
    with pytest.raises(FencedError):
        await desk.pull(1, 0)
    with pytest.raises(FencedError):
        await desk.ack(1, (0, 1))


async def test_pulls_and_acks_renew_the_lock(desk):
    """Each call of the owner counts its ttl anew, by the broker's boot clock; the calendar has no
    say.
    """
    await desk.acquire(1, ttl_ms=1000)
    lock = desk.store.state.partition(1).groups["audit"].lock
    desk.clock.advance(900)
    await desk.pull(1, 0)
    desk.clock.advance(900)
    await desk.ack(1)
    desk.clock.wall_offset_ms += 3_600_000
    desk.clock.advance(900)
    assert lock.holder_at(desk.clock.boot_ms()) == SESSION
    desk.clock.advance(100)
    assert lock.holder_at(desk.clock.boot_ms()) is None


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 300, "a\0b"])
async def test_illegal_group_names_are_refused(desk, name):
    """A group that is no legal name cannot acquire, and leaves no trace."""
    with raises(Reason.NAME_INVALID):
        await desk.acquire(1, group=name)
    assert not desk.store.state.partition(1).groups


# ── acks ──────────────────────────────────────────────────────────────────────────────────────────
async def test_acked_ranges_above_the_cursor_are_told_to_the_next_owner(desk):
    """The next owner gets the cursor and what is acked above it."""
    await desk.append(batch(count=10))
    await desk.acquire(1)
    assert (await desk.ack(1, (4, 6), (8, 9))).cursor == 0
    assert (await desk.ack(1, (0, 2))).cursor == 2
    answer = await desk.acquire(2, OTHER)

    assert answer.cursor == 2
    assert answer.ranges == ((4, 6), (8, 9))
    group = desk.store.state.partition(1).status(now_ms=0).groups[0]
    assert (group.cursor, group.acked_above, group.lag, group.token) == (2, 3, 5, 2)


@pytest.mark.parametrize("bad", [(0, 0), (2, 1), (-1, 1), (0, 3), (2**62, 2**63)])
async def test_bad_ack_ranges_change_nothing(desk, bad):
    """Acks beyond what is stored, empty or reversed are refused whole."""
    await desk.append(batch())
    await desk.acquire(1)
    with pytest.raises(InvalidRequestError):
        await desk.ack(1, (0, 1), bad)
    assert (await desk.ack(1)).cursor == 0


async def test_fenced_owner_cannot_move_the_cursor(desk):
    """An ack that arrives after the newer grant is refused, however early it was sent."""
    await desk.append(batch())
    await desk.acquire(1)
    _, late = await asyncio.gather(
        desk.acquire(2, OTHER), desk.ack(1, (0, 2)), return_exceptions=True
    )
    assert isinstance(late, FencedError)
    assert (await desk.ack(2, session=OTHER)).cursor == 0


# ── everything else ───────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "request_",
    [
        Read(1, 0, 100),
        Pull(1, "audit", SESSION, 1, 0, 100, 0),
        Ack(1, "audit", SESSION, 1, ()),
        Release(1, "audit", SESSION, 1),
        Acquire(1, "audit", SESSION, 1, 100),
    ],
)
async def test_only_appends_have_a_payload(desk, request_):
    """Bytes behind a request that has no use for them are refused."""
    with pytest.raises(InvalidRequestError):
        await desk.say(request_, b"x")


async def test_unknown_partition_is_refused_everywhere(desk):
    """Every request for a partition that is not hosted here asks for a new route."""
    for request in (
        Read(5, 0, 100),
        Pull(5, "audit", SESSION, 1, 0, 100, 0),
        Ack(-5, "audit", SESSION, 1, ()),
        Release(5, "audit", SESSION, 1),
        Acquire(5, "audit", SESSION, 1, 100),
        Append(0),
    ):
        data = batch(partition_id=0) if isinstance(request, Append) else b""
        with pytest.raises(PartitionUnknownError):
            await desk.say(request, data)


async def test_hosting_again_with_other_facts_is_refused(desk):
    """The facts of a partition never change; the same facts, state and address aside, change
    nothing.
    """
    desk.store.host(facts(1, address="127.0.0.1:9"))
    for other in (
        facts(1, subject="other"),
        facts(1, range_end=512),
        facts(1, name="p2"),
        facts(1, queue=1),
        facts(1, parents=(3,)),
    ):
        with pytest.raises(InvalidRequestError):
            desk.store.host(other)


@pytest.mark.parametrize(
    "bad",
    [
        facts(0),
        facts(-1),
        facts(2, range_start=5, range_end=5),
        facts(2, range_end=1025),
        facts(2, range_start=-1),
        facts(2, name="../x"),
        facts(2, subject="a/b"),
        facts(2, queue=-1),
    ],
)
async def test_impossible_partitions_are_not_hosted(desk, bad):
    """A partition with impossible facts is refused and nothing is stored."""
    end = desk.store.log.end
    with pytest.raises(KeylaneError):
        desk.store.host(bad)
    assert desk.store.log.end == end
    assert set(desk.store.state.partitions) == {1}


# ── tags ──────────────────────────────────────────────────────────────────────────────────────────
def tagged(sequence: int, *tags: str) -> bytes:
    """A batch of two messages, of which the first has tags."""
    return batch(sequence=sequence, properties=[pack_properties(None, tags) if tags else b"", b""])


async def test_pull_leaves_out_batches_without_the_tag(desk):
    """It says which; batches with the tag come whole, and a pull without tags gets everything."""
    for sequence, tag in enumerate(["new", "paid", "new", "new"]):
        await desk.append(tagged(2 * sequence, tag))
    await desk.append(tagged(8))
    await desk.acquire(1)
    request = Pull(1, "audit", SESSION, 1, 1, 1 << 20, 0, ("paid", "void"))
    answer, data = await desk.service.handle(request, memoryview(b""))
    assert [header.base_offset for _, header in batch_starts(data)] == [2]
    assert (answer.left_out, answer.upto) == (((1, 2), (4, 10)), 10)
    answer, data = await desk.service.handle(replace(request, tags=()), memoryview(b""))
    assert (len(batch_starts(data)), answer.left_out) == (5, ())


async def test_pull_lock_ends_with_its_ttl_when_the_client_of_a_pull_by_tags_has_left(desk):
    """Such a pull is answered in a task, which is cancelled then."""
    await desk.acquire(1, ttl_ms=2_000)
    group = desk.store.state.partition(1).groups["audit"]
    request = Pull(1, "audit", SESSION, 1, 0, 1 << 20, 30_000, ("paid",))
    waiting = asyncio.create_task(desk.service.handle(request, memoryview(b"")))
    await turns()
    desk.clock.advance(20_000)
    assert group.lock.holder_at(desk.clock.boot_ms()) == SESSION
    waiting.cancel()
    await turns()
    desk.clock.advance(1_999)
    assert group.lock.holder_at(desk.clock.boot_ms()) == SESSION
    desk.clock.advance(1)
    assert group.lock.holder_at(desk.clock.boot_ms()) is None


async def test_pull_reads_on_when_everything_is_left_out(desk):
    """One answer stands for many reads, so that an unwanted backlog costs few round trips."""
    for sequence in range(6):
        await desk.append(tagged(2 * sequence, "paid" if sequence == 5 else "new"))
    await desk.acquire(1)
    request = Pull(1, "audit", SESSION, 1, 0, 1, 0, ("paid",))
    answer, data = await desk.service.handle(request, memoryview(b""))
    assert [header.base_offset for _, header in batch_starts(data)] == [10]
    assert answer.left_out == ((0, 10),)


@pytest.mark.parametrize("tags", [("",), ("x" * 201,), ("x",) * 101])
async def test_pull_of_impossible_tags_is_refused(desk, tags: tuple[str, ...]):
    await desk.acquire(1)
    with pytest.raises(InvalidRequestError):
        await desk.say(Pull(1, "audit", SESSION, 1, 0, 1, 0, tags))
