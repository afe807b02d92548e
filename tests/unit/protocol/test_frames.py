"""Frames: what is refused, and that limits hold on the sending side too."""

from __future__ import annotations

import struct

import msgspec
import pytest

from keylane.protocol.errors import FrameError, MessageTooLargeError
from keylane.protocol.frames import (
    HEADER_BYTES_MAX,
    Ack,
    Acked,
    Acquired,
    Append,
    Batches,
    Read,
    decode_answer,
    decode_request,
    encode_frame,
)
from keylane.protocol.limits import ACK_RANGES_MAX, BATCH_BYTES_MAX, FRAME_BYTES_MAX, PULL_BYTES_MAX
from keylane.protocol.parked import FAILURE_KIND_CHARS_MAX, FailingMessage
from keylane.protocol.parked.views import KEY_DIGEST_CHARS_MAX


def whole(packed: bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    """A frame of these bytes; `length` is what it claims of its header."""
    size = 4 + len(packed) + len(payload)
    return struct.pack("<II", size, len(packed) if length is None else length) + packed + payload


def framed(header: object, payload: bytes = b"", length: int | None = None) -> bytes:
    return whole(msgspec.msgpack.encode(header), payload, length)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x00\x00\x00\x00",
        struct.pack("<I", 4) + bytes(4),
        struct.pack("<I", 5) + b"\x00\x00\x00\x00\x93",
        framed([1, 5, 7])[:-1],
        framed([1, 5, 7]) + b"x",
        framed([1, 5, 7], length=5),
        framed([1, 5, 7], length=3),
        framed([1, 5, 7], length=2**32 - 1),
        framed([1, 5, 7], b"x" * 99, length=HEADER_BYTES_MAX + 1),
        framed([0, 5, 7]),
        framed([99, 5, 7]),
        framed([-1, 5, 7]),
        framed(["1", 5, 7]),
        framed([65, 5, 7, "fsync", False]),
        framed([1]),
        framed([1, 5]),
        framed([1, "5", 7]),
        framed([1, 5, None]),
        framed([1, 5, 7.5]),
        framed([2, 5, 7, "g", b"\xff\xfe", 1, 1]),
        framed([4, 5, 7, "g", "s", 1, [[1]]]),
        framed({"correlation_id": 5}),
        framed(7),
        whole(b"\xc1"),
        whole(b"\x93\x01\xa2\xff"),
        whole(b"\xdd\xff\xff\xff\xff"),
        whole(b"\x97\x02\x05\x07\xa2\xff\xff\xa1s\x01\x01"),
        whole(b"\x94\x01\x05\x07" + b"\x91" * 200_000 + b"\x90"),
        b"x" * (FRAME_BYTES_MAX + 1),
    ],
    ids=lambda data: f"{len(data)}-{data[:12].hex()}",
)
def test_malformed_frame_is_refused(data):
    """A lying length, an unknown type, or fields that do not fit: a FrameError, nothing else."""
    with pytest.raises(FrameError):
        decode_request(data)


def test_frame_is_decoded_when_none_of_its_parts_is_malformed():
    """The malformed frames above differ from it in a part each."""
    assert decode_request(framed([1, 5, 7]))[:2] == (5, Append(7))


def test_answer_is_no_request_and_a_request_no_answer():
    """The two directions do not take each other's types."""
    with pytest.raises(FrameError):
        decode_request(encode_frame(1, Acked(2)))
    with pytest.raises(FrameError):
        decode_answer(encode_frame(1, Append(2)))


def test_fields_of_a_newer_protocol_are_left_out():
    """A frame with more fields than this version knows is understood as far as it goes."""
    assert decode_request(framed([6, 5, 7, 0, 100, False, 0, "newer", {"a": 1}]))[:2] == (
        5,
        Read(7, 0, 100),
    )


def test_deeply_nested_answer_is_refused():
    """Details nested deeper than a stack goes are a FrameError, not a crash of the reader."""
    deep = b"\x91" * 100_000 + b"\x90"
    header = b"\x95\x7f\x01\x01\xa1x\x81\xa1a" + deep
    with pytest.raises(FrameError):
        decode_answer(whole(header))


def test_payload_is_not_copied():
    """The payload is a view of the frame received."""
    data = encode_frame(1, Append(2), b"payload")
    _, _, payload = decode_request(data)
    assert payload.obj is data


def test_frame_over_the_limit_is_not_made():
    """What the other side would close the connection over is refused before it is sent."""
    room = FRAME_BYTES_MAX - len(encode_frame(1, Append(2)))
    assert len(encode_frame(1, Append(2), bytes(room))) == FRAME_BYTES_MAX
    with pytest.raises(MessageTooLargeError):
        encode_frame(1, Append(2), bytes(room + 1))
    ranges = tuple((number * 2, number * 2 + 1) for number in range(60_000))
    with pytest.raises(MessageTooLargeError):
        encode_frame(1, Ack(2, "g", "s", 3, ranges))


def test_largest_allowed_of_everything_fits_a_frame():
    """Ranges, batches and pulls at their limits fit the limit of a frame."""
    high = 2**63 - 1
    ranges = tuple((high - 2 * number - 1, high - 2 * number) for number in range(ACK_RANGES_MAX))
    name = "g" * 200
    tries = tuple((high - number, high) for number in range(1_000))
    digits = "\U0001f4a3" * FAILURE_KIND_CHARS_MAX
    failing = FailingMessage(
        offset=high,
        key_digest="k" * KEY_DIGEST_CHARS_MAX,
        since_ms=high,
        at_ms=high,
        attempts=high,
        kind=digits,
        text=digits * 5,
        client=digits,
    )
    ack = Ack(high, name, "s" * 64, high, ranges, tries, failing)
    assert decode_request(encode_frame(2**63, ack))[:2] == (2**63, ack)
    acquired = Acquired(high, ranges, high, True)
    assert decode_answer(encode_frame(2**63, acquired))[:2] == (2**63, acquired)
    encode_frame(2**63, Batches(high, high, high, True), bytes(PULL_BYTES_MAX + BATCH_BYTES_MAX))


NUMBERS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("payload", [b"", b"payload"])
def test_correlation_id_of_every_size_comes_back(number, payload):
    for request in (Append(3), Read(1, 2, 3), Ack(1, "group", "a" * 16, 7, ((5, 9),) * 20)):
        frame = encode_frame(number, request, payload)
        assert decode_request(frame) == (number, request, payload)
        assert decode_request(bytearray(frame)) == (number, request, payload)


@pytest.mark.parametrize(
    "number",
    [
        b"\xcc\x05",
        b"\xcd\x00\x05",
        b"\xce\x00\x00\x00\x05",
        b"\xcf" + bytes(7) + b"\x05",
        b"\xd0\x05",
    ],
)
def test_correlation_id_is_read_whatever_form_a_client_gives_it(number):
    """msgpack has several forms of a small number; other languages' libraries may take a longer
    one.
    """
    packed = b"\x93\x01" + number + b"\x07"
    data = whole(packed)
    assert decode_request(data) == (5, Append(7), b"")


@pytest.mark.parametrize(
    "packed", [b"\x92\x45\xcd", b"\x92\x45\xce\x00", b"\x92\x45\xcc", b"\x92\x45\xa1a"]
)
def test_correlation_id_that_is_cut_or_no_number_is_refused(packed):
    """Also where bytes of the payload follow, which are none of the header's."""
    with pytest.raises(FrameError):
        decode_answer(whole(packed, b"payload"))
