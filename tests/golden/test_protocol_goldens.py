"""What is stored on disks and spoken on wires does not change unnoticed."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from golden import make_protocol_goldens as goldens
from keylane.protocol import errors, frames
from keylane.protocol.batch import check_batch, check_lengths, columns
from keylane.protocol.message import unpack_properties
from keylane.protocol.record import Compression
from keylane.protocol.routing import logical_partition

HERE = Path(__file__).parent


def golden_json(name: str) -> dict:
    return json.loads((HERE / name).read_text())


def golden_batch() -> bytes:
    return bytes.fromhex((HERE / "batch_v1.hex").read_text())


def crc32c_by_bits(data: bytes) -> int:
    """CRC-32C as its definition says, bit by bit: independent of the library."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("name", "expected"), golden_json("logical_partitions.json").items())
def test_key_belongs_to_the_same_logical_partition_for_ever(name, expected):
    """The logical partition of a key never changes: it decides where old messages lie."""
    assert logical_partition(goldens.KEYS[name]) == expected


def test_vectors_name_every_key():
    """No key of the vectors has been dropped."""
    assert golden_json("logical_partitions.json") == goldens.logical_partitions()


def test_batch_has_its_golden_bytes():
    """A batch is packed and stamped into exactly the golden bytes."""
    assert goldens.batch() == golden_batch()


@pytest.mark.parametrize(("name", "packed"), golden_json("properties_v1.json").items())
def test_properties_have_their_golden_bytes(name, packed):
    """Properties are packed into exactly the golden bytes, and these are read."""
    assert goldens.packed_properties()[name] == packed
    assert (
        dict(unpack_properties(bytes.fromhex(packed)))
        == {
            "none": {},
            "text": {"trace": "9", "ключ": ""},
            "bytes": {"trace": b"\x00\xff", "empty": b"", "text": "t"},
            "tags": {"a": "b", "keylane.tags": "paid,eu"},
        }[name]
    )


@pytest.mark.parametrize(("name", "packed"), golden_json("packed_batches_v1.json").items())
def test_packed_golden_batches_are_read(name, packed):
    """Another version of a library may pack otherwise; what is stored is read for ever."""
    data = bytes.fromhex(packed)
    header = check_batch(data)
    check_lengths(data, header)
    assert Compression(header.compression).name == name
    cut = columns(data, header)
    keys, values = (
        [cut.blob[a:b] for a, b in pairwise(e)] for e in (cut.key_edges, cut.value_edges)
    )
    assert (keys, values) == goldens.packed_columns()
    assert [
        check_batch(now).compression
        for now in map(bytes.fromhex, goldens.packed_batches().values())
    ] == [1, 2]


def test_golden_batch_reads_as_its_drawing_says():
    """Read with nothing but the drawing in protocol/record.py and protocol/batch.py, the golden
    bytes mean this.
    """
    data = golden_batch()
    assert struct.unpack_from("<III", data) == (0x314C4B42, crc32c_by_bits(data[8:96]), len(data))
    assert tuple(data[12:16]) == (1, 1, 0, 0)
    assert struct.unpack_from("<II", data, 16) == (crc32c_by_bits(data[96:]), 3)
    assert struct.unpack_from("<QQQ", data, 24) == (7, 1_000, 1 << 33)
    first, last = 1_700_000_000_000_000_000, 1_700_000_000_000_000_900
    assert struct.unpack_from("<qqq", data, 48) == (first, last, 1_700_000_000_123)
    assert struct.unpack_from("<QIIQ", data, 72) == (0x1122334455667788, 2, 0, 41)
    assert struct.unpack_from("<3q", data, 96) == (first, first + 1, last)
    assert struct.unpack_from("<9I", data, 120) == (6, 0, 6, 16, 0, 2, 0, 9, 0)
    assert data[156:] == b'N14228N24211{"carrier":"UA"}\x00\xff\x81\xa5trace\xa19'


