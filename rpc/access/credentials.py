"""The identity of a program in its network: it provides something to show to each kind of
server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


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
