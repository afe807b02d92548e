"""`keylane produce`: one message, or one for each line of standard input."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import BinaryIO, NamedTuple

import msgspec

from ..producer import Producer, Ticket
from ..protocol.errors import ConfigError, InvalidRequestError, MessageTooLargeError
from ..protocol.ids import check_name
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..protocol.message import Receipt
from .options import OutputFormat, parse_addresses
from .screen import show_json

LINE_BYTES_MAX = 8 * MESSAGE_BYTES_MAX
"""A largest message written in JSON with every byte escaped still fits."""
CHUNK_BYTES = 1 << 18
CHUNKS_AHEAD = 8
TICKETS_AHEAD = 10_000


class Outgoing(NamedTuple):
    """A message to send."""

    key: bytes
    value: bytes
    properties: Mapping[str, str] | None = None


class _JsonLine(msgspec.Struct, forbid_unknown_fields=True):
    value: object
    key: str | None = None
    properties: dict[str, str] | None = None


def parse_line(line: bytes, *, separator: bytes | None, as_json: bool) -> Outgoing:
    """
    One line, its line end already off.

    With a separator, what stands before its first place is the key; without it in the line there is no key.
    In JSON: `{"value": …, "key": "…", "properties": {…}}`; a value that is no string is kept as JSON.

    Raises:
        InvalidRequestError: not such an object.
    """
    if as_json:
        try:
            found = msgspec.json.decode(line, type=_JsonLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"not a message in JSON: {error}") from None
        value = found.value
        packed = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        return Outgoing((found.key or "").encode(), packed, found.properties)
    if separator is None:
        return Outgoing(b"", line)
    key, found_it, value_bytes = line.partition(separator)
    return Outgoing(key, value_bytes) if found_it else Outgoing(b"", line)


async def read_lines(stream: BinaryIO) -> AsyncIterator[bytes]:
    """
    The lines of `stream` without their ends, as they come; read by a thread that may be left waiting.

    Raises:
        MessageTooLargeError: a line over LINE_BYTES_MAX.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(CHUNKS_AHEAD)

    # Below the buffer, whose lock a thread that still waits would hold while the interpreter ends.
    source = getattr(stream, "raw", stream)

    def read() -> None:
        while True:
            room.acquire()
            data = source.read(CHUNK_BYTES)
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, data)
            except RuntimeError:  # the loop has ended before the input did
                return
            if not data:
                return

    # A daemon: a command that is interrupted must not wait for a terminal nobody types into.
    threading.Thread(target=read, name="standard input", daemon=True).start()
    rest = b""
    while data := await chunks.get():
        room.release()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > LINE_BYTES_MAX:
            raise MessageTooLargeError(
                "a line without end", size_bytes=len(rest), limit_bytes=LINE_BYTES_MAX
            )
    if rest:
        yield rest


class _Tally:
    """What became of the messages, shown as they are answered (JSON) or at the end (table)."""

    def __init__(self, form: OutputFormat) -> None:
        self._json = form is OutputFormat.JSON
        self._first: Receipt | None = None
        self._count = 0
        self._partitions: set[int] = set()

    def add(self, receipt: Receipt) -> None:
        self._count += 1
        self._first = self._first or receipt
        self._partitions.add(receipt.partition_id)
        if self._json:
            show_json(receipt)

    def close(self) -> None:
        if self._json:
            return
        if self._count == 1 and self._first is not None:
            one = self._first
            print(f"stored at offset {one.offset} of partition {one.partition_id} ({one.durable})")
        else:
            partitions = ", ".join(map(str, sorted(self._partitions))) or "none"
            print(f"{self._count} messages stored; partitions: {partitions}")


async def produce(
    meta: str,
    form: OutputFormat,
    *,
    subject: str,
    key: str,
    value: str | None,
    separator: str | None,
    as_json: bool,
) -> None:
    """
    Send `value`, or each line of standard input, and show where it is stored.

    Raises:
        KeylaneError: of the first message that was given up, or of an impossible option.
    """
    check_name("subject", subject)
    if value is not None and (separator is not None or as_json):
        raise ConfigError("--key-separator and --json are for lines, not for VALUE")
    if as_json and separator is not None:
        raise ConfigError("a line is either JSON or has a --key-separator")
    if key and (separator is not None or as_json):
        raise ConfigError("the key is in each line: leave --key out")
    if separator == "":
        raise ConfigError("an empty --key-separator")
    async with Producer(parse_addresses(meta)) as producer:
        tally = _Tally(form)
        if value is not None:
            sent = producer.send(subject, _bytes(value), key=_bytes(key))
            tally.add(await sent)
        else:
            split = None if separator is None else _bytes(separator)
            await _send_lines(producer, tally, subject, _bytes(key), split, as_json)
        tally.close()


async def _send_lines(
    producer: Producer,
    tally: _Tally,
    subject: str,
    key: bytes,
    separator: bytes | None,
    as_json: bool,
) -> None:
    tickets: deque[Ticket] = deque()
    async for line in read_lines(sys.stdin.buffer):
        message = parse_line(line, separator=separator, as_json=as_json)
        await producer.room()
        tickets.append(
            producer.send(
                subject,
                message.value,
                key=message.key or key,
                properties=message.properties,
            )
        )
        while tickets and (tickets[0].done or len(tickets) > TICKETS_AHEAD):
            tally.add(await tickets.popleft())
    while tickets:
        tally.add(await tickets.popleft())


def _bytes(text: str) -> bytes:
    """What the user typed, byte for byte, whatever its encoding."""
    return text.encode(errors="surrogateescape")
