"""Control calls over connections of which one may be dead without a word.

GET            over a connection that is kept; an answer that is overdue is asked for once more, on a new one
other calls    on a new connection, because they may not be made twice
told_again     over a connection that is kept: who makes them makes them again by itself
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from ...protocol.errors import UnreachableError
from ...protocol.http.endpoint import Endpoint
from ..network import Network
from ..race import start_task

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OVERDUE_SHARE = 0.4
"""The part of a call's time after which its answer is overdue: 2 s of 5."""


class CallMaker(Protocol[T_co]):
    """Makes one call."""

    def __call__(self, *, timeout_ms: int) -> Coroutine[Any, Any, T_co]:
        """The answer, within `timeout_ms`."""
        ...


class Asking:
    """Makes the control calls of a client."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def ask(
        self,
        endpoint: Endpoint[T],
        address: str,
        path: str,
        body: object,
        query: Mapping[str, str] | None,
        *,
        timeout_ms: int,
        wait_ms: int = 0,
    ) -> T:
        """
        The answer of the server at `address`.

        Args:
            path: of the endpoint, with its names filled in.
            timeout_ms: of everything, with the `wait_ms` for which the server itself may wait.

        Raises:
            KeylaneError: as `network.Network.control`.
        """
        asked = endpoint.method, address, path, endpoint.answer
        kept = partial(self._network.control, *asked, body=body, query=query)
        if endpoint.told_again:
            return await kept(timeout_ms=timeout_ms)
        anew = partial(kept, anew=True)
        if endpoint.is_get:
            return await ask_again(kept, anew, wait_ms=wait_ms, timeout_ms=timeout_ms)
        return await anew(timeout_ms=timeout_ms)


async def ask_again(
    first: CallMaker[T],
    again: CallMaker[T],
    *,
    wait_ms: int,
    timeout_ms: int,
) -> T:
    """
    The answer that comes first: that of `first`, or of `again`, which begins when the former is
    overdue.

    Args:
        first: makes the call over a connection that is kept.
        again: makes it on a new one.
        wait_ms: the part of `timeout_ms` for which the server itself may wait.

    Raises:
        KeylaneError: of `first`, if `again` fails too.
    """
    overdue_ms = wait_ms + int((timeout_ms - wait_ms) * OVERDUE_SHARE)
    calls = [start_task(first(timeout_ms=timeout_ms))]
    try:
        await asyncio.wait(calls, timeout=overdue_ms / 1000)
        if not calls[0].done():
            calls.append(start_task(again(timeout_ms=max(1, timeout_ms - overdue_ms))))
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        return await _best(calls)
    finally:
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _best(calls: Sequence[asyncio.Future[T]]) -> T:
    """The first call's answer, if it has ended or the other one did not reach the server."""
    if calls[0].done() and not isinstance(calls[0].exception(), UnreachableError):
        return calls[0].result()
    for other in calls[1:]:
        try:
            return await other
        except UnreachableError:
            pass
    return await calls[0]
