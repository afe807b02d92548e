"""The first frame of a connection whose other frames a test writes itself."""

from __future__ import annotations

import aiohttp

from keylane.protocol.frames import Hello, Welcome, decode_answer, encode_frame
from keylane.protocol.membership.versions import VERSION


async def greet(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Tell the version, and take the answer."""
    await socket.send_bytes(encode_frame(1, Hello(VERSION)))
    _, answer, _ = decode_answer(await socket.receive_bytes())
    assert isinstance(answer, Welcome)
