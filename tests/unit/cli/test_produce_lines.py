"""Lines of input become messages, however they are cut up on the way."""

import io

import pytest

from keylane.cli.produce import LINE_BYTES_MAX, Outgoing, parse_line, read_lines
from keylane.protocol.errors import InvalidRequestError, MessageTooLargeError


@pytest.mark.parametrize(
    ("line", "separator", "as_json", "message"),
    [
        (b"hello", None, False, Outgoing(b"", b"hello")),
        (b"k=v=w", b"=", False, Outgoing(b"k", b"v=w")),
        (b"=v", b"=", False, Outgoing(b"", b"v")),
        (b"no key", b"=", False, Outgoing(b"", b"no key")),
        (b"\xff::\xfe", b"::", False, Outgoing(b"\xff", b"\xfe")),
        (b'{"value": "text"}', None, True, Outgoing(b"", b"text")),
        (b'{"value": {"n": [1]}, "key": "k"}', None, True, Outgoing(b"k", b'{"n":[1]}')),
        (b'{"value": null, "key": null}', None, True, Outgoing(b"", b"null")),
        (
            '{"value": "ü", "key": "ß", "properties": {"a": "b"}}'.encode(),
            None,
            True,
            Outgoing("ß".encode(), "ü".encode(), {"a": "b"}),
        ),
    ],
)
def test_lines(line, separator, as_json, message):
    """Key, value and properties are found where they are."""
    assert parse_line(line, separator=separator, as_json=as_json) == message


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
def test_bad_json(line):
    """What is not such an object is refused, and the text says why."""
    with pytest.raises(InvalidRequestError, match="not a message in JSON"):
        parse_line(line, separator=None, as_json=True)


async def lines_of(data: bytes) -> list[bytes]:
    return [line async for line in read_lines(io.BytesIO(data))]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\r\n\nb", [b"a", b"", b"b"]),
        (b"x" * 1_000_000 + b"\ny\n", [b"x" * 1_000_000, b"y"]),
    ],
    ids=["nothing", "no end", "two", "windows", "long"],
)
async def test_reading(data, lines):
    """Lines come whole, without their ends, the last one with or without an end."""
    assert await lines_of(data) == lines


async def test_line_without_end():
    """A line that never ends is refused before it fills the memory."""
    with pytest.raises(MessageTooLargeError):
        await lines_of(b"x" * (LINE_BYTES_MAX + 2_000_000))
