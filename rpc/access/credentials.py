"""The interface of a program's credentials, and how a client uses them on a channel to a broker: it
exchanges versions, authenticates, and reauthenticates before its capability expires.
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
    """Signs challenges with a private key."""

    def sign_challenge(self, nonce: bytes, address: str) -> bytes:
        """Return the signature of a challenge from the broker that was called at `address`."""
        ...


class CapabilityCredential(NamedTuple):
    """A capability for the data plane, and the private key with which its holder proves its
    identity.
    """

    text: str
    key: Signer
    renew_in_s: float


class Credentials(Protocol):
    """The credentials that a network sends to servers."""

    def add_metaservers(self, addresses: Sequence[str]) -> None:
        """Remember the addresses of metaservers, to which the token itself may be sent."""
        ...

    async def bearer(self, address: str) -> str | None:
        """Return the text to send to this server after `Bearer`, or None to send no credentials."""
        ...

    async def data_capability(self) -> CapabilityCredential | None:
        """Return the capability to send to a broker's data plane, or None to send none."""
        ...

    def mark_refused(self, text: str) -> bool:
        """Record that a server has refused a capability; return False if no newer one is
        available.
        """
        ...

    async def close(self) -> None:
        """Cancel the calls in progress."""
        ...


RENEW_INTERVAL_S_MIN = 1.0


async def exchange_versions(channel: DataChannel, timeout_ms: int) -> None:
    """Send this client's version, and check the version of the broker. Raises VersionError."""
    welcome, _ = await channel.call(Hello(VERSION), timeout_ms=timeout_ms)
    assert isinstance(welcome, Welcome)
    check_server(welcome.version, VERSION)


async def authenticate(
    channel: DataChannel,
    capability: CapabilityCredential,
    nonce: bytes,
    address: str,
    timeout_ms: int,
) -> None:
    """Send a capability, and prove that the client holds the capability's key."""
    proof = capability.key.sign_challenge(nonce, address)
    request = Authenticate(capability.text, proof, address)
    reply, _ = await channel.call(request, timeout_ms=timeout_ms)
    assert isinstance(reply, Authenticated)


async def keep_authenticated(
    identity: Credentials,
    channel: DataChannel,
    capability: CapabilityCredential,
    nonce: bytes,
    address: str,
    timeout_ms: int,
) -> None:
    """Send each new capability on a channel until the channel is closed. The broker closes it when
    the last capability has expired.
    """
    while not channel.closed:
        await asyncio.sleep(max(RENEW_INTERVAL_S_MIN, capability.renew_in_s))
        with contextlib.suppress(KeylaneError):
            newer = await identity.data_capability()
            if newer is None or channel.closed:
                return
            if newer.text != capability.text:
                await authenticate(channel, newer, nonce, address, timeout_ms)
            capability = newer
