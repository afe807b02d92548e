"""Writes the golden files of the protocol anew: `python tests/golden/make_protocol_goldens.py`.

A change of a golden file is a change of what is stored on disks and spoken on wires: a decision,
never a repair of a test.
"""

from __future__ import annotations

import json
from pathlib import Path

from keylane.protocol import errors, frames
from keylane.protocol.batch import encode_batch
from keylane.protocol.message import pack_properties
from keylane.protocol.parked import FailingMessage
from keylane.protocol.record import Compression, stamp_record
from keylane.protocol.routing import logical_partition

HERE = Path(__file__).parent

KEYS = {
    "empty": b"",
    "NUL": b"\x00",
    "a": b"a",
    "N14228": b"N14228",
    "N24211": b"N24211",
    "order-1": b"order-1",
    "order-2": b"order-2",
    "ключ": "ключ".encode(),
    "k * 16": b"k" * 16,
    "k * 17": b"k" * 17,
    "k * 240": b"k" * 240,
    "k * 241": b"k" * 241,
    "k * 1024": b"k" * 1024,
    "bytes 0..255": bytes(range(256)),
}
"""The lengths straddle the branches of xxh3: 1..3, 4..8, 9..16, 17..128, 129..240, longer."""

FAILING = FailingMessage(
    offset=4,
    key_digest="key digest 7bf0f7b81adae8b4",
    since_ms=1_800_000_000_000,
    attempts=7,
    kind="ValueError",
    text="no such town",
    client="host-1",
    at_ms=1_800_000_009_000,
)
FRAMES: list[tuple[int, frames.Request | frames.Answer]] = [
    (1, frames.Append(7)),
    (2, frames.Acquire(7, "audit", "0123456789abcdef", 5, 30_000)),
    (3, frames.Pull(7, "audit", "0123456789abcdef", 5, 1_000, 1 << 20, 30_000, ("paid",))),
    (
        4,
        frames.Ack(
            *(7, "audit", "0123456789abcdef", 5),
            *(((0, 3), (5, 2**40)), ((4, 7),), FAILING, ((3, 2),), ((8, 9),), 60_000),
        ),
    ),
    (5, frames.Release(7, "audit", "0123456789abcdef", 5)),
    (6, frames.Read(7, 2**40, 1 << 20, wait_ms=5_000)),
    (24, frames.Hello("0.1.0")),
    (22, frames.Challenge()),
    (23, frames.Authenticate("kc_AA", bytes(64), "127.0.0.1:7001")),
    (86, frames.Welcome("0.1.0")),
    (83, frames.Challenged(bytes(32))),
    (84, frames.Authenticated(300_000)),
    (85, frames.Throttled(1_500, "bytes of principal 'shop'")),
    (7, frames.AcquireShared(7, "audit", "0123456789abcdef", 5, 30_000)),
    (8, frames.PullShared(7, "audit", "0123456789abcdef", 5, 256, 1 << 20, 5_000, 60_000)),
    (9, frames.Schedule("orders", 1_800_000_000_123, bytes(range(16)))),
    (10, frames.CancelScheduled(bytes(range(16)))),
    (11, frames.ChangeParked(7, "audit", "0123456789abcdef", 5)),
    (12, frames.ListParked(7, "audit", "0123456789abcdef", 5, 5_000)),
    (13, frames.ReadParked(7, "audit", "0123456789abcdef", 5, b"N14228", 256)),
    (14, frames.AdoptParked(7, "audit", 0, 512, 5_000)),
    (15, frames.ReleaseParked(7, "audit", 0, 512, 5, True)),
    (20, frames.EditParked(7, "audit", b"N14228", 3, 2**40, b"\x81\xa1a\xa1b")),
    (21, frames.ReadEdited(7, "audit", None, 3, 2**40)),
    (1, frames.Appended(-1, "fsync", True)),
    (
        2,
        frames.Acquired(
            3, ((5, 9),), 12, False, ((4, 7),), 2, (3, 4), 12, ((3, 2),), ((3, 5),), True
        ),
    ),
    (3, frames.Batches(0, 12, 9, True, 2, ((5, 7),))),
    (4, frames.Acked(2**40, 2)),
    (5, frames.Released()),
    (8, frames.Handed(((3, 5), (9, 2**40)), 3, 2**40, True)),
    (9, frames.Scheduled("g1", "fsync")),
    (10, frames.ScheduledCanceled("canceled")),
    (11, frames.ParkedChanged(2)),
    (12, frames.ParkedKeys(2, 5_000)),
    (13, frames.ParkedRows(((3, 5, 6), (7, 0, 2**40)), 2**40 + 1)),
    (14, frames.ParkedToAdopt(None)),
    (21, frames.ParkedEdited(b"\x81\xa1a\xa1b")),
    (6, frames.refusal(errors.FencedError(partition_id=7, token=5))),
]
PAYLOAD = b"payload"


def logical_partitions() -> dict[str, int]:
    """Name of the key → logical partition."""
    return {name: logical_partition(key) for name, key in KEYS.items()}


