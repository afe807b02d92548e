"""The identity of a program in its network: it provides something to show to each kind of
server.

The first calls of a client on a channel to a broker: its version and its capability, which is
renewed before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...protocol.errors import KeylaneError
from ...protocol.frames import Authenticate, Authenticated, Hello, Welcome
from ...protocol.membership.versions import VERSION, check_server
from ..channel import DataChannel


class Signer(Protocol):
    """A private key."""

    def sign_challenge(self, nonce: bytes, address: str) -> bytes:
        """Return the answer to the challenge of the broker that was called at `address`."""
        ...


class ShownCapability(NamedTuple):
    """A capability for the data plane, and the key that proves its owner."""

    text: str
    key: Signer
    renew_in_s: float


class Credentials(Protocol):
    """The credentials that a network shows to servers."""

    def know_metaservers(self, addresses: Sequence[str]) -> None:
        """Note the addresses of metaservers."""
        ...

    async def bearer(self, address: str) -> str | None:
        """Return the text to send to this server after `Bearer`; None: nothing."""
        ...

    async def held(self) -> ShownCapability | None:
        """Return the capability to show to a broker's data plane; None: nothing."""
        ...

    def refused(self, text: str) -> bool:
        """Note that a capability was refused; False if no newer one can be had."""
        ...

    async def close(self) -> None:
        """End the calls in progress."""
        ...


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
