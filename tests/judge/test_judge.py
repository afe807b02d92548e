"""The judge finds each kind of harm that is planted in a folder, and nothing in one that is
well.
"""

from __future__ import annotations

import ast
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import crc32c
import lz4.block
import msgspec
import pytest
import segments
from segments import zstd

from proof.second_opinion import second_opinion

HERE = Path(__file__).parent
pack = msgspec.msgpack.encode
PACKERS = {
    0: lambda data: data,
    segments.ZSTD: zstd.compress,
    segments.LZ4: lambda data: lz4.block.compress(data, store_size=False),
}


class FolderWriter:
    """Writes a data folder by docs/FORMATS.md."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name / "log" / f"{0:020}.log"
        self._path.parent.mkdir(parents=True)
        self._data = b""

    def record(
        self,
        kind: int,
        partition_id: int,
        base_offset: int,
        body: bytes,
        count: int = 0,
        compression: int = 0,
    ) -> None:
        length = segments.HEADER.size + len(body)
        header = segments.HEADER.pack(
            b"BKL1",
            0,
            length,
            1,
            kind,
            compression,
            0,
            crc32c.crc32c(body),
            count,
            partition_id,
            base_offset,
            len(self._data),
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        )
        crc = crc32c.crc32c(header[8:]).to_bytes(4, "little")
        self._data += header[:4] + crc + header[8:] + body
        self._path.write_bytes(self._data)

    def partition(self, partition_id: int, *parents: int) -> None:
        facts = {"subject": "s", "partition": {"parents": parents}}
        self.record(segments.PARTITION, partition_id, 0, pack(facts))

    def messages(
        self, partition_id: int, offset: int, *pairs: tuple[bytes, bytes], compression: int = 0
    ) -> None:
        body = b"\0" * 8 * len(pairs)
        for lengths in ([len(k) for k, _ in pairs], [len(v) for _, v in pairs], [0] * len(pairs)):
            body += b"".join(length.to_bytes(4, "little") for length in lengths)
        body += PACKERS[compression](b"".join(k for k, _ in pairs) + b"".join(v for _, v in pairs))
        self.record(segments.MESSAGES, partition_id, offset, body, len(pairs), compression)

    def acked(self, partition_id: int, cursor: int, *ranges: tuple[int, int]) -> None:
        self.record(segments.CURSOR, partition_id, cursor, pack(("g", 1, cursor, ranges)))

    def parked(self, partition_id: int, *changes: tuple[Any, ...]) -> None:
        self.record(segments.PARKED, partition_id, 0, pack(("g", 1, 0, changes)))


class Log:
    """Writes an .events file as programs under watch do."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "all.events"
        self._path.touch()
        self.now_ns = 0

    def note(self, kind: int, *fields: Any) -> None:
        self.now_ns += 1
        data = pack((self.now_ns, kind, fields))
        with self._path.open("ab") as file:
            file.write(len(data).to_bytes(4, "little") + data)

    def sent(self, value: bytes, number: int, *, told: tuple[int, int] | None) -> None:
        self.note(0, value, b"k", "p", number, True)
        if told is not None:
            self.note(1, value, "stored", *told, False)

    def handled(self, partition_id: int, offset: int) -> None:
        self.note(2, "g", "session", partition_id, offset, b"", 1, 0, 0, False, None)
        self.note(3, "g", partition_id, offset, 1, "session")


def write_good_run(folder: Path) -> tuple[FolderWriter, FolderWriter, Log]:
    """Three messages of a key, two in a parent and one in its child on another broker; all handled
    in order.
    """
    first, second, log = FolderWriter(folder, "b0"), FolderWriter(folder, "b1"), Log(folder)
    first.partition(1)
    first.messages(1, 0, (b"k", b"v0"), (b"k", b"v1"))
    first.record(segments.SEAL, 1, 2, b"")
    second.partition(2, 1)
    second.messages(2, 0, (b"k", b"v2"))
    places = [(1, 0), (1, 1), (2, 0)]
    for number, place in enumerate(places):
        log.sent(b"v%d" % number, number, told=place)
    for place in places:
        log.handled(*place)
    first.acked(1, 2)
    second.acked(2, 1)
    return first, second, log


def verdict_on(folder: Path) -> dict[str, int]:
    return second_opinion(folder)["findings"]


