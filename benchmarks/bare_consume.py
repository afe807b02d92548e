"""The way from the log to a handler with everything left out that it could do without, as `bare.py`
for sending.

The server of `bare.py` streams what is durable to a consumer, which checks each checksum, cuts keys
and values out of the columns, awaits an `async` handler for each message, and acks each frame. No
lanes, no leases, no retries, no cursors.

What its handler does is here too, for it and for `consumer_roles.py`: it reads key and value, and
counts. The bytes that were read are in the figures, so that a message that was counted and never
made shows.

Run as `python benchmarks/bare_consume.py serve FILE` and `python benchmarks/bare_consume.py consume
ADDRESS COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import uvloop
from bare import ACK, FRAME, BareServer, split_frames

CHUNK_BYTES = 1 << 20
BUFFER_BYTES = 8 << 20
CONSUMER = FRAME.pack(0, 0, 0, 0xFFFFFFFF)
"""A consumer's first frame."""
Figures = dict[str, float]


class Handled(Protocol):
    """A message of keylane or of the bare path."""

    key: bytes
    value: bytes


class Clock:
    """Wall clock and processor time from the first message to the last."""

    def __init__(self) -> None:
        self._began = (0.0, 0.0)
        self.figures: Figures = {}
        self.done = asyncio.Event()

    def mark(self, size_bytes: int) -> None:
        """Note the first message, and then the last one, with the bytes that were read until
        then.
        """
        now, cpu = time.monotonic(), time.process_time()
        if not self._began[0]:
            self._began = now, cpu
        elif not self.figures:
            began, cpu_began = self._began
            self.figures = {
                "seconds": now - began,
                "ended": now,
                "cpu_seconds": cpu - cpu_began,
                "read_bytes": size_bytes,
            }
            self.done.set()


def make_handler(clock: Clock, count: int) -> Callable[[Handled], Awaitable[None]]:
    """Return an `async` handler for `count` messages."""
    remaining, size_bytes, last_index = count, 0, count - 1

    async def handle(message: Handled) -> None:
        nonlocal remaining, size_bytes
        size_bytes += len(message.key) + len(message.value)
        remaining -= 1
        if not 0 < remaining < last_index:
            clock.mark(size_bytes)

    return handle


def make_reader(clock: Clock, count: int) -> Callable[[Iterable[Handled]], None]:
    """Handle many messages in a loop, as the handler of `make_handler` does one by one."""
    remaining, size_bytes, has_begun = count, 0, False

    def read(messages: Iterable[Handled]) -> None:
        nonlocal remaining, size_bytes, has_begun
        if not has_begun:
            has_begun = True
            clock.mark(0)
        for message in messages:
            size_bytes += len(message.key) + len(message.value)
            remaining -= 1
        if remaining <= 0:
            clock.mark(size_bytes)

    return read


class BareLog:
    """The file of a server, and how far it is durable."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        self.durable_bytes = 0
        self.has_grown = asyncio.Event()


class BareLogServer(BareServer):
    """Stores what a sender sends, and streams it to a consumer."""

    def __init__(self, log: BareLog) -> None:
        super().__init__(log.file)
        self._log = log
        self._reader: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._reader is not None:
            return  # acks
        if data[: FRAME.size] == CONSUMER:
            self._reader = asyncio.create_task(self._stream())
            return
        super().data_received(data)

    def _write(self, records: list[bytes]) -> None:
        super()._write(records)
        self._log.durable_bytes += sum(map(len, records))
        self._loop.call_soon_threadsafe(self._log.has_grown.set)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._loop = asyncio.get_running_loop()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _stream(self) -> None:
        log, sent = self._log, 0
        while True:
            while sent < log.durable_bytes:
                await self._writable.wait()
                chunk = os.pread(log.file, min(CHUNK_BYTES, log.durable_bytes - sent), sent)
                self._transport.write(chunk)
                sent += len(chunk)
                await asyncio.sleep(0)
            log.has_grown.clear()
            await log.has_grown.wait()


class BareMessage:
    """What a handler gets."""

    __slots__ = ("key", "offset", "time_ns", "value")

    def __init__(self, key: bytes, value: bytes, time_ns: int, offset: int) -> None:
        self.key = key
        self.value = value
        self.time_ns = time_ns
        self.offset = offset


class BareConsumer(asyncio.Protocol):
    """Gathers whole frames for a task that handles them."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._buffered = 0
        self._frames: deque[tuple[int, bytes]] = deque()
        self._work = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self.transport.write(CONSUMER)

    def data_received(self, data: bytes) -> None:
        self._received += data
        for record, count in split_frames(self._received):
            self._frames.append((count, record[FRAME.size :]))
            self._buffered += len(record)
        if self._buffered > BUFFER_BYTES:
            self.transport.pause_reading()
        self._work.set()

    async def next_frame(self) -> tuple[int, bytes]:
        """Return the count and the body of the next frame."""
        while not self._frames:
            self._work.clear()
            await self._work.wait()
        count, body = self._frames.popleft()
        self._buffered -= FRAME.size + len(body)
        if self._buffered < BUFFER_BYTES and not self.transport.is_reading():
            self.transport.resume_reading()
        return count, body


def messages_of(count: int, body: bytes, offset: int) -> Iterator[BareMessage]:
    """Yield the messages of a frame."""
    times = struct.unpack_from(f"<{count}q", body)
    lengths = struct.unpack_from(f"<{2 * count}I", body, 8 * count)
    key_at = 20 * count
    value_at = key_at + sum(lengths[:count])
    for index in range(count):
        key_end = key_at + lengths[index]
        value_end = value_at + lengths[count + index]
        yield BareMessage(
            body[key_at:key_end], body[value_at:value_end], times[index], offset + index
        )
        key_at, value_at = key_end, value_end


async def consume(address: str, count: int) -> Figures:
    """Handle `count` messages; the clock runs from the first to the last."""
    host, _, port = address.partition(":")
    _, consumer = await asyncio.get_running_loop().create_connection(BareConsumer, host, int(port))
    print(json.dumps({"ready": True}), flush=True)
    clock = Clock()
    handle = make_handler(clock, count)
    offset = 0
    while True:
        number, body = await consumer.next_frame()
        for message in messages_of(number, body, offset):
            await handle(message)
        consumer.transport.write(ACK.pack(number))
        offset += number
        if offset >= count:
            return clock.figures
        await asyncio.sleep(0)


async def serve(path: str) -> None:
    """Serve until the process is terminated; print the address first."""
    log = BareLog(path)
    server = await asyncio.get_running_loop().create_server(lambda: BareLogServer(log), "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    print(json.dumps({"address": f"{host}:{port}"}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve or consume."""
    role, *arguments = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if role == "serve":
            runner.run(serve(*arguments))
        else:
            print(json.dumps(runner.run(consume(arguments[0], int(arguments[1])))), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "bare_consume.py"
    main()
