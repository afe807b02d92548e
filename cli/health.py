"""Asks a server for its health by HTTP, in every state and without a token."""

from __future__ import annotations

import msgspec

from ..protocol.control import Health
from ..protocol.endpoints import READY
from ..protocol.errors import ForeignServerError
from ..rpc.http_network import HttpNetwork

TIMEOUT_MS = 5_000
"""How long a server may take to answer, in milliseconds."""


async def fetch_health(network: HttpNetwork, address: str) -> Health:
    """Fetch a server's health. Raises KeylaneError if it does not respond."""
    text, _date = await network.get_text(
        address, READY.path, timeout_ms=TIMEOUT_MS, statuses=(200, 503)
    )
    try:
        return msgspec.json.decode(text, type=Health)
    except msgspec.MsgspecError as error:
        raise ForeignServerError(
            f"{address} answered GET {READY.path}, but not as a keylane server: {error}",
            address=address,
        ) from error