def test_judge_finds_nothing_in_a_good_run(tmp_path: Path):
    write_good_run(tmp_path)
    told = second_opinion(tmp_path)
    assert told["findings"] == {}
    assert (told["partitions"], told["stored"], told["acked"], told["handled"]) == (2, 3, 3, 3)


def test_judge_finds_a_loss_when_an_acked_message_is_not_stored(tmp_path: Path):
    _, _, log = write_good_run(tmp_path)
    log.sent(b"gone", 3, told=(2, 1))
    assert verdict_on(tmp_path) == {"lost": 1}


def test_judge_finds_a_loss_when_another_message_stands_at_the_place(tmp_path: Path):
    _, _, log = write_good_run(tmp_path)
    log.sent(b"v9", 3, told=(2, 0))
    assert verdict_on(tmp_path) == {"lost": 1}


def test_judge_finds_a_duplicate_when_a_message_is_stored_twice(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    second.messages(2, 1, (b"k", b"v2"))
    log.handled(2, 1)
    second.acked(2, 2)
    assert verdict_on(tmp_path) == {"duplicate": 1}


def test_judge_finds_a_phantom_when_a_stored_message_was_never_sent(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    second.messages(2, 1, (b"k", b"never sent"))
    log.handled(2, 1)
    second.acked(2, 2)
    assert verdict_on(tmp_path) == {"phantom": 1}


def test_judge_finds_an_inversion_within_a_partition(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    log.sent(b"v4", 4, told=(2, 1))
    log.sent(b"v3", 3, told=(2, 2))
    second.messages(2, 1, (b"k", b"v4"), (b"k", b"v3"))
    log.handled(2, 2)
    log.handled(2, 1)
    second.acked(2, 3)
    assert verdict_on(tmp_path) == {"handled backwards": 1, "inversion": 1}


def test_judge_finds_an_inversion_when_a_newer_message_is_in_a_parent(tmp_path: Path):
    first, _, log = write_good_run(tmp_path)
    first.partition(3)
    first.messages(3, 0, (b"k", b"v3"))
    log.sent(b"v3", 3, told=(3, 0))
    log.handled(3, 0)
    first.acked(3, 1)
    assert verdict_on(tmp_path) == {"inversion": 1}


def test_judge_finds_a_message_acked_and_not_handled(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    log.sent(b"v3", 3, told=(2, 1))
    second.messages(2, 1, (b"k", b"v3"))
    second.acked(2, 2)
    assert verdict_on(tmp_path) == {"acked unhandled": 1}


def test_judge_finds_a_range_acked_and_not_handled(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    for number in (3, 4):
        log.sent(b"v%d" % number, number, told=(2, number - 2))
    second.messages(2, 1, (b"k", b"v3"), (b"k", b"v4"))
    second.acked(2, 1, (2, 3))
    assert verdict_on(tmp_path) == {"acked unhandled": 1, "not handled": 1}


def test_judge_finds_a_handler_that_starts_before_the_one_before_it_has_ended(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    for number in (3, 4):
        log.sent(b"v%d" % number, number, told=(2, number - 2))
    second.messages(2, 1, (b"k", b"v3"), (b"k", b"v4"))
    log.handled(2, 2)
    log.handled(2, 1)
    second.acked(2, 3)
    assert verdict_on(tmp_path) == {"handled backwards": 1, "handled too early": 1}


FAILURE = ("ValueError", "", "c", 0, 3)


def write_parked_run(folder: Path, *, dead: bool = False) -> tuple[FolderWriter, FolderWriter, Log]:
    """As the good run, but with two more messages in a parent, both parked, adopted by the child
    and not handled yet.
    """
    first, second, log = FolderWriter(folder, "b0"), FolderWriter(folder, "b1"), Log(folder)
    key = None if dead else b"k"
    first.partition(1)
    first.messages(1, 0, (b"k", b"v0"), (b"k", b"v1"))
    first.parked(1, (segments.PARK, key, ((0, 1),), FAILURE), (segments.PARK, key, ((1, 2),), None))
    first.record(segments.SEAL, 1, 2, b"")
    first.acked(1, 2)
    first.parked(1, (segments.FREEZE,))
    second.partition(2, 1)
    rows = ((1, 0, 2),)
    second.parked(2, (segments.ADOPT, 1, ((key, "parked", 0, FAILURE, rows),), True))
    second.messages(2, 0, (b"k", b"v2"))
    for number, place in enumerate([(1, 0), (1, 1), (2, 0)]):
        log.sent(b"v%d" % number, number, told=place)
    return first, second, log


def test_judge_expects_parked_messages_to_be_handled_later(tmp_path: Path):
    """At the end of a run they may still be parked, with the later ones of their key."""
    _, second, log = write_parked_run(tmp_path)
    log.note(2, "g", "session", 1, 0, b"", 1, 0, 0, False, None)  # and it failed
    second.parked(2, (segments.PARK, b"k", ((0, 1),), None))
    second.acked(2, 1)
    told = second_opinion(tmp_path)
    assert (told["findings"], told["parked"]) == ({}, 3)


def test_judge_finds_nothing_when_redriven_messages_are_handled_in_order(tmp_path: Path):
    _, second, log = write_parked_run(tmp_path)
    for place in ((1, 0), (1, 1), (2, 0)):
        log.handled(*place)
    second.parked(2, (segments.UNPARK, b"k", 1, ((0, 2),)), (segments.FREE, b"k"))
    second.acked(2, 1)
    told = second_opinion(tmp_path)
    assert (told["findings"], told["parked"]) == ({}, 0)


def test_judge_finds_a_parked_message_that_is_forgotten(tmp_path: Path):
    """The child says that it is handled; the list of the parent, which is frozen, is no excuse."""
    _, second, log = write_parked_run(tmp_path)
    log.handled(1, 0)
    second.parked(2, (segments.UNPARK, b"k", 1, ((0, 2),)), (segments.FREE, b"k"))
    assert verdict_on(tmp_path) == {"acked unhandled": 1, "not handled": 1}


def test_judge_finds_a_message_that_passes_a_parked_one_of_its_key(tmp_path: Path):
    _, second, log = write_parked_run(tmp_path)
    log.handled(1, 0)
    log.handled(2, 0)
    second.acked(2, 1)
    second.parked(2, (segments.UNPARK, b"k", 1, ((0, 1),)))
    assert verdict_on(tmp_path) == {"handled too early": 1}


def test_judge_lets_later_messages_pass_a_dead_letter(tmp_path: Path):
    _, second, log = write_parked_run(tmp_path, dead=True)
    log.handled(2, 0)
    log.handled(1, 1)
    second.acked(2, 1)
    second.parked(2, (segments.UNPARK, None, 1, ((1, 2),)))
    told = second_opinion(tmp_path)
    assert (told["findings"], told["parked"]) == ({}, 1)


def test_judge_finds_a_key_that_is_freed_with_parked_messages(tmp_path: Path):
    _, second, log = write_parked_run(tmp_path)
    log.handled(1, 0)
    second.parked(2, (segments.UNPARK, b"k", 1, ((0, 1),)), (segments.FREE, b"k"))
    log.handled(1, 1)
    log.handled(2, 0)
    second.acked(2, 1)
    assert verdict_on(tmp_path) == {"damage": 1}


def test_judge_finds_messages_removed_unread(tmp_path: Path):
    _, second, log = write_good_run(tmp_path)
    second.partition(4)
    image = ["s", "s.p4", 0, 0, 1024, "g1", [], 2, 2, 0, False, [], [], [], False]
    second.record(segments.STATE, 4, 2, pack(image))
    second.messages(4, 2, (b"x", b"w2"))
    for number in range(3):
        log.note(0, b"w%d" % number, b"x", "q", number, True)
        log.note(1, b"w%d" % number, "stored", 4, number, False)
    log.handled(4, 0)
    log.handled(4, 2)
    second.acked(4, 3)
    assert verdict_on(tmp_path) == {"removed unread": 1}


@pytest.mark.parametrize(
    ("numbers", "findings"),
    [
        ((0, 1), {}),
        ((0,), {"lost": 1}),
        ((0, 1, 0), {"duplicate": 1}),
        ((0, 1, 2), {"phantom": 1}),
        ((1, 0), {"inversion": 1}),
    ],
)
def test_judge_compares_committed_orders_with_the_log(
    tmp_path: Path, numbers: tuple[int, ...], findings: dict[str, int]
):
    """Orders 0 and 1 were committed, order 2 was rolled back."""
    with closing(sqlite3.connect(tmp_path / "user.orders")) as connection, connection:
        connection.execute("CREATE TABLE orders (value BLOB, order_key BLOB, number INTEGER)")
        for number in (0, 1):
            connection.execute(
                "INSERT INTO orders VALUES (?, ?, ?)", (b"%d" % number, b"k", number)
            )
    broker = FolderWriter(tmp_path, "b0")
    broker.partition(1)
    broker.messages(1, 0, *((b"k", b"%d" % number) for number in numbers))
    assert verdict_on(tmp_path) == findings


@pytest.mark.parametrize("harm", ["seal", "gap", "after the seal", "fence", "cursor", "checksum"])
def test_judge_finds_damage(tmp_path: Path, harm: str):
    first, second, log = write_good_run(tmp_path)
    if harm == "seal":
        second.record(segments.SEAL, 2, 7, b"")
    elif harm == "fence":
        second.record(segments.FENCE, 2, 0, pack(("h", 5, "s")))
        second.record(segments.FENCE, 2, 0, pack(("h", 4, "s")))
        second.record(segments.CURSOR, 2, 0, pack(("h", 5, 1, ())))
    elif harm == "cursor":
        second.acked(2, 0)
        second.acked(2, 1)
    elif harm == "checksum":
        path = tmp_path / "b1" / "log" / f"{0:020}.log"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    else:
        broker, partition_id, offset = (second, 2, 2) if harm == "gap" else (first, 1, 2)
        log.sent(b"v3", 3, told=(partition_id, offset))
        broker.messages(partition_id, offset, (b"k", b"v3"))
        log.handled(partition_id, offset)
        broker.acked(partition_id, offset + 1)
    assert verdict_on(tmp_path)["damage"] == 1


@pytest.mark.parametrize("compression", [segments.ZSTD, segments.LZ4])
def test_judge_reads_packed_messages(tmp_path: Path, compression: int):
    """Packed messages are compared as others are: the one that was never sent is told."""
    _, second, log = write_good_run(tmp_path)
    log.sent(b"v3" * 40, 3, told=(2, 1))
    second.messages(2, 1, (b"k", b"v3" * 40), (b"k", b"forged" * 40), compression=compression)
    for offset in (1, 2):
        log.handled(2, offset)
    second.acked(2, 3)
    assert verdict_on(tmp_path) == {"phantom": 1}


@pytest.mark.parametrize("compression", [segments.ZSTD, segments.LZ4])
@pytest.mark.parametrize("harm", ["cut", "too long", "kind", "compression"])
def test_judge_finds_damage_in_packed_messages(tmp_path: Path, compression: int, harm: str):
    _, second, _ = write_good_run(tmp_path)
    columns = bytes(8) + b"".join(length.to_bytes(4, "little") for length in (1, 400, 0))
    packed = PACKERS[compression](b"k" + b"value" * 80)
    if harm == "cut":
        second.record(segments.MESSAGES, 2, 1, columns + packed[:-1], 1, compression)
    elif harm == "too long":
        columns = bytes(8) + b"".join(length.to_bytes(4, "little") for length in (1, 1 << 20, 0))
        body = columns + PACKERS[compression](b"k" + bytes(1 << 20))
        second.record(segments.MESSAGES, 2, 1, body, 1, compression)
    elif harm == "kind":
        second.record(segments.SEAL, 2, 1, packed, 0, compression)
        second.record(segments.SEAL, 2, 1, b"")
    else:
        second.record(segments.MESSAGES, 2, 1, columns + packed, 1, 3)
        second.record(segments.SEAL, 2, 1, b"")
    assert verdict_on(tmp_path)["damage"] == 1


def test_judge_leaves_out_an_unfinished_end(tmp_path: Path):
    """A broker that was killed may leave a part of its last write, and a program a part of an
    event.
    """
    write_good_run(tmp_path)
    for path in (tmp_path / "b1" / "log" / f"{0:020}.log", tmp_path / "all.events"):
        with path.open("ab") as file:
            file.write(path.read_bytes()[:50])
    assert verdict_on(tmp_path) == {}


def test_judge_imports_nothing_of_the_product():
    for path in (HERE / "judge.py", HERE / "policies.py", HERE / "segments.py"):
        modules = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {
            name for name in modules if name.split(".")[0] in {"keylane", "history", "proof"}
        }
