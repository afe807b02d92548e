"""Lines of input become messages, however they are cut up on the way."""

import asyncio
import errno
import fcntl
import io
import os
import resource
import time

import pytest

from keylane.cli.commands.lines import (
    LINE_BYTES_MAX,
    RANGES_MAX,
    LineFormat,
    OutgoingMessage,
    format_ranges,
    numbered_lines,
    parse_line,
    parse_ranges,
    parse_separator,
    read_lines,
)
from keylane.protocol.errors import (
    ConfigError,
    InputError,
    InvalidRequestError,
    MessageTooLargeError,
)


@pytest.mark.parametrize(
    ("line", "separator", "as_json", "message"),
    [
        (b"hello", None, False, OutgoingMessage(b"", b"hello")),
        (b"k=v=w", b"=", False, OutgoingMessage(b"k", b"v=w")),
        (b"\xff::\xfe", b"::", False, OutgoingMessage(b"\xff", b"\xfe")),
        (b'{"value": "text"}', None, True, OutgoingMessage(b"", b"text")),
        (b'{"value": {"n": [1]}, "key": "k"}', None, True, OutgoingMessage(b"k", b'{"n":[1]}')),
        (b'{"value": null, "key": null}', None, True, OutgoingMessage(b"", b"null")),
        (
            '{"value": "ü", "key": "ß", "properties": {"a": "b"}}'.encode(),
            None,
            True,
            OutgoingMessage("ß".encode(), "ü".encode(), {"a": "b"}),
        ),
    ],
)
def test_line_is_parsed_into_key_value_and_properties(line, separator, as_json, message):
    """Key, value and properties are found where they are."""
    assert parse_line(line, LineFormat(separator, as_json)) == message


@pytest.mark.parametrize(
    ("line", "value"),
    [(b"=v", b"v"), (b"no key", b"no key"), (b"", b"")],
    ids=["empty", "none", "blank"],
)
def test_line_without_a_key_is_refused_unless_keyless(line, value):
    with pytest.raises(InvalidRequestError, match="--keyless"):
        parse_line(line, LineFormat(b"="))
    assert parse_line(line, LineFormat(b"=", keyless=True)) == OutgoingMessage(b"", value)


@pytest.mark.parametrize(
    ("typed", "separator"),
    [
        ("=", b"="),
        ("::", b"::"),
        (r"\t", b"\t"),
        (r"\0", b"\0"),
        (r"\\t", b"\\t"),
        (r"a\x1f\xff", b"a\x1f\xff"),
        ("\udcff", b"\xff"),
        ("ü", "ü".encode()),
    ],
)
def test_separator_is_unescaped(typed, separator):
    assert parse_separator(typed) == separator


@pytest.mark.parametrize("typed", ["", "\\", r"\n", r"\q", r"\x1", "\n"])
def test_separator_is_refused_when_it_cannot_be_in_a_line(typed):
    with pytest.raises(ConfigError, match="--key-separator"):
        parse_separator(typed)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("3", [(3, 4)]),
        ("26386-", [(26386, None)]),
        ("3, 7-9,11,12-12,20-", [(3, 4), (7, 10), (11, 12), (12, 13), (20, None)]),
    ],
)
def test_ranges_are_parsed(text, ranges):
    assert parse_ranges(text) == ranges


@pytest.mark.parametrize("text", ["", "0", "3,", "-4", "5-3", "3,3", "9,7", "5-,9", "x", "1" * 40])
def test_ranges_are_refused_when_they_do_not_rise(text):
    with pytest.raises(ConfigError, match="--lines"):
        parse_ranges(text)


def test_ranges_shown_are_parsed_back():
    ranges = [(3, 4), (7, 10), (20, None)]
    assert parse_ranges(format_ranges(ranges)) == ranges


def test_ranges_shown_end_open_when_there_are_too_many():
    ranges = [(2 * n + 1, 2 * n + 2) for n in range(3 * RANGES_MAX)]
    shown = parse_ranges(format_ranges(ranges))
    assert shown == [*ranges[: RANGES_MAX - 1], (ranges[RANGES_MAX - 1][0], None)]


@pytest.mark.parametrize(
    ("text", "numbers"), [("", [1, 2, 3, 4]), ("2", [2]), ("1,3-", [1, 3, 4]), ("9-", [])]
)
async def test_lines_are_numbered_and_chosen(text, numbers):
    ranges = parse_ranges(text) if text else []
    stream = io.BytesIO(b"l1\nl2\nl3\nl4\n")
    chosen = [(number, line) async for number, line in numbered_lines(stream, ranges)]
    assert chosen == [(number, b"l%d" % number) for number in numbers]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"{}",
        b'{"key": "k"}',
        b'{"value": 1, "kee": "k"}',
        b'{"value": "\xff"}',
        b"[1]",
    ],
)
def test_json_that_is_no_message_is_refused(line):
    """What is not such an object is refused, and the text says why."""
    with pytest.raises(InvalidRequestError, match="not a message in JSON"):
        parse_line(line, LineFormat(as_json=True))


async def lines_of(data: bytes) -> list[bytes]:
    return [line async for line in read_lines(io.BytesIO(data))]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\r\n\nb", [b"a", b"", b"b"]),
        (b"a\rb\r\r\nc\r", [b"a\rb\r", b"c\r"]),
        (b"x" * 1_000_000 + b"\ny\n", [b"x" * 1_000_000, b"y"]),
    ],
    ids=["nothing", "no end", "two", "windows", "carriage returns", "long"],
)
async def test_lines_are_read_whole_without_their_ends(data, lines):
    """Lines come whole, without their ends, the last one with or without an end."""
    assert await lines_of(data) == lines


async def test_line_without_end():
    """A line that never ends is refused before it fills the memory."""
    with pytest.raises(MessageTooLargeError):
        await lines_of(b"x" * (LINE_BYTES_MAX + 2_000_000))


async def test_line_asked_for_behind_the_end_is_an_error():
    """A slip in a number must not look like a success."""
    lines = numbered_lines(io.BytesIO(b"a\n"), [(1, 2), (7, 8)])
    assert await anext(lines) == (1, b"a")
    with pytest.raises(InputError, match="line 7 was requested, and the input has 1"):
        await anext(lines)


class Broken(io.RawIOBase):
    """Input that the system stops giving, as of a terminal that is gone."""

    def __init__(self) -> None:
        self._parts = [b"a\nb\n"]

    def read(self, _size: int = -1) -> bytes:
        if self._parts:
            return self._parts.pop()
        raise OSError(errno.EIO, "Input/output error")


async def test_input_that_breaks_off_is_an_error_and_no_end():
    lines = numbered_lines(Broken(), [])
    assert await anext(lines) == (1, b"a")
    assert await anext(lines) == (2, b"b")
    with pytest.raises(InputError, match="in line 3") as raised:
        await anext(lines)
    assert raised.value.line == 3


async def test_input_that_does_not_block_is_waited_for():
    """Another program may have left the pipe so: nothing to read now is not the end; whatever the
    pipe's number is.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    low, writer = os.pipe()
    reader = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1_100)
    os.close(low)
    os.set_blocking(reader, False)
    with open(reader, "rb") as stream:

        def write() -> None:
            for piece in (b"a\nb", b"\nc\n"):
                time.sleep(0.1)
                os.write(writer, piece)
            os.close(writer)

        writing = asyncio.create_task(asyncio.to_thread(write))
        lines = [line async for line in read_lines(stream)]
        await writing
    assert lines == [b"a", b"b", b"c"]