def packed_properties() -> dict[str, str]:
    """What properties there are → their bytes, in hex."""
    return {
        "none": pack_properties({}).hex(),
        "text": pack_properties({"trace": "9", "ключ": ""}).hex(),
        "bytes": pack_properties({"trace": b"\x00\xff", "empty": b"", "text": "t"}).hex(),
        "tags": pack_properties({"a": "b"}, ["paid", "eu"]).hex(),
    }


def packed_columns() -> tuple[list[bytes], list[bytes]]:
    """Keys and values of the packed batches."""
    return (
        [b"N%d" % number for number in range(6)],
        [b'{"carrier":"UA","origin":"JFK","flight":%d}' % number for number in range(6)],
    )


def packed_batches() -> dict[str, str]:
    """Compression → a batch that it packed, in hex."""
    keys, values = packed_columns()
    return {
        compression.name: encode_batch(
            partition_id=7,
            sent_at_ns=[1_700_000_000_000_000_000 + number for number in range(6)],
            keys=keys,
            values=values,
            producer_id=0x1122334455667788,
            producer_epoch=2,
            sequence=41,
            compression=compression,
        ).hex()
        for compression in (Compression.ZSTD, Compression.LZ4)
    }


def batch() -> bytes:
    """A batch of three messages, stamped by a broker: no key, properties, an empty value."""
    record = bytearray(
        encode_batch(
            partition_id=7,
            sent_at_ns=[
                1_700_000_000_000_000_000,
                1_700_000_000_000_000_001,
                1_700_000_000_000_000_900,
            ],
            keys=[b"N14228", b"", b"N24211"],
            values=[b'{"carrier":"UA"}', b"", b"\x00\xff"],
            properties=[b"", pack_properties({"trace": "9"}), b""],
            producer_id=0x1122334455667788,
            producer_epoch=2,
            sequence=41,
        )
    )
    stamp_record(record, base_offset=1_000, position=1 << 33, appended_at_ms=1_700_000_000_123)
    return bytes(record)


BEFORE_0_3 = {
    "Appended": "160000000b000000954101ffa56673796e63c37061796c6f6164",
    "Ack": (
        "d0000000c50000009c040407a56175646974b0303132333435363738396162636465660592920003"
        "9205cf00000100000000009192040788a66f666673657404aa6b65795f646967657374bb6b657920"
        "6469676573742037626630663762383161646165386234a873696e63655f6d73cf000001a3185c50"
        "00a8617474656d70747307a46b696e64aa56616c75654572726f72a474657874ac6e6f2073756368"
        "20746f776ea6636c69656e74a6686f73742d31a561745f6d73cf000001a3185c7328919203029192"
        "0809cdea607061796c6f6164"
    ),
    "Acked": "180000000d000000944404cf0000010000000000027061796c6f6164",
}
"""Frames that have fields since 0.3 which they did not have: as they were before. Older clients
read over a field that comes last.
"""
FRAMES_SINCE_0_3: list[tuple[int, frames.Request | frames.Answer]] = [
    (1, frames.Appended(-1, "fsync", True, 3)),
    (4, frames.Ack(7, "audit", "0123456789abcdef", 5, (), promise_ms=15_000)),
    (4, frames.Acked(2**40, 2, 15_000, True)),
    (
        25,
        frames.Follow(
            "g1",
            "0123456789abcdef",
            2**40,
            3 << 20,
            10_000,
            2**40 - 4096,
            0xFEDCBA98,
            machine="m1",
            reads_at="10.0.0.1:7101",
            zone="a",
        ),
    ),
    (87, frames.Followed("0123456789abcdef", "fedcba98", 2**40, 2**30, 2**30, 2**39, False, False)),
]


def frame_bytes(
    of: list[tuple[int, frames.Request | frames.Answer]] = FRAMES,
) -> dict[str, str]:
    """Frame type → its bytes with PAYLOAD, in hex."""
    packed = {
        type(header).__name__: frames.encode_frame(number, header, PAYLOAD).hex()
        for number, header in of
    }
    return packed | BEFORE_0_3 if of is FRAMES else packed


def main() -> None:
    """Write all."""
    lines = batch().hex(" ", -4).split(" ")
    rows = [" ".join(lines[start : start + 6]) for start in range(0, len(lines), 6)]
    for name, content in {
        "logical_partitions.json": json.dumps(logical_partitions(), indent=1, ensure_ascii=False),
        "batch_v1.hex": "\n".join(rows),
        "packed_batches_v1.json": json.dumps(packed_batches(), indent=1),
        "properties_v1.json": json.dumps(packed_properties(), indent=1),
        "frames_v1.json": json.dumps(frame_bytes(), indent=1),
        "frames_since_0_3.json": json.dumps(frame_bytes(FRAMES_SINCE_0_3), indent=1),
        "error_codes.json": json.dumps(errors.codes(), indent=1),
    }.items():
        (HERE / name).write_text(content + "\n")


if __name__ == "__main__":
    main()
