"""Handlers as users write them. Each hands the message to the host of the process that runs it,
and waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any

from keylane.protocol.message import Message
from keylane.testing.machines.loop import PROCESS


def _handle(message: Message) -> Awaitable[None]:
    handled: Awaitable[None] = PROCESS.get().owner._handle(message)
    return handled


async def plain(message: Message) -> None:
    await _handle(message)


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that knows nothing of coroutines."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does not set `__wrapped__`."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def task(message: Message) -> Any:
    return asyncio.ensure_future(_handle(message))


async def _with_argument(_argument: str, message: Message) -> None:
    await _handle(message)


def _returns_with_argument(_argument: str, message: Message) -> Awaitable[None]:
    return _handle(message)


class _Callable:
    async def __call__(self, message: Message) -> None:
        await _handle(message)

    def method(self, message: Message) -> Awaitable[None]:
        return _handle(message)


class _Awaitable:
    def __init__(self, message: Message) -> None:
        self._message = message

    def __await__(self) -> Any:
        return _handle(self._message).__await__()


WRAPPED: dict[str, Callable[[Message], Any]] = {
    "lambda": lambda message: _handle(message),  # noqa: PLW0108 - as users write it
    "decorated": _logged(plain),
    "bare": _bare(plain),
    "task": task,
    "partial": functools.partial(_with_argument, "argument"),
    "partial of a def": functools.partial(_returns_with_argument, "argument"),
    "object": _Callable(),
    "method": _Callable().method,
    "awaitable": _Awaitable,
}

ODD: tuple[Callable[[], BaseException], ...] = (
    GeneratorExit,
    asyncio.CancelledError,
    StopAsyncIteration,
    TimeoutError,
    lambda: ExceptionGroup("several", [ValueError("first"), OSError("second")]),
    lambda: ConnectionResetError("by peer"),
)


def failure(rng: random.Random) -> BaseException:
    """An exception that a handler rarely raises."""
    return rng.choice(ODD)()
