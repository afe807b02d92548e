"""Batches of idempotency keys, and batches without a producer: what is stored, remembered and
forgotten.
"""

from __future__ import annotations

import pytest

from keylane.broker.partition.appends import ProducerState
from keylane.broker.partition.image import decode_partition, encode_partition
from keylane.protocol.batch import check_batch
from keylane.protocol.errors import Reason, SequenceGapError, StaleRouteError
from keylane.protocol.http.posted import ASKED
from keylane.protocol.ids import KEYED_IDS, NO_PRODUCER
from keylane.protocol.limits import PRODUCERS_PER_PARTITION_MAX
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.raising import raises

KEY = KEYED_IDS + 7


def keyed(number: int = 0, *, epoch: int = 5, **changes) -> bytes:
    return batch(producer_id=KEY + number, epoch=epoch, **changes)


@pytest.fixture
async def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def desk(disk) -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    await desk.host()
    return desk


async def test_repeat_of_a_key_is_a_duplicate_whatever_its_times(desk, disk):
    """Only id, epoch and count are compared: a repeat is encoded anew, with the time of the
    repeat.
    """
    first = await desk.append(keyed())
    again = await desk.append(keyed(value=b"other bytes, as of another time"))
    assert (first.base_offset, first.duplicate) == (0, False)
    assert (again.base_offset, again.duplicate) == (0, True)
    restarted = Desk(open_store(disk), ManualClock())
    answer = await restarted.append(keyed())
    assert (answer.base_offset, answer.duplicate) == (0, True)


@pytest.mark.parametrize("changes", [{"epoch": 4}, {"epoch": 6}, {"count": 3}])
async def test_key_is_refused_with_other_messages(desk, disk, changes):
    await desk.append(batch())
    await desk.append(keyed())
    for server in (desk, Desk(open_store(disk), ManualClock())):
        with raises(Reason.IDEMPOTENCY_KEY_REUSED) as raised:
            await server.append(keyed(**changes))
        assert (raised.value.partition_id, raised.value.base_offset) == (1, 2)
        assert (await server.append(keyed())).duplicate, "the first request is still known"
        assert server.store.state.partition(1).is_quiet(0)


@pytest.mark.parametrize("sealed", [False, True])
async def test_partition_tells_what_a_key_stored_there_and_stores_nothing(desk, sealed):
    """A batch that only asks: also a partition that is not sealed yet stores nothing of it."""
    await desk.append(keyed())
    if sealed:
        _, durable = desk.store.seal(1)
        await durable
    answer = await desk.append(keyed(sequence=ASKED))
    assert (answer.base_offset, answer.duplicate) == (0, True)
    with raises(Reason.IDEMPOTENCY_KEY_REUSED):
        await desk.append(keyed(sequence=ASKED, epoch=6))
    with pytest.raises(SequenceGapError):
        await desk.append(keyed(1, sequence=ASKED))
    assert desk.store.state.partition(1).next_offset == 2


async def test_sealed_partition_takes_no_batch(desk):
    _, durable = desk.store.seal(1)
    await durable
    with pytest.raises(StaleRouteError):
        await desk.append(keyed(1))
    with pytest.raises(StaleRouteError):
        await desk.append(batch(producer_id=NO_PRODUCER))


async def test_batches_without_a_producer_are_all_stored_and_none_is_remembered(desk, disk):
    answers = [await desk.append(batch(producer_id=NO_PRODUCER)) for _ in range(3)]
    assert [(answer.base_offset, answer.duplicate) for answer in answers] == [
        (0, False),
        (2, False),
        (4, False),
    ]
    for store in (desk.store, open_store(disk)):
        partition = store.state.partition(1)
        assert (partition.next_offset, partition.producers) == (6, {})


async def test_keys_are_forgotten_before_producers(desk, disk, monkeypatch):
    """A partition with many keys still knows its producers; a restart remembers the same ids."""
    monkeypatch.setattr("keylane.broker.partition.partition.PRODUCERS_PER_PARTITION_MAX", 4)
    await desk.append(batch(producer_id=1))
    for number in range(5):
        await desk.append(keyed(number))
    await desk.append(batch(producer_id=3))
    known = [1, KEY + 3, KEY + 4, 3]
    for store in (desk.store, open_store(disk)):
        assert list(store.state.partition(1).producers) == known
    await desk.append(batch(producer_id=1, sequence=2))
    with pytest.raises(SequenceGapError):
        await desk.append(batch(producer_id=5, sequence=2))


async def test_image_of_a_partition_has_its_keys(desk):
    await desk.append(keyed())
    partition = desk.store.state.partition(1)
    assert decode_partition(1, encode_partition(partition)).producers == partition.producers


@pytest.mark.parametrize("producer_id", [NO_PRODUCER, 9, KEY + 2])
async def test_undone_append_restores_what_it_changed(desk, monkeypatch, producer_id):
    """After a write that failed, a forgotten key is known again."""
    monkeypatch.setattr("keylane.broker.partition.partition.PRODUCERS_PER_PARTITION_MAX", 2)
    for number in range(2):
        await desk.append(keyed(number))
    partition = desk.store.state.partition(1)
    before = list(partition.producers.items())
    header = check_batch(batch(producer_id=producer_id))
    undo = partition.apply_append(header, base_offset=4, appended_at_ms=1)
    assert partition.next_offset == 6
    partition.undo_append(undo)
    assert (partition.next_offset, list(partition.producers.items())) == (4, before)


class ComparedId(int):
    """An id that counts how often it is asked whether it is one of a key."""

    compared = 0

    def __ge__(self, other: int) -> bool:
        ComparedId.compared += 1
        return int(self) >= other


@pytest.mark.parametrize("last", [7, KEY])
async def test_full_partition_forgets_a_producer_without_a_search(desk, last):
    """Each append of a new producer looked at all 10,000 of them, on the event loop that serves all
    others.
    """
    partition = desk.store.state.partition(1)
    for number in [*range(1_000, 1_000 + PRODUCERS_PER_PARTITION_MAX), last]:
        partition.producers[ComparedId(number)] = ProducerState(5, 1, ())
    header = check_batch(batch(producer_id=99))
    ComparedId.compared = 0
    partition.apply_append(header, base_offset=partition.next_offset, appended_at_ms=1)
    oldest = KEY if last == KEY else 1_000
    assert oldest not in partition.producers
    assert ComparedId.compared < 10
