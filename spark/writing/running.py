"""Runs asynchronous work with its own network, in a Python process of Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...arrow.opening import open_network
from ...arrow.secured import PLAIN, ConnectionSecurity
from ...rpc.network import Network

T = TypeVar("T")


def run_with_network(
    work: Callable[[Network], Awaitable[T]], secured: ConnectionSecurity = PLAIN
) -> T:
    """Run `work(network)`, close the network, and return the result.

    This blocks; the calling thread must not have a running event loop.
    """

    async def run() -> T:
        network = open_network(secured)
        try:
            return await work(network)
        finally:
            await network.close()

    return asyncio.run(run())
