"""What a handler may be, and when what it returned is over.  Handled means awaited.

Whatever a handler returns and can be awaited is awaited, before its message is acked: a coroutine, a task, a future, a
future of a thread pool.  What cannot be awaited and would run only if somebody iterated it (a generator) is an error.
Any other value is ignored, and the message is acked.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from ...protocol.errors import HandlerTypeError
from ...protocol.message import Message

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]
AWAITED_MAX = 10
"""An awaitable may give another one, so many times."""


def check_handler(handler: object) -> None:
    """
    Let a handler through whose body runs when it is called or awaited.

    Raises:
        HandlerTypeError: not callable, or a generator function: its body runs only while somebody iterates.
    """
    if not callable(handler):
        raise HandlerTypeError(f"handler is a function of a message, not {handler!r:.80}")
    for function in _bodies(handler):
        if inspect.isasyncgenfunction(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is an async generator function")
        if inspect.isgeneratorfunction(function) and not _makes_awaitables(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is a generator function")


def is_async(handler: Handler) -> bool:
    """True for `async def`, for an object whose `__call__` is one, and for a partial of either."""
    return any(inspect.iscoroutinefunction(function) for function in _bodies(handler))


async def settle(result: object) -> None:
    """
    Wait until what a handler returned is over; call it for what is not None.

    Raises:
        HandlerTypeError: it is a generator, whose body nobody runs, or awaitables without end.
        BaseException: what the awaited one raised.
    """
    for _ in range(AWAITED_MAX):
        if isinstance(result, Future):
            result = asyncio.wrap_future(result)
        if not inspect.isawaitable(result):
            break
        awaited = await (_ended(result) if asyncio.isfuture(result) else result)
        if awaited is result:  # a connection or a pool that may be awaited any number of times
            return
        result = awaited
    else:
        raise HandlerTypeError(f"handler returned more than {AWAITED_MAX} awaitables in each other")
    if isinstance(result, AsyncGeneratorType | GeneratorType):
        kind = "async generator" if isinstance(result, AsyncGeneratorType) else "generator"
        raise HandlerTypeError(
            f"handler returned the {kind} {result!r:.80}, and nobody iterates it"
        )


async def _ended(future: asyncio.Future[object]) -> object:
    """
    As `await future`, but a GeneratorExit that a task ended with is raised here.

    Who awaits such a task is closed by the event loop instead, with all that awaits it in turn.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            if not future.cancel():
                raise
    return future.result()


def _bodies(handler: object) -> tuple[object, object]:
    """What a call of the handler may run: the function that its partials hold, or the `__call__` of that object."""
    while isinstance(handler, partial):
        handler = handler.func
    return handler, getattr(handler, "__call__", None)  # noqa: B004 - an object may define it


def _makes_awaitables(function: object) -> bool:
    """True for a generator function decorated with `types.coroutine`."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return bool(code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE)
