"""The framing of RFC 6455: heads of frames, masks, messages of several frames.  Pure.

    FIN, opcode │ MASK, length (7 bits, or 16, or 64) │ key, if masked │ payload

A client's frames say that they are masked, and their key is zero, so that the payload is as it was:
a key is there to keep the scripts of a page from choosing what a proxy reads (RFC 6455, 10.3), and
programs can open any connection anyway.

Source: RFC 6455, 5.2 to 5.5.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview
HEAD_BYTES_MAX = 14
CONTROL_BYTES_MAX = 125
SHORT_BYTES = 126
"""A shorter payload has its length in the head's second byte."""
ZERO_KEY = bytes(4)
_FIN, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F
_U16, _U64 = struct.Struct("!H"), struct.Struct("!Q")
_SHORT, _MEDIUM, _LONG = struct.Struct("!BB"), struct.Struct("!BBH"), struct.Struct("!BBQ")


class Opcode(IntEnum):
    """The kind of a frame."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_BINARY = int(Opcode.BINARY)
_OPCODES = {int(opcode): opcode for opcode in Opcode}


class CloseCode(IntEnum):
    """Why a WebSocket is closed."""

    OK = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    ABNORMAL = 1006
    POLICY_VIOLATION = 1008
    MESSAGE_TOO_BIG = 1009
    TRY_AGAIN_LATER = 1013


class BrokenSocketError(Exception):
    """The peer's bytes are no WebSocket frames, or too many; `close_code` says so to the peer."""

    def __init__(self, message: str, close_code: CloseCode = CloseCode.PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.message = message
        self.close_code = close_code


class Head(NamedTuple):
    """The head of a frame."""

    final: bool
    opcode: Opcode
    length: int
    key: bytes
    """Of its mask; b"": there is none."""
    head_bytes: int


def encode_head(opcode: Opcode, length: int, *, masked: bool) -> bytes:
    """The head of a whole message of `length` bytes; `masked`: by the key zero."""
    first, mask = _FIN | opcode, _MASKED if masked else 0
    if length < SHORT_BYTES:
        head = _SHORT.pack(first, mask | length)
    elif length < 1 << 16:
        head = _MEDIUM.pack(first, mask | 126, length)
    else:
        head = _LONG.pack(first, mask | 127, length)
    return head + ZERO_KEY if masked else head


def short_heads(opcode: Opcode, *, masked: bool) -> tuple[bytes, ...]:
    """The heads of messages of 0 to SHORT_BYTES - 1 bytes, as `encode_head` makes them."""
    return tuple(encode_head(opcode, length, masked=masked) for length in range(SHORT_BYTES))


def ordinary_frame(data: memoryview, start: int, end: int, *, masked: bool) -> tuple[int, int]:
    """
    Where the payload of the frame at `start` begins and ends, if it is the ordinary one; (0, 0) if
    it is any other.

    The ordinary frame is a whole binary message, its length takes up to two bytes, it ends at `end`
    or before it, and its mask is that of the other end: the key zero of a client, none of a server.
    """
    body = start + 2
    if body > end or data[start] != _FIN | _BINARY:
        return 0, 0
    length = data[start + 1]
    if masked:
        length ^= _MASKED
        body += 4
    if length == 126:
        body += 2
        if body > end:
            return 0, 0
        length = data[start + 2] << 8 | data[start + 3]
    elif length > 126:
        return 0, 0
    stop = body + length
    if stop > end or (masked and data[body - 4 : body] != ZERO_KEY):
        return 0, 0
    return body, stop


def decode_head(data: memoryview) -> Head | None:
    """
    The head at the beginning of `data`; None: its end has not come yet.

    Raises:
        BrokenSocketError
    """
    if len(data) < 2:
        return None
    first, second = data[0], data[1]
    opcode = _OPCODES.get(first & _OPCODE)
    if opcode is None or first & _RESERVED:
        raise BrokenSocketError(f"a WebSocket frame that begins with {first:#04x}")
    length, end = second & _LENGTH, 2
    if opcode >= Opcode.CLOSE and (length > CONTROL_BYTES_MAX or not first & _FIN):
        raise BrokenSocketError(f"a {opcode.name} frame that is long, or in parts")
    if length >= 126:
        number = _U16 if length == 126 else _U64
        end += number.size
        if len(data) < end:
            return None
        (length,) = number.unpack_from(data, 2)
    key = b""
    if second & _MASKED:
        key = bytes(data[end : end + 4])
        end += 4
        if len(data) < end:
            return None
    return Head(bool(first & _FIN), opcode, length, key, end)


def unmask(payload: bytearray, key: bytes) -> None:
    """Take a mask off, in place."""
    if key and key != ZERO_KEY:
        size = len(payload)
        mask = (key * (size // 4 + 1))[:size]
        plain = int.from_bytes(payload, "little") ^ int.from_bytes(mask, "little")
        payload[:] = plain.to_bytes(size, "little")


class Joiner:
    """
    Makes messages of the frames that are no control frames.

    Args:
        bytes_max: of a message.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._begun = bytearray()
        """One buffer: a list of frames would grow with empty ones, and with the overhead of tiny
        ones.
        """
        self.opcode: Opcode | None = None
        """Of the message whose end has not come; None: none has begun."""

    @property
    def begun_bytes(self) -> int:
        """Of the message whose end has not come."""
        return len(self._begun)

    def check(self, head: Head) -> None:
        """Raises BrokenSocketError if this frame must not come now, or makes its message too
        long.
        """
        if head.opcode >= Opcode.CLOSE:
            return
        continued = head.opcode is Opcode.CONTINUATION
        if continued != (self.opcode is not None):
            raise BrokenSocketError(f"a {head.opcode.name} frame out of its turn")
        if len(self._begun) + head.length > self.bytes_max:
            raise BrokenSocketError(
                f"a message of over {self.bytes_max} bytes", CloseCode.MESSAGE_TOO_BIG
            )

    def add(self, head: Head, payload: bytearray) -> tuple[Opcode, bytearray] | None:
        """The message that this frame ends, with the opcode of its first frame; None: it goes
        on.
        """
        if self.opcode is None:
            if head.final:
                return head.opcode, payload
            self.opcode = head.opcode
        self._begun += payload
        if not head.final:
            return None
        opcode, whole = self.opcode, self._begun
        self._begun, self.opcode = bytearray(), None
        return opcode, whole
