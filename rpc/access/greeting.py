"""The first calls of a client on a channel to a broker: its version and its capability, which is
renewed before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...protocol.errors import KeylaneError
from ...protocol.frames import Authenticate, Authenticated, Hello, Welcome
from ...protocol.membership.versions import VERSION, check_server
from ..channel import DataChannel
from .credentials import Credentials, ShownCapability

RENEW_AGAIN_S = 1.0


async def greet(channel: DataChannel, timeout_ms: int) -> None:
    """Send this client's version, and check the broker's."""
    welcome, _ = await channel.call(Hello(VERSION), timeout_ms=timeout_ms)
    assert isinstance(welcome, Welcome)
    check_server(welcome.version, VERSION)


async def authenticate(
    channel: DataChannel, held: ShownCapability, nonce: bytes, address: str, timeout_ms: int
) -> None:
    """Show a capability, and prove that the client holds its key."""
    asked = Authenticate(held.text, held.key.sign_challenge(nonce, address), address)
    answer, _ = await channel.call(asked, timeout_ms=timeout_ms)
    assert isinstance(answer, Authenticated)


async def stay_known(
    identity: Credentials,
    channel: DataChannel,
    held: ShownCapability,
    nonce: bytes,
    address: str,
    timeout_ms: int,
) -> None:
    """Show each new capability on a channel until it is closed; a broker closes it when the last
    one has ended.
    """
    while not channel.closed:
        await asyncio.sleep(max(RENEW_AGAIN_S, held.renew_in_s))
        with contextlib.suppress(KeylaneError):
            newer = await identity.held()
            if newer is None or channel.closed:
                return
            if newer.text != held.text:
                await authenticate(channel, newer, nonce, address, timeout_ms)
            held = newer
