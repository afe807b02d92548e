"""What is written in one turn of the event loop goes to the socket together, in order."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.frames import Append
from keylane.rpc.turns.gathered_writes import (
    GATHERED_BYTES_MAX,
    READ_BYTES,
    GatheredTransport,
    GatheringSocket,
)

PING = b"\x89\x00"


class KeptWrites:
    """A transport that keeps what is written to it, and a loop that runs callbacks when the test says so."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.soon = []

    def write(self, data) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def call_soon(self, callback) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


def test_frames_of_a_turn_are_written_together_at_its_end():
    wire = KeptWrites()
    transport = GatheredTransport(wire, wire.call_soon)
    for frame in (b"\x82one", b"\x82two", b"\x82three"):
        transport.write(frame)
    assert not wire.written
    assert len(wire.soon) == 1
    wire.turn()
    assert wire.written == [b"\x82one\x82two\x82three"]
    transport.write(b"\x82four")
    wire.turn()
    assert wire.written[1:] == [b"\x82four"]


def test_ping_and_close_are_not_kept_for_the_end_of_the_turn():
    """A socket may be closed at once after the frame that says so."""
    wire = KeptWrites()
    transport = GatheredTransport(wire, wire.call_soon)
    transport.write(b"\x82one")
    transport.write(PING)
    assert b"".join(wire.written) == b"\x82one" + PING
    wire.turn()
    assert b"".join(wire.written) == b"\x82one" + PING


def test_large_frame_is_written_at_once_and_is_not_copied():
    wire = KeptWrites()
    seen = []
    wire.write = seen.append
    transport = GatheredTransport(wire, wire.call_soon)
    transport.write(b"\x82small")
    large = bytearray(b"\x82") + bytes(GATHERED_BYTES_MAX)
    transport.write(large)
    assert seen[0] == b"\x82small"
    assert seen[1] is large


@given(st.lists(st.one_of(st.integers(0, 40_000), st.none()), max_size=30))
def test_bytes_keep_their_order_whatever_is_written(sizes):
    """A size is a piece's; None is the end of a turn."""
    wire = KeptWrites()
    transport = GatheredTransport(wire, wire.call_soon)
    sent = b""
    for number, size in enumerate(sizes):
        if size is None:
            wire.turn()
            continue
        piece = bytes([number]) * size
        sent += piece
        transport.write(piece)
    wire.turn()
    assert b"".join(wire.written) == sent


async def test_requests_of_a_turn_share_a_write_to_the_socket(network, server, monkeypatch):
    """A real channel: three calls begun together are one write, and all are answered."""
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    socket = channel._socket
    assert isinstance(socket, GatheringSocket)
    gathered = socket._writer.transport
    writes = []
    real = gathered._transport

    class Counted:
        def write(self, data) -> None:
            writes.append(len(data))
            real.write(data)

        def is_closing(self) -> bool:
            return real.is_closing()

    monkeypatch.setattr(gathered, "_transport", Counted())
    calls = [channel.begin(Append(number), timeout_ms=5_000) for number in (1, 2, 3)]
    assert not writes
    answers = await asyncio.gather(*calls)
    assert len(writes) == 1
    assert [answer.base_offset for answer, _ in answers] == [0, 1, 2]
    assert real.max_size <= READ_BYTES
    await channel.close()
