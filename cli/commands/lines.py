"""Reads and numbers input lines, selects some of them, and parses them into messages."""

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
from ...protocol.text import printable

LINE_BYTES_MAX = 8 * MESSAGE_BYTES_MAX
"""Maximum length of a line in bytes, which fits the largest message as JSON with every byte
escaped.
"""
STANDARD_INPUT = "standard input"
CHUNK_BYTES = 1 << 18
PREFETCH_CHUNKS = 8
RANGES_MAX = 200
"""Maximum number of line ranges that are shown. If there are more, the last one is open-ended."""

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPES = {"t": b"\t", "0": b"\0", "\\": b"\\"}
_RANGE = re.compile(r"([0-9]{1,18})(?:(-)([0-9]{1,18})?)?")

RecordParser = Callable[[AsyncIterator[tuple[int, bytes]]], AsyncIterator[tuple[int, bytes]]]
"""Converts numbered lines, which include their line ends, to numbered records."""


class OutgoingMessage(NamedTuple):
    """A message to send."""

    key: bytes
    value: bytes
    properties: Mapping[str, str | bytes] | None = None


class LineFormat(NamedTuple):
    """The format of a line: JSON, a key and a value with a separator, or only a value."""

    separator: bytes | None = None
    as_json: bool = False
    keyless: bool = False
    """Only with a separator: True if a line without a key is sent as an unordered message, False if
    it is an error.
    """


def parse_line(line: bytes, form: LineFormat) -> OutgoingMessage:
    """
    Parse one line, without its line end, into a message.

    With a separator, the key is the text before the first occurrence of the separator.

    Raises:
        InvalidRequestError: the line is not a valid JSON message, or its key is missing.
    """
    if form.as_json:
        return OutgoingMessage(*read_message(line))
    if form.separator is None:
        return OutgoingMessage(b"", line)
    key, separator, value = line.partition(form.separator)
    if key and separator:
        return OutgoingMessage(key, value)
    if not form.keyless:
        problem = "no key before the separator" if separator else "no separator, so no key"
        expected = form.separator.decode(errors="backslashreplace")
        raise InvalidRequestError(
            f"{problem}; --keyless sends such lines without order; a line with a key is "
            f"KEY{printable(expected)}VALUE"
        )
    return OutgoingMessage(b"", value if separator else line)


def strip_line_end(line: bytes) -> bytes:
    r"""Return the line without its end, `\n` or `\r\n`; a lone `\r` does not end a line."""
    return line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line


def parse_separator(text: str) -> bytes:
    r"""
    Parse a separator as typed by the user: `\t` is a tab, `\0` a zero byte, `\\` a backslash,
    `\x1f` the byte with that code.

    Raises:
        ConfigError: the separator is empty, or contains an unknown escape or a line end.
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
        ConfigError: the text is not a list of ascending line numbers.
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


def format_ranges(ranges: Sequence[tuple[int, int | None]]) -> str:
    """Format ranges in the syntax of `parse_ranges`. If there are more than RANGES_MAX, the last
    one is open-ended.
    """
    limited = list(ranges[:RANGES_MAX])
    if len(ranges) > RANGES_MAX:
        limited[-1] = (limited[-1][0], None)
    return ",".join(
        f"{start}-" if end is None else f"{start}" if end == start + 1 else f"{start}-{end - 1}"
        for start, end in limited
    )


class NumberedLines:
    """
    Iterates over the lines of a stream, numbered from 1. `count` is the number of lines read so
    far.

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
            located = error.copy(message=f"{error.message}, in line {number}")
            located.details["line"] = number
            raise located from error


