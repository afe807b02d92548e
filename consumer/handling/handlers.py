"""Decides which callables are handlers, and how their results are awaited.

An awaitable result (a coroutine, a task, a future, a future of a thread pool) is awaited before the
message is acked. A generator is an error, because its body would run only if it were iterated; so
is a context manager that `contextlib.contextmanager` makes of one. NACK asks for another try. Any
other result is ignored.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import AsyncGeneratorType, GeneratorType
from typing import Any, get_origin

from ...protocol.codecs.codec import V
from ...protocol.errors import HandlerTypeError
from ...protocol.message import Message
from .not_acked import NACK, Retry

Handler = Callable[[Message[V]], Awaitable[Any]] | Callable[[Message[V]], Any]
_LISTS = frozenset({"list", "sequence", "mutablesequence", "iterable", "collection", "tuple"})
"""The annotations of a batch, in lower case."""
AWAITED_MAX = 10
"""The depth up to which the result of an awaitable may be awaitable too."""


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@asynccontextmanager
async def _nothing_async() -> AsyncIterator[None]:
    yield


_GENERATOR_MANAGERS = (type(_nothing()), type(_nothing_async()))
"""The classes of context managers whose body is a generator: nothing of it has run when one is
returned.
"""


BatchHandler = Callable[[list[Message[V]]], Awaitable[Any]] | Callable[[list[Message[V]]], Any]


def check_handler(handler: object, takes: str = "one message") -> None:
    """
    Check that the body of a handler runs when it is called or awaited.

    Args:
        handler: the object that the user gave.
        takes: the one argument that it is called with, for the error.

    Raises:
        HandlerTypeError: the handler is not callable; a class, whose call only makes an object,
            unless that can be awaited; a generator function, whose body runs only while it is
            iterated; or a function that takes other arguments than one message. A handler whose
            arguments are unknown, like some builtins, passes.
    """
    if not callable(handler):
        raise HandlerTypeError(f"handler is a function of {takes}, not {handler!r:.80}")
    bodies = _bodies(handler)
    if isinstance(bodies[0], type) and not issubclass(bodies[0], Awaitable | Future):
        raise HandlerTypeError(f"handler {handler!r:.80} is a class: give an object of it")
    for function in bodies:
        if inspect.isasyncgenfunction(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is an async generator function")
        if inspect.isgeneratorfunction(function) and not _makes_awaitables(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is a generator function")
    try:
        # The result of a decorator is called, with its own arguments, and not the function that it
        # wraps.
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    _check_annotation(handler, signature, takes)
    try:
        signature.bind(object())
    except TypeError as error:
        raise HandlerTypeError(
            f"handler {handler!r:.80} cannot be called with {takes}: {error}"
        ) from None


def _check_annotation(handler: object, signature: inspect.Signature, takes: str) -> None:
    """Raise HandlerTypeError if the argument is annotated for the other kind of handlers."""
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if not isinstance(annotation, str):
            annotation = getattr(get_origin(annotation) or annotation, "__name__", "")
        name = annotation.partition("[")[0].rpartition(".")[2].lower()
        if takes == "one message" and name in _LISTS:
            raise HandlerTypeError(
                f"handler {handler!r:.80} takes a list of messages, and gets {takes}: give it as "
                f"batch_handler="
            )
        if takes != "one message" and name == "message":
            raise HandlerTypeError(
                f"batch_handler {handler!r:.80} takes one message, and gets {takes}: "
                f"give it as handler="
            )
        break  # the others have defaults


def is_async(handler: Handler[Any]) -> bool:
    """Return True for `async def`, for an object whose `__call__` is one, and for a partial of
    either.
    """
    return any(inspect.iscoroutinefunction(function) for function in _bodies(handler))


async def await_result(result: object) -> None:
    """
    Await the result of a handler, if it is awaitable. It need not be called for None.

    Raises:
        HandlerTypeError: `result` is a generator, a context manager of one, or awaitables deeper
            than AWAITED_MAX.
        Retry: the result, or what it was awaited to, is NACK or a Retry.
        BaseException: the awaitable raised it.
    """
    for _ in range(AWAITED_MAX):
        if isinstance(result, Future):
            result = asyncio.wrap_future(result)
        if not inspect.isawaitable(result):
            break
        awaited = await (_ended(result) if asyncio.isfuture(result) else result)
        if awaited is result:  # such as a database pool, which can be awaited any number of times
            return
        result = awaited
    else:
        raise HandlerTypeError(f"handler returned more than {AWAITED_MAX} awaitables in each other")
    if isinstance(result, AsyncGeneratorType | GeneratorType):
        kind = "async generator" if isinstance(result, AsyncGeneratorType) else "generator"
        raise HandlerTypeError(
            f"handler returned the {kind} {result!r:.80}, which is never iterated"
        )
    if isinstance(result, _GENERATOR_MANAGERS):
        raise HandlerTypeError(
            f"handler returned the context manager {result!r:.80}, which is never entered"
        )
    if result is NACK or result is Retry:
        raise Retry
    if isinstance(result, Retry):  # returned like NACK, but meant as raised
        raise result


async def _ended(future: asyncio.Future[object]) -> object:
    """
    Await `future`, but raise a GeneratorExit of its task here.

    With a plain `await` the event loop would close every coroutine that awaits the task, up to the
    outermost one.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            if not future.cancel():
                raise
    return future.result()


def _bodies(handler: object) -> tuple[object, object]:
    """Return the function inside the partials of a handler, and the `__call__` of that object: a
    call runs one of them.
    """
    while isinstance(handler, partial):
        handler = handler.func
    return handler, getattr(handler, "__call__", None)  # noqa: B004 - an object may define it


def _makes_awaitables(function: object) -> bool:
    """Return True for a generator function decorated with `types.coroutine`."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return bool(code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE)
