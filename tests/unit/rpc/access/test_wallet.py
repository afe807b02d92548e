"""A wallet asks once for all calls that wait, and its end is told to each of them."""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import ClosedError
from keylane.protocol.http.access import Capabilities
from keylane.rpc.access.wallet import Wallet

META, BROKER = "127.0.0.1:7000", "127.0.0.1:8000"


async def test_wallet_raises_closed_error_in_every_call_when_it_is_closed_meanwhile():
    """The tasks of these calls were not cancelled themselves: a CancelledError would end them
    without a word.
    """
    asked: list[str] = []

    async def ask(address: str, _token: str | None, _public: bytes) -> Capabilities:
        asked.append(address)
        await asyncio.Event().wait()
        raise AssertionError

    wallet = Wallet(lambda: "token", ask)
    wallet.know_metaservers([META])
    calls = [asyncio.create_task(wallet.bearer(BROKER)) for _ in range(2)]
    await asyncio.sleep(0.01)
    await wallet.close()
    await asyncio.wait(calls)
    assert asked == [META]
    for call in calls:
        assert not call.cancelled()
        with pytest.raises(ClosedError, match="closed before a metaserver"):
            call.result()
