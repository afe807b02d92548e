"""Control calls over pooled connections, any of which may have been lost silently.

GET            over a pooled connection; if the answer is overdue, again over a new one
other calls    over a new connection, because they must not be sent twice
caller_repeats     over a pooled connection, because their caller repeats them anyway
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ...protocol.errors import UnreachableError
from ...protocol.http.endpoint import Endpoint
from ..network import Network
from ..race import start_task

T = TypeVar("T")
OVERDUE_SHARE = 0.4
"""The share of a call's timeout after which its answer is overdue, for example 2 s of 5 s."""


CallMaker = Callable[..., Coroutine[Any, Any, T]]
"""A function that makes one call, and takes its `timeout_ms` as a keyword."""


async def call_control(
    network: Network,
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
    Make a control call to the server at `address`, and return the answer.

    Args:
        path: the path of the endpoint, with its placeholders filled in.
        timeout_ms: the timeout of the call, including the `wait_ms` that the server may wait.

    Raises:
        KeylaneError: see `network.Network.control`.
    """
    request = endpoint.method, address, path, endpoint.answer
    call_pooled = partial(network.control, *request, body=body, query=query)
    if endpoint.caller_repeats:
        return await call_pooled(timeout_ms=timeout_ms)
    call_on_new = partial(call_pooled, new_connection=True)
    if endpoint.is_get:
        return await hedge(call_pooled, call_on_new, wait_ms=wait_ms, timeout_ms=timeout_ms)
    return await call_on_new(timeout_ms=timeout_ms)


async def hedge(
    first: CallMaker[T],
    second: CallMaker[T],
    *,
    wait_ms: int,
    timeout_ms: int,
) -> T:
    """
    Return the earlier answer of two calls. The second call is made when the answer to the first is
    overdue.

    Args:
        first: makes the call over a pooled connection.
        second: makes the call over a new connection.
        wait_ms: the part of `timeout_ms` that the server itself may wait.

    Raises:
        KeylaneError: the error of the first call, if both fail.
    """
    overdue_ms = wait_ms + int((timeout_ms - wait_ms) * OVERDUE_SHARE)
    calls = [start_task(first(timeout_ms=timeout_ms))]
    try:
        await asyncio.wait(calls, timeout=overdue_ms / 1000)
        if not calls[0].done():
            calls.append(start_task(second(timeout_ms=max(1, timeout_ms - overdue_ms))))
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        return await _first_answer(calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _first_answer(calls: Sequence[asyncio.Future[T]]) -> T:
    """Return the result of the first call if it has one, otherwise that of the second. An
    unreachable server counts as no result.
    """
    if calls[0].done() and not isinstance(calls[0].exception(), UnreachableError):
        return calls[0].result()
    for later_call in calls[1:]:
        try:
            return await later_call
        except UnreachableError:
            pass
    return await calls[0]