async def numbered_lines(
    stream: BinaryIO,
    ranges: Sequence[tuple[int, int | None]],
    *,
    records: RecordParser | None = None,
    name: str = STANDARD_INPUT,
) -> AsyncIterator[tuple[int, bytes]]:
    """
    Yield the lines of `stream` in `ranges` (all if it is empty), numbered from 1.

    Args:
        records: converts lines to records; a record has the number of its first line.
        name: the name of the stream, for error messages.

    Raises:
        MessageTooLargeError: see `read_lines`; the detail `line` is the line number.
        InputError: see `read_lines`; also if the input ends before the last line in `ranges`, or if
            no record begins in one of them.
        KeylaneError: raised by `records`.
    """
    pending_ranges = list(ranges or [(1, None)])
    lines = NumberedLines(stream, name, with_ends=records is not None)
    row = selected = 0  # the numbers of the last record, and of the last one that was selected
    async for number, record in aiter(lines) if records is None else records(aiter(lines)):
        while pending_ranges and (end := pending_ranges[0][1]) is not None and end <= number:
            if row > 0 and selected < pending_ranges[0][0]:  # otherwise it is the header
                raise _no_row_error(pending_ranges[0], row)
            del pending_ranges[0]
        if not pending_ranges:
            return
        row = number
        if pending_ranges[0][0] <= number:
            selected = number
            yield number, record
    last_number = max((end - 1 for _, end in ranges if end is not None), default=0)
    if last_number > lines.count:
        raise InputError(
            f"line {last_number} was requested, and the input has {lines.count}",
            line=lines.count + 1,
        )
    is_open = not pending_ranges or pending_ranges[0][1] is None
    if not is_open and row > 0 and selected < pending_ranges[0][0]:
        raise _no_row_error(pending_ranges[0], row)


def _no_row_error(lines: tuple[int, int | None], row: int) -> InputError:
    """Return the error for requested lines that are all blank or inside a row."""
    return InputError(
        f"no row begins in line {format_ranges([lines])}; the row before begins in line {row}",
        line=lines[0],
    )


async def read_lines(
    stream: BinaryIO, name: str = STANDARD_INPUT, *, with_ends: bool = False
) -> AsyncIterator[bytes]:
    """
    Yield the lines of `stream` as they arrive. They are read by a daemon thread that may outlive
    the iteration.

    Args:
        with_ends: include line ends, which may be part of a quoted CSV field.

    Raises:
        MessageTooLargeError: a line has more than LINE_BYTES_MAX bytes.
        InputError: the operating system reports a read error.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    prefetch_slots = threading.Semaphore(PREFETCH_CHUNKS)

    # Read the raw stream, because a blocked thread would hold the lock of the buffer at interpreter
    # exit.
    source = getattr(stream, "raw", stream)

    def read() -> None:
        while True:
            prefetch_slots.acquire()
            data = _read_chunk(source)
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, data)
            except RuntimeError:  # the loop was closed before the end of the input
                return
            if not data or isinstance(data, OSError):
                return

    # Use a daemon thread, because an interrupted command must not wait for terminal input.
    threading.Thread(target=read, name=name, daemon=True).start()
    partial = b""
    while data := await chunks.get():
        if isinstance(data, OSError):
            raise InputError(f"{name} cannot be read: {data.strerror or data}")
        prefetch_slots.release()
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            yield line + b"\n" if with_ends else line.removesuffix(b"\r")
        if len(partial) > LINE_BYTES_MAX:
            raise MessageTooLargeError(
                "a line without end", size_bytes=len(partial), limit_bytes=LINE_BYTES_MAX
            )
    if partial:
        yield partial


def _read_chunk(source: Any) -> bytes | OSError:
    """Return the next bytes of `source`, b"" at the end, or the error. Waits even if `source` is
    non-blocking.
    """
    try:
        while (data := source.read(CHUNK_BYTES)) is None:  # non-blocking, and nothing to read yet
            # `select.select` fails for file descriptors above 1023.
            with selectors.DefaultSelector() as ready:
                ready.register(source, selectors.EVENT_READ)
                ready.select()
    except OSError as error:
        return error
    return bytes(data)
