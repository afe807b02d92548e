"""What a network needs of the identity of its program: something to show to each kind of server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Prover(Protocol):
    """A private key."""

    def prove(self, nonce: bytes, address: str) -> bytes:
        """The answer to the challenge of the broker that was called at `address`."""
        ...


class ShownCapability(NamedTuple):
    """A capability for the data plane, and the key that proves whose it is."""

    text: str
    key: Prover
    renew_in_s: float


class Credentials(Protocol):
    """What a network shows to servers."""

    def know_metaservers(self, addresses: Sequence[str]) -> None:
        """Note where metaservers are."""
        ...

    async def bearer(self, address: str) -> str | None:
        """What to send to this server behind `Bearer`; None: nothing."""
        ...

    async def held(self) -> ShownCapability | None:
        """What to show to a broker's data plane; None: nothing."""
        ...

    def refused(self, text: str) -> bool:
        """Note that a capability was refused; False if there is nothing newer to be had."""
        ...

    async def close(self) -> None:
        """End what is under way."""
        ...
