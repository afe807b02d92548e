"""
Decides which callables are handlers, and how their results are awaited.

An awaitable result (a coroutine, a task, an asyncio or thread-pool future) is awaited before the
message is acked. A generator is an error, because its body would run only if it were iterated; so
is a context manager made by `contextlib.contextmanager`. NACK requests a retry. Any other result is
ignored.
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
_BATCH_ANNOTATIONS = frozenset(
    {"list", "sequence", "mutablesequence", "iterable", "collection", "tuple"}
)
"""The lower-case names of annotations that denote a batch of messages."""
AWAITED_MAX = 10
"""How many times in a row the result of an awaitable may itself be awaitable."""


@contextmanager
def _empty_manager() -> Iterator[None]:
    yield


@asynccontextmanager
async def _empty_async_manager() -> AsyncIterator[None]:
    yield


_GENERATOR_MANAGERS = (type(_empty_manager()), type(_empty_async_manager()))
"""The classes of context managers made from generators: none of their code has run when a handler
returns one.
"""


BatchHandler = Callable[[list[Message[V]]], Awaitable[Any]] | Callable[[list[Message[V]]], Any]


def check_handler(handler: object, argument: str = "one message") -> None:
    """
    Check that calling or awaiting a handler runs its body.

    Args:
        handler: the object that the user passed.
        argument: a description of the handler's argument, for error messages.

    Raises:
        HandlerTypeError: the handler is not callable; or it is a class whose instances cannot be
            awaited, a generator function, whose body runs only when iterated, or a function that
            does not accept exactly one positional argument. A handler whose signature is unknown,
            such as some builtins, is accepted.
    """
    if not callable(handler):
        raise HandlerTypeError(f"a handler must be a function of {argument}, not {handler!r:.80}")
    callables = _callables(handler)
    if isinstance(callables[0], type) and not issubclass(callables[0], Awaitable | Future):
        raise HandlerTypeError(f"handler {handler!r:.80} is a class: pass an instance")
    for function in callables:
        if inspect.isasyncgenfunction(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is an async generator function")
        if inspect.isgeneratorfunction(function) and not _is_coroutine_generator(function):
            raise HandlerTypeError(f"handler {handler!r:.80} is a generator function")
    try:
        # A decorated function is called with the wrapper's own parameters.
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    _check_annotation(handler, signature, argument)
    try:
        signature.bind(object())
    except TypeError as error:
        raise HandlerTypeError(
            f"handler {handler!r:.80} cannot be called with {argument}: {error}"
        ) from None


def _check_annotation(handler: object, signature: inspect.Signature, argument: str) -> None:
    """Raise HandlerTypeError if the parameter's annotation fits the other kind of handler."""
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if not isinstance(annotation, str):
            annotation = getattr(get_origin(annotation) or annotation, "__name__", "")
        name = annotation.partition("[")[0].rpartition(".")[2].lower()
        if argument == "one message" and name in _BATCH_ANNOTATIONS:
            raise HandlerTypeError(
                f"handler {handler!r:.80} takes a list of messages, but gets {argument}: "
                f"pass it as batch_handler="
            )
        if argument != "one message" and name == "message":
            raise HandlerTypeError(
                f"batch_handler {handler!r:.80} takes one message, but gets {argument}: "
                f"pass it as handler="
            )
        break  # the other parameters have defaults


def is_async(handler: Callable[..., Any]) -> bool:
    """Return True for an `async def`, an object whose `__call__` is one, and a partial of
    either.
    """
    return any(inspect.iscoroutinefunction(function) for function in _callables(handler))


async def await_result(result: object) -> None:
    """
    Await the result of a handler if it is awaitable. Callers may skip this call for None.

    Raises:
        HandlerTypeError: `result` is a generator or a context manager made from one, or more than
            AWAITED_MAX awaitables are nested.
        Retry: the final result is NACK or a Retry.
        BaseException: the awaitable raised it.
    """
    for _ in range(AWAITED_MAX):
        if isinstance(result, Future):
            result = asyncio.wrap_future(result)
        if not inspect.isawaitable(result):
            break
        awaited = await (_await_future(result) if asyncio.isfuture(result) else result)
        if awaited is result:  # such as a database pool, which can be awaited any number of times
            return
        result = awaited
    else:
        raise HandlerTypeError(f"handler returned more than {AWAITED_MAX} nested awaitables")
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
    if isinstance(result, Retry):  # returned by mistake instead of raised
        raise result


async def _await_future(future: asyncio.Future[object]) -> object:
    """
    Await `future`, but raise a GeneratorExit from its task here.

    With a plain `await`, the event loop would close every coroutine that awaits the task, up to the
    outermost one.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            if not future.cancel():
                raise
    return future.result()


def _callables(handler: object) -> tuple[object, object]:
    """Return the function inside a handler's partials, and that object's `__call__`; a call runs
    one of the two.
    """
    while isinstance(handler, partial):
        handler = handler.func
    return handler, getattr(handler, "__call__", None)  # noqa: B004 - an object may define it


def _is_coroutine_generator(function: object) -> bool:
    """Return True for a generator function decorated with `types.coroutine`."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return bool(code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE)
