"""The bytes a broker leaves on its disk: a change is a decision, with a new format number."""

from __future__ import annotations

import asyncio
import random

from keylane.broker.storage.data_folder import claim_folder
from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import Unit
from keylane.broker.store.group_changes import register_groups_at
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store


def test_identity_has_its_golden_bytes():
    """The identity is one line of JSON: format, broker id, broker group."""
    disk = SimDisk()
    claim_folder(disk, broker_group="g1", rng=random.Random(1))
    assert disk.pread("identity.json", 0, 1000) == (
        b'{"format":1,"broker_id":"cd613e30d8f16adf91b7584a2265b1f5","broker_group":"g1"}\n'
    )


def test_index_block_has_its_golden_bytes():
    """A block is magic, checksum, partition and count, and 127 units: base offset, position, time,
    length, count.
    """
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    first = Unit(1, 1 << 16, 1 << 40, 1 << 20, 1 << 41)
    others = [
        Unit(first.next_offset + n, 1, (1 << 40) + 1 + n, 96, (1 << 41) + 1 + n) for n in range(126)
    ]
    queues.dispatch([(12, first), *((12, unit) for unit in others)])
    queues.close()
    data = disk.pread("index/00000000000000000000.blocks", 0, 1 << 20)
    assert len(data) == 4096
    assert data[:96].hex(" ", 8) == (
        "4b494b3111d1dffa 0c00000000000000 7f00000000000000 0000000000000000 "
        "0100000000000000 0000000000010000 0000000000020000 0000100000000100 "
        "0100010000000000 0100000000010000 0100000000020000 6000000001000000"
    )


def test_index_journal_has_its_golden_bytes():
    """A frame is magic, checksum, length, position and end; a part is a partition's facts, columns
    and tail.
    """
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    queues.dispatch([(12, Unit(1, 2, 3, 4, 5)), (12, Unit(3, 1 << 16, 1 << 40, 1 << 20, 1 << 41))])
    queues.checkpoint((1 << 40) + (1 << 21))
    queues.close()
    assert disk.pread("index/journal-0000000001", 0, 1000).hex(" ", 8) == (
        "4b494a31f67982be 7000000000000000 0000200000010000 0000000000000000 "
        "0c00000000000000 0100000000000000 0300010000000000 0000000000020000 "
        "0000000040000000 0100000000000000 0100000000000000 0300000000000000 "
        "0500000000000000 0400000002000000 0300000000000000 0000000000010000 "
        "0000000000020000 0000100000000100"
    )


def test_records_of_the_broker_have_their_golden_bytes():
    """Partition, fence, cursor, told and seal: their kinds and the msgpack of their bodies, in the
    order of writing.
    """
    disk, clock = SimDisk(), ManualClock()

    async def fill() -> None:
        desk = Desk(open_store(disk, clock=clock), clock)
        _, durable = desk.store.host(facts(9, parents=(3, 4)))
        await durable
        await desk.host()
        await desk.append(batch())
        await desk.acquire(5)
        await desk.ack(5, (1, 2))
        await desk.ack(5, (0, 1))
        await register_groups_at(desk.store, desk.store.state.partition(9), ["late"], complete=True)
        desk.store.state.partition(1).groups["audit"].removed_unread = 3
        desk.store.state.partition(1).groups["audit"].mark_changed()
        await desk.ack(5)
        _, durable = desk.store.seal(1)
        await durable

    asyncio.run(fill())
    data = disk.pread("log/" + "0" * 20 + ".log", 0, 1 << 20)
    records = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 8 : at + 12], "little")
        kind = data[at + 13]
        partition_id = int.from_bytes(data[at + 24 : at + 32], "little")
        base_offset = int.from_bytes(data[at + 32 : at + 40], "little")
        body = data[at + 96 : at + length]
        records.append((kind, partition_id, base_offset, b"" if kind == 1 else body))
        at += length
    facts_body = (
        b"\x82\xa7subject\xa7flights\xa9partition\x89\xacpartition_id\x09\xa4name\xa2p9"
        b"\xa5queue\x00\xabrange_start\x00\xa9range_end\xcd\x04\x00\xacbroker_group\xa2g1"
        b"\xa5state\xa4open\xa7parents\x92\x03\x04\xa7address\xc0"
    )
    assert records[0] == (2, 9, 0, facts_body)
    assert records[2:] == [
        (7, 1, 0, b""),
        (1, 1, 0, b""),
        (4, 1, 0, b"\x93\xa5audit\x05\xb0" + b"a" * 16),
        (5, 1, 0, b"\x94\xa5audit\x05\x00\x91\x92\x01\x02"),
        (5, 1, 2, b"\x94\xa5audit\x05\x02\x90"),
        (5, 9, 0, b"\x94\xa4late\x00\x00\x90"),
        (7, 9, 0, b""),
        (5, 1, 2, b"\x95\xa5audit\x05\x02\x90\x03"),
        (3, 1, 2, b""),
    ]
