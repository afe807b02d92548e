"""The framing of WebSockets, against aiohttp's."""

from __future__ import annotations

import pytest

from keylane.rpc.websocket.framing import (
    BrokenSocketError,
    CloseCode,
    Head,
    Joiner,
    Opcode,
    decode_head,
    encode_head,
    ordinary_frame,
    short_heads,
    unmask,
)

LENGTHS = [0, 1, 125, 126, 65_535, 65_536, 1 << 40]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_head_is_decoded_as_it_was_encoded(length, masked):
    data = encode_head(Opcode.BINARY, length, masked=masked)
    head = decode_head(memoryview(data))
    assert head == Head(True, Opcode.BINARY, length, bytes(4) if masked else b"", len(data))


@pytest.mark.parametrize("length", LENGTHS)
def test_head_is_not_decoded_before_its_end_has_come(length):
    data = encode_head(Opcode.BINARY, length, masked=True)
    for end in range(len(data)):
        assert decode_head(memoryview(data[:end])) is None


def test_heads_are_those_of_the_standard():
    """RFC 6455, 5.7: its examples of frames that are not masked, and the head of its masked one."""
    assert encode_head(Opcode.TEXT, 5, masked=False) == b"\x81\x05"
    assert encode_head(Opcode.BINARY, 256, masked=False) == b"\x82\x7e\x01\x00"
    assert encode_head(Opcode.BINARY, 65_536, masked=False) == b"\x82\x7f" + (65_536).to_bytes(8)
    head = decode_head(memoryview(bytes.fromhex("818537fa213d7f9f4d5158")))
    assert head == Head(True, Opcode.TEXT, 5, bytes.fromhex("37fa213d"), 6)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_mask_is_taken_off(size):
    """Also of a payload that is no multiple of the key; with the key zero nothing changes."""
    key, plain = bytes.fromhex("37fa213d"), bytes(range(250)) * 4
    payload = bytearray(byte ^ key[index % 4] for index, byte in enumerate(plain[:size]))
    for each in (key, bytes(4), b""):
        unmask(payload, each)
        assert payload == plain[:size]


@pytest.mark.parametrize(
    "data",
    [
        bytes([0xC2, 0]),  # a reserved bit
        bytes([0x83, 0]),  # an opcode that there is not
        bytes([0x09, 0]),  # a ping in parts
        bytes([0x89, 126, 0, 126]),  # a long ping
    ],
)
def test_head_is_refused_when_the_standard_knows_no_such(data):
    with pytest.raises(BrokenSocketError) as caught:
        decode_head(memoryview(data))
    assert caught.value.close_code is CloseCode.PROTOCOL_ERROR


def frame(opcode: Opcode, length: int, *, final: bool) -> Head:
    return Head(final, opcode, length, b"", 2)


def test_message_is_joined_of_its_frames():
    """Control frames come in between, and the next message begins anew."""
    joiner = Joiner(100)
    for _ in range(2):
        parts = []
        for opcode, final in (
            (Opcode.BINARY, False),
            (Opcode.PING, True),
            (Opcode.CONTINUATION, False),
            (Opcode.CONTINUATION, True),
        ):
            head = frame(opcode, 2, final=final)
            joiner.check(head)
            if opcode is not Opcode.PING:
                parts.append(joiner.add(head, bytearray(b"ab")))
        assert parts == [None, None, (Opcode.BINARY, b"ababab")]


def test_frame_is_refused_when_it_is_out_of_its_turn():
    joiner = Joiner(100)
    with pytest.raises(BrokenSocketError):
        joiner.check(frame(Opcode.CONTINUATION, 1, final=True))
    joiner.add(frame(Opcode.BINARY, 1, final=False), bytearray(b"a"))
    with pytest.raises(BrokenSocketError):
        joiner.check(frame(Opcode.BINARY, 1, final=True))


def test_message_is_refused_when_it_is_too_long():
    """Also one whose frames are too long together."""
    joiner = Joiner(10)
    joiner.check(frame(Opcode.BINARY, 10, final=True))
    with pytest.raises(BrokenSocketError) as caught:
        joiner.check(frame(Opcode.BINARY, 11, final=True))
    assert caught.value.close_code is CloseCode.MESSAGE_TOO_BIG
    joiner.add(frame(Opcode.BINARY, 6, final=False), bytearray(6))
    with pytest.raises(BrokenSocketError):
        joiner.check(frame(Opcode.CONTINUATION, 5, final=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [0, 1, 125, 126, 65_535])
def test_ordinary_frame_is_found_once_it_has_come_whole(length, masked):
    """Behind other bytes, and before others."""
    head = encode_head(Opcode.BINARY, length, masked=masked)
    data = memoryview(b"..." + head + bytes(length) + b"...")
    body, stop = 3 + len(head), 3 + len(head) + length
    assert ordinary_frame(data, 3, stop, masked=masked) == (body, stop)
    assert ordinary_frame(data, 3, len(data), masked=masked) == (body, stop)
    assert ordinary_frame(data, 3, len(data), masked=not masked) == (0, 0)
    for end in (3, 4, 5, body - 1, stop - 1):
        assert ordinary_frame(data, 3, min(end, stop - 1), masked=masked) == (0, 0)


@pytest.mark.parametrize(
    "head",
    [
        encode_head(Opcode.TEXT, 3, masked=True),
        encode_head(Opcode.PING, 3, masked=True),
        encode_head(Opcode.CLOSE, 3, masked=True),
        encode_head(Opcode.CONTINUATION, 3, masked=True),
        b"\x02\x83" + bytes(4),  # not the last frame of its message
        b"\xc2\x83" + bytes(4),  # a reserved bit
        b"\x82\x83\x00\x00\x00\x01",  # a mask that has to be taken off
        b"\x82\xff" + (3).to_bytes(8) + bytes(4),  # a length of eight bytes
    ],
)
def test_frame_that_is_not_ordinary_is_left_to_the_long_way(head):
    assert ordinary_frame(memoryview(head + b"abc"), 0, len(head) + 3, masked=True) == (0, 0)


@pytest.mark.parametrize("masked", [False, True])
def test_short_heads_are_those_that_are_encoded(masked):
    heads = short_heads(Opcode.BINARY, masked=masked)
    assert len(heads) == 126
    for length, head in enumerate(heads):
        assert decode_head(memoryview(head)) == Head(
            True, Opcode.BINARY, length, bytes(4) if masked else b"", len(head)
        )