def test_golden_batch_reads_back():
    """The reader finds in the golden bytes what was packed."""
    data = golden_batch()
    header = check_batch(data)
    parts = columns(data, header)
    cut = parts.blob
    keys = [cut[a:b] for a, b in pairwise(parts.key_edges)]
    values = [cut[a:b] for a, b in pairwise(parts.value_edges)]
    edges = parts.property_edges
    properties = [unpack_properties(cut[a:b]) for a, b in pairwise(edges)]
    assert (header.base_offset, header.next_offset, header.sequence) == (1_000, 1_003, 41)
    assert keys == [b"N14228", b"", b"N24211"]
    assert values == [b'{"carrier":"UA"}', b"", b"\x00\xff"]
    assert properties == [{}, {"trace": "9"}, {}]


def test_every_code_has_its_error():
    """The names may change and codes may be added, but a code never means another error."""
    assert errors.codes() == {
        int(code): name for code, name in golden_json("error_codes.json").items()
    }


def test_frames_have_their_golden_bytes():
    """Every frame type is packed into exactly the golden bytes."""
    assert goldens.frame_bytes() == golden_json("frames_v1.json")
    assert goldens.frame_bytes(goldens.FRAMES_SINCE_0_3) == golden_json("frames_since_0_3.json")


def test_every_frame_type_is_pinned():
    """There is a golden frame for each type that may cross the wire."""
    kinds = {*frames.Request.__args__, *frames.Answer.__args__}
    assert {kind.__name__ for kind in kinds} == golden_frames().keys()


def golden_frames() -> dict[str, str]:
    """All golden frames, by their types."""
    return golden_json("frames_v1.json") | golden_json("frames_since_0_3.json")


def test_frame_without_a_field_that_came_later_is_read():
    """A broker of 0.2 does not say how many folders have a batch: one."""
    data = bytes.fromhex(golden_json("frames_v1.json")["Appended"])
    assert frames.decode_answer(data) == (1, frames.Appended(-1, "fsync", True, 1), goldens.PAYLOAD)


def test_broker_of_0_2_promises_nothing():
    data = bytes.fromhex(golden_json("frames_v1.json")["Acked"])
    assert frames.decode_answer(data) == (4, frames.Acked(2**40, 2, 0, False), goldens.PAYLOAD)


def test_client_of_0_2_asks_for_no_promise():
    _, request, _ = frames.decode_request(bytes.fromhex(golden_json("frames_v1.json")["Ack"]))
    assert isinstance(request, frames.Ack)
    assert request.promise_ms == 0


def test_broker_of_0_2_reads_over_the_question_for_a_promise():
    class Ack(msgspec.Struct, frozen=True, array_like=True, tag=4):
        partition_id: int
        group: str
        session: str
        token: int

    packed = msgspec.msgpack.encode(frames.Ack(7, "audit", "s", 5, (), promise_ms=1))
    assert msgspec.msgpack.decode(packed, type=Ack) == Ack(7, "audit", "s", 5)


def test_client_of_0_2_reads_over_the_field_that_came_later():
    class Appended(msgspec.Struct, frozen=True, array_like=True, tag=65):
        base_offset: int
        durable: str
        duplicate: bool

    packed = msgspec.msgpack.encode(frames.Appended(-1, "fsync", True, 3))
    assert msgspec.msgpack.decode(packed, type=Appended) == Appended(-1, "fsync", True)


WRITTEN = [
    *(each for each in goldens.FRAMES if type(each[1]).__name__ not in goldens.BEFORE_0_3),
    *goldens.FRAMES_SINCE_0_3,
]
"""Every type of frame once, as it is written now."""


@pytest.mark.parametrize(
    ("number", "header"), WRITTEN, ids=[type(header).__name__ for _, header in WRITTEN]
)
def test_golden_frames_read_back(number, header):
    """A golden frame decodes into the frame it was made of, payload untouched."""
    data = bytes.fromhex(golden_frames()[type(header).__name__])
    is_request = type(header) in frames.Request.__args__
    decode = frames.decode_request if is_request else frames.decode_answer
    assert decode(data) == (number, header, goldens.PAYLOAD)
