"""The main path with everything left out that it could do without: what this machine and this
Python can do at best.

A sender puts messages into columns of four partitions, encodes full batches and sends them in
frames over TCP; a server checks each checksum, writes what has gathered with one call, flushes it
with one fdatasync, and acks. No futures, no retries, no sequence, no index, no route, no limits.

Run as `python benchmarks/bare.py serve FILE` and `python benchmarks/bare.py send ADDRESS COUNT
VALUE_BYTES`.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import crc32c
import uvloop
import xxhash
from roles import KEYS, SENDS_PER_TURN

PARTITIONS = 4
BATCH_BYTES = 128 * 1024
BYTES_PER_MESSAGE = 20
FRAME = struct.Struct("<IIII")
"""Length of the body, its checksum, the count, the partition."""
ACK = struct.Struct("<I")
IN_FLIGHT_BYTES = 32 << 20


def split_frames(received: bytearray) -> list[tuple[bytes, int]]:
    """Take the whole frames out of what was received, each with its count; ends the program if one
    is damaged.
    """
    frames = []
    start = 0
    while len(received) - start >= FRAME.size:
        length, checksum, count, _partition = FRAME.unpack_from(received, start)
        end = start + FRAME.size + length
        if len(received) < end:
            break
        record = bytes(received[start:end])
        if crc32c.crc32c(memoryview(record)[FRAME.size :]) != checksum:
            raise SystemExit("a frame was damaged on the way")
        frames.append((record, count))
        start = end
    del received[:start]
    return frames


class BareServer(asyncio.Protocol):
    """Takes frames, stores what has gathered in a thread, acks each frame with its count."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._received = bytearray()
        self._batches: list[tuple[bytes, int]] = []
        self._store_task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._batches += split_frames(self._received)
        if self._batches and self._store_task is None:
            self._store_task = asyncio.create_task(self._store())

    async def _store(self) -> None:
        while self._batches:
            batches, self._batches = self._batches, []
            await asyncio.to_thread(self._write, [record for record, _ in batches])
            self._transport.write(b"".join(ACK.pack(count) for _, count in batches))
        self._store_task = None

    def _write(self, records: list[bytes]) -> None:
        for start in range(0, len(records), 512):
            os.writev(self._file, records[start : start + 512])
        os.fdatasync(self._file)


class BareSender(asyncio.Protocol):
    """Gathers messages in columns, sends full batches, counts acks."""

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes
        self._columns: list[tuple[list[bytes], list[bytes], list[int]]] = []
        self._sizes = [0] * PARTITIONS
        self.unacked = 0
        self.bytes_in_flight = 0
        self._acks = bytearray()
        self.progressed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._columns = [([], [], []) for _ in range(PARTITIONS)]

    def data_received(self, data: bytes) -> None:
        self._acks += data
        whole = len(self._acks) // ACK.size * ACK.size
        for (count,) in ACK.iter_unpack(self._acks[:whole]):
            self.unacked -= count
            self.bytes_in_flight -= count * (self._value_bytes + BYTES_PER_MESSAGE)
        del self._acks[:whole]
        self.progressed.set()

    def send(self, value: bytes, key: bytes) -> None:
        """Add one message to its partition's columns."""
        partition = xxhash.xxh3_64_intdigest(key) & (PARTITIONS - 1)
        keys, values, times = self._columns[partition]
        keys.append(key)
        values.append(value)
        times.append(time.time_ns())
        size = self._sizes[partition] + len(key) + len(value) + BYTES_PER_MESSAGE
        self._sizes[partition] = size
        if size >= BATCH_BYTES:
            self.flush(partition)

    def flush(self, partition: int) -> None:
        """Encode and send the pending messages of a partition."""
        keys, values, times = self._columns[partition]
        count = len(values)
        if not count:
            return
        lengths = struct.Struct(f"<{count}I")
        body = b"".join(
            (
                struct.pack(f"<{count}q", *times),
                lengths.pack(*map(len, keys)),
                lengths.pack(*map(len, values)),
                bytes(4 * count),
                *keys,
                *values,
            )
        )
        self._transport.write(FRAME.pack(len(body), crc32c.crc32c(body), count, partition))
        self._transport.write(body)
        self.unacked += count
        self.bytes_in_flight += count * (self._value_bytes + BYTES_PER_MESSAGE)
        self._columns[partition] = ([], [], [])
        self._sizes[partition] = 0

    async def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for acks until `done()`."""
        while not is_done():
            self.progressed.clear()
            await self.progressed.wait()


async def serve(path: str) -> None:
    """Serve until the process is terminated; print the address first."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    server = await asyncio.get_running_loop().create_server(lambda: BareServer(file), "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    print(json.dumps({"address": f"{host}:{port}"}), flush=True)
    await server.serve_forever()


async def send(address: str, count: int, value_bytes: int) -> dict[str, float]:
    """Send `count` messages; the clock stops at the last ack."""
    host, _, port = address.partition(":")
    _, sender = await asyncio.get_running_loop().create_connection(
        lambda: BareSender(value_bytes), host, int(port)
    )
    value = bytes(value_bytes)
    started, cpu = time.monotonic(), time.process_time()
    queue = sender.send
    for base in range(0, count, SENDS_PER_TURN):
        for index in range(base, base + SENDS_PER_TURN):
            queue(value, KEYS[index % 10_000])
        await asyncio.sleep(0)
        await sender.wait(lambda: sender.bytes_in_flight < IN_FLIGHT_BYTES)
    for partition in range(PARTITIONS):
        sender.flush(partition)
    await sender.wait(lambda: not sender.unacked)
    return {
        "started": started,
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
    }


def main() -> None:
    """Serve or send."""
    role, *arguments = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if role == "serve":
            runner.run(serve(*arguments))
        else:
            print(json.dumps(runner.run(send(arguments[0], *map(int, arguments[1:])))), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "bare.py"
    main()
