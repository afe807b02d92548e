"""Concurrent calls share one request for capabilities, and its failure reaches each of them."""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import ClosedError
from keylane.protocol.http.access import Capabilities
from keylane.rpc.access.client_credentials import ClientCredentials

META, BROKER = "127.0.0.1:7000", "127.0.0.1:8000"


async def test_credentials_raise_closed_error_in_every_call_when_it_is_closed_meanwhile():
    """The callers were not cancelled themselves, so a CancelledError would end them silently."""
    asked: list[str] = []

    async def ask(address: str, _token: str | None, _public: bytes) -> Capabilities:
        asked.append(address)
        await asyncio.Event().wait()
        raise AssertionError

    client_credentials = ClientCredentials(lambda: "token", ask)
    client_credentials.add_metaservers([META])
    calls = [asyncio.create_task(client_credentials.bearer(BROKER)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await client_credentials.close()
    await asyncio.wait(calls)
    assert asked == [META]
    for call in calls:
        assert not call.cancelled()
        with pytest.raises(ClosedError, match="closed before a metaserver"):
            call.result()
