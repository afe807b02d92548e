"""Reads, numbers and chooses the lines of the input, and turns them into messages."""

from __future__ import annotations

import asyncio
import re
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from ...protocol.errors import ConfigError, InputError, InvalidRequestError, MessageTooLargeError
from ...protocol.http.message_json import read_message
from ...protocol.limits import MESSAGE_BYTES_MAX

LINE_BYTES_MAX = 8 * MESSAGE_BYTES_MAX
"""Longest line in bytes: it holds the largest message in JSON with every byte escaped."""
STANDARD_INPUT = "standard input"
CHUNK_BYTES = 1 << 18
CHUNKS_AHEAD = 8
RANGES_MAX = 200
"""Number of line ranges in an answer; if there are more, the last one has no end."""

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPES = {"t": b"\t", "0": b"\0", "\\": b"\\"}
_RANGE = re.compile(r"([0-9]{1,18})(?:(-)([0-9]{1,18})?)?")

Records = Callable[[AsyncIterator[tuple[int, bytes]]], AsyncIterator[tuple[int, bytes]]]
"""Turns numbered lines, with their line ends, into numbered records."""


class Outgoing(NamedTuple):
    """A message to send."""

    key: bytes
    value: bytes
    properties: Mapping[str, str | bytes] | None = None


class LineFormat(NamedTuple):
    """The format of a line: JSON, key and value with a separator between them, or only a value."""

    separator: bytes | None = None
    as_json: bool = False
    keyless: bool = False
    """True if a line without a key, where there is a separator, is a message without order; False
    if it is an error.
    """


def parse_line(line: bytes, form: LineFormat) -> Outgoing:
    """
    Parse one line, without its line end, into a message.

    With a separator, the key is the text before its first occurrence. `message_json.read_message`
    reads JSON.

    Raises:
        InvalidRequestError: the line is no valid object, or a key is missing.
    """
    if form.as_json:
        return Outgoing(*read_message(line))
    if form.separator is None:
        return Outgoing(b"", line)
    before, separator, after = line.partition(form.separator)
    if before and separator:
        return Outgoing(before, after)
    if not form.keyless:
        lack = "no key before the separator" if separator else "no separator, so no key"
        raise InvalidRequestError(f"{lack}; --keyless sends such lines without order")
    return Outgoing(b"", after if separator else line)


def without_end(line: bytes) -> bytes:
    r"""Return the line without its end, `\n` or `\r\n`; a single `\r` is no line end."""
    return line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line


def parse_separator(text: str) -> bytes:
    r"""
    Return the bytes of a separator that a user typed: `\t` is a tab, `\0` a zero byte, `\\` a
    backslash, `\x1f` that byte.

    Raises:
        ConfigError: the separator is empty, or has an unknown escape or a line end.
    """

    def unescape(match: re.Match[str]) -> str:
        name = match[1]
        raw = bytes.fromhex(name[1:]) if len(name) == 3 else _ESCAPES.get(name)
        if raw is None:
            raise ConfigError(
                f"--key-separator {text!r}: the escapes are \\t, \\0, \\\\ and \\xNN, not \\{name}"
            )
        return raw.decode(errors="surrogateescape")

    separator = _ESCAPE.sub(unescape, text).encode(errors="surrogateescape")
    if not separator:
        raise ConfigError("an empty --key-separator")
    if b"\n" in separator:
        raise ConfigError("a --key-separator cannot have a line end")
    return separator


