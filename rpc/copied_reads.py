"""Sends reads to copies of brokers' data folders, and to brokers where no copy has what is asked.

broker's health, every REFRESH_MS ─▶ addresses of copies that serve reads
Read ─▶ a copy ─┬─ batches
╰─ refused, silent ─▶ the next copy … ─▶ the broker
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from ..protocol.errors import KeylaneError, UnreachableError
from ..protocol.frames import Answer, Read
from .client import BrokerClient

REFRESH_MS = 10_000
"""How often a broker is asked where its copies are, in milliseconds."""
SILENT_MS = 10_000
"""How long a copy that does not answer is not asked again."""
CALL_TIMEOUT_S = 2.0


class CopiedReads:
    """
    Reads from copies.

    Args:
        broker_at: returns the client for an address.
        now_ms: returns the time in milliseconds.
    """

    def __init__(
        self, broker_at: Callable[[str], BrokerClient], now_ms: Callable[[], float]
    ) -> None:
        self._broker_at = broker_at
        self._now_ms = now_ms
        self._asking = asyncio.Lock()
        self._copies: dict[str, tuple[list[str], float | None]] = {}
        """By address of a broker, those of its copies, and when it was asked."""
        self._silent_until_ms: dict[str, float] = {}

    async def call(self, broker: BrokerClient, request: Read) -> tuple[Answer, memoryview]:
        """Return the answer of a copy that has the offset; otherwise that of the broker. Raises the
        errors of `BrokerClient.call`.
        """
        for address in await self._addresses(broker):
            if self._now_ms() < self._silent_until_ms.get(address, 0):
                continue
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    answer, payload = await self._broker_at(address).call(request)
            except (UnreachableError, TimeoutError):
                self._silent_until_ms[address] = self._now_ms() + SILENT_MS
                continue
            except KeylaneError:  # it does not have the offset, or has it damaged
                continue
            if payload:
                return answer, payload
        return await broker.call(request)

    async def _addresses(self, broker: BrokerClient) -> list[str]:
        """Return the addresses of a broker's copies that serve reads."""
        async with self._asking:
            addresses, asked_ms = self._copies.get(broker.address, ([], None))
            if asked_ms is not None and self._now_ms() - asked_ms < REFRESH_MS:
                return addresses
            with contextlib.suppress(KeylaneError):
                copies = (await broker.health()).details.get("copies", {})
                addresses = sorted(
                    address
                    for view in copies.values()
                    if isinstance(view, Mapping) and (address := view.get("reads_at"))
                )
            self._copies[broker.address] = addresses, self._now_ms()
            return addresses
