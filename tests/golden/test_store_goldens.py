"""The files of a broker, byte for byte: written as they always were, and read by every later
version.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from keylane.broker.partition.image import decode_partition, encode_partition
from keylane.broker.partition.records import (
    DroppedBody,
    ForgetBody,
    HoldBody,
    decode_body,
    encode_body,
)
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import SequenceReusedError
from keylane.protocol.record import HEADER_BYTES, Header, Kind, read_record
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

HERE = Path(__file__).parent


def golden(name: str) -> dict[str, bytes]:
    files = json.loads((HERE / name).read_text())
    return {path: bytes.fromhex("".join(lines)) for path, lines in files.items()}


GOLDEN = golden("store_v1.json")


def of_today() -> dict[str, bytes]:
    spec = importlib.util.spec_from_file_location("store_goldens", HERE / "make_store_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.store_files()


def on_a_disk(files: dict[str, bytes]) -> SimDisk:
    disk = SimDisk()
    for path, data in files.items():
        disk.make_folder(path.rpartition("/")[0])
        file = disk.open_append(path)
        file.append([data])
        file.fdatasync()
    return disk


def test_files_have_their_golden_bytes():
    """Segments, trails, snapshots, index and identity have the bytes of their format."""
    files = of_today()
    assert sorted(files) == sorted(GOLDEN)
    for path, data in GOLDEN.items():
        assert files[path].hex(" ", 8) == data.hex(" ", 8), path


async def test_golden_files_are_read():
    """A folder of this format opens, with its snapshot or from the log alone, and says the same."""
    images = {}
    for snapshot in (True, False):
        disk, clock = on_a_disk(GOLDEN), ManualClock()
        for name in disk.list("snapshot") if not snapshot else []:
            disk.remove(f"snapshot/{name}")
        desk = Desk(open_store(disk, clock=clock, segment_bytes=4096), clock)
        state = desk.store.state
        assert not state.problems
        assert sorted(state.partitions) == [1, 9]
        images[snapshot] = {
            number: encode_partition(partition) for number, partition in state.partitions.items()
        }
        assert state.partition(9).sealed
        assert state.partition(9).facts.partition.parents == (3, 4)
        told = [number for number in (1, 9) if state.partition(number).groups_told]
        assert told == [1]
        group = state.partition(1).groups["audit"]
        assert (group.lock.fence, group.acked.cursor, group.acked.ranges) == (5, 0, [(1, 2)])
        answer, payload = await desk.read(2)
        assert [header.count for _, header in batch_starts(payload)] == [1]
        assert answer.next_offset == 3
    assert images[True] == images[False]


async def test_batches_of_an_image_are_known_again():
    """A batch is recognised by its count and its checksum."""
    clock = ManualClock()
    desk = Desk(open_store(on_a_disk(GOLDEN), clock=clock, segment_bytes=4096), clock)
    again = await desk.append(batch())
    assert (again.duplicate, again.base_offset) == (True, 0)
    for other in (batch(count=1), batch(value=b"other")):
        with pytest.raises(SequenceReusedError):
            await desk.append(other)


def test_image_has_its_golden_bytes():
    """A partition's image is an array, and fields that came later may be missing in it."""
    image = bytes.fromhex(
        "9d a7666c6967687473 a27031 00 00 cd0400 a26731 90 00 03 05 c2 90 90".replace(" ", "")
    )
    partition = decode_partition(1, image)
    assert (partition.next_offset, partition.appended_at_ms, partition.sealed) == (3, 5, False)
    assert partition.lost == ()
    assert not partition.groups_told


def test_numbers_of_record_kinds_never_change():
    """A number of a kind is never used for something else."""
    assert {kind.name: kind.value for kind in Kind} == {
        "MESSAGES": 1,
        "PARTITION": 2,
        "SEAL": 3,
        "FENCE": 4,
        "CURSOR": 5,
        "STATE": 6,
        "TOLD": 7,
        "FORGET": 8,
        "DROPPED": 9,
        "PARKED": 10,
        "HOLD": 11,
        "SCHEDULED": 14,
    }


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("forget", ForgetBody("billing", 5)),
        ("dropped", DroppedBody([(7, 8), (11, 13)], {"orders": 12})),
        ("hold", HoldBody("backfill-3", 1_200, 600_000)),
    ],
)
def test_records_of_deletions_and_holds_have_their_bytes_and_read_back(
    name: str, body: ForgetBody | DroppedBody | HoldBody
):
    golden = bytes.fromhex(json.loads((HERE / "deletions_v1.json").read_text())[name])
    assert encode_body(7, body) == golden
    header = read_record(golden)
    assert isinstance(header, Header)
    assert decode_body(header, memoryview(golden)[HEADER_BYTES:]) == body