def parse_ranges(text: str) -> list[tuple[int, int | None]]:
    """
    Parse line numbers, counted from 1, into half-open ranges: "3,7-9,26386-" is
    `[(3, 4), (7, 10), (26386, None)]`.

    Raises:
        ConfigError: the text is no such list, or not in ascending order.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        start = int(match[1]) if match else 0
        stop = None if match is None or (match[2] and not match[3]) else int(match[3] or match[1])
        previous = ranges[-1][1] if ranges else 1
        if match is None or previous is None or start < previous or (stop or start) < start:
            raise ConfigError(
                f"--lines {text[:80]!r}: give ascending line numbers from 1, such as 3,7-9,26386-"
            )
        ranges.append((start, None if stop is None else stop + 1))
    return ranges


def show_ranges(ranges: Sequence[tuple[int, int | None]]) -> str:
    """Return the text that `parse_ranges` parses into `ranges`; if there are more than RANGES_MAX,
    the last range has no end.
    """
    shown = list(ranges[:RANGES_MAX])
    if len(ranges) > RANGES_MAX:
        shown[-1] = (shown[-1][0], None)
    return ",".join(
        f"{start}-" if end is None else f"{start}" if end == start + 1 else f"{start}-{end - 1}"
        for start, end in shown
    )


class NumberedLines:
    """
    The lines of a stream with their numbers from 1; `count` lines were read so far.

    Args:
        with_ends: see `read_lines`.
    """

    def __init__(self, stream: BinaryIO, name: str, *, with_ends: bool) -> None:
        self.count = 0
        self._stream = stream
        self._name = name
        self._with_ends = with_ends

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        try:
            async for line in read_lines(self._stream, self._name, with_ends=self._with_ends):
                self.count += 1
                yield self.count, line
        except (MessageTooLargeError, InputError) as error:
            number = self.count + 1
            named = error.copy(message=f"{error.message}, in line {number}")
            named.details["line"] = number
            raise named from error


async def numbered_lines(
    stream: BinaryIO,
    ranges: Sequence[tuple[int, int | None]],
    *,
    records: Records | None = None,
    name: str = STANDARD_INPUT,
) -> AsyncIterator[tuple[int, bytes]]:
    """
    Yield the lines of `stream` that are in `ranges` (all, if it is empty), with numbers from 1.

    Args:
        records: turns lines into records; the number of a record is that of its first line.
        name: the name of the stream, for errors.

    Raises:
        MessageTooLargeError, InputError: see `read_lines`; the detail `line` is the line's number.
        InputError: the input ends before the last line in `ranges`.
        KeylaneError: an error of `records`.
    """
    wanted = list(ranges or [(1, None)])
    lines = NumberedLines(stream, name, with_ends=records is not None)
    async for number, record in aiter(lines) if records is None else records(aiter(lines)):
        while wanted and (end := wanted[0][1]) is not None and end <= number:
            del wanted[0]
        if not wanted:
            return
        if wanted[0][0] <= number:
            yield number, record
    last = max((end - 1 for _, end in ranges if end is not None), default=0)
    if last > lines.count:
        raise InputError(
            f"line {last} was requested, and the input has {lines.count}", line=lines.count + 1
        )


async def read_lines(
    stream: BinaryIO, name: str = STANDARD_INPUT, *, with_ends: bool = False
) -> AsyncIterator[bytes]:
    """
    Yield the lines of `stream` as they arrive; a thread reads them, which may be abandoned.

    Args:
        with_ends: yield lines with their ends, which are part of a quoted field of CSV.

    Raises:
        MessageTooLargeError: a line has more than LINE_BYTES_MAX bytes.
        InputError: the system reports a read error.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    ahead = threading.Semaphore(CHUNKS_AHEAD)

    # The raw stream: a thread that still waits would hold the lock of the buffer when the
    # interpreter ends.
    source = getattr(stream, "raw", stream)

    def read() -> None:
        while True:
            ahead.acquire()
            data = _read_some(source)
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, data)
            except RuntimeError:  # the loop has ended before the input did
                return
            if not data or isinstance(data, OSError):
                return

    # A daemon thread, because an interrupted command must not wait for input from a terminal.
    threading.Thread(target=read, name=name, daemon=True).start()
    rest = b""
    while data := await chunks.get():
        if isinstance(data, OSError):
            raise InputError(f"{name} cannot be read: {data.strerror or data}")
        ahead.release()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n" if with_ends else line.removesuffix(b"\r")
        if len(rest) > LINE_BYTES_MAX:
            raise MessageTooLargeError(
                "a line without end", size_bytes=len(rest), limit_bytes=LINE_BYTES_MAX
            )
    if rest:
        yield rest


def _read_some(source: Any) -> bytes | OSError:
    """Wait for the next bytes, also of a non-blocking `source`; return them, none at the end, or
    the error.
    """
    try:
        while (data := source.read(CHUNK_BYTES)) is None:  # non-blocking, and nothing to read yet
            # select.select takes no file number above 1,023.
            with selectors.DefaultSelector() as ready:
                ready.register(source, selectors.EVENT_READ)
                ready.select()
    except OSError as error:
        return error
    return bytes(data)
