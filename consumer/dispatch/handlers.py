"""
What a program gives to handle its messages: which callables are handlers, how their results are
awaited, and the signals with which they decline to ack, `Retry` and `NACK`.

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
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final, get_origin

from ...protocol.codecs.codec import V
from ...protocol.errors import HandlerTypeError, InvalidRequestError
from ...protocol.message import Message
from ...rpc.tracing import HandlingTrace, Tracing
from ..callables import callables_of
from ..filter import MessageFilter

Handler = Callable[[Message[V]], Awaitable[Any]] | Callable[[Message[V]], Any]
_BATCH_ANNOTATIONS = frozenset(
    {"list", "sequence", "mutablesequence", "iterable", "collection", "tuple"}
)
"""The lower-case names of annotations that denote a batch of messages."""
AFTER_S_MAX = 86_400
SHORTEST_MS_MAX = 1_000
"""The upper limit, in milliseconds, of the minimum pause that is enforced when a handler repeatedly
requests retries.
"""
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
    callables = callables_of(handler)
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
    return any(inspect.iscoroutinefunction(function) for function in callables_of(handler))


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
            awaited = await _await_future(asyncio.wrap_future(result), result.cancel)
        elif asyncio.isfuture(result):
            awaited = await _await_future(result, result.cancel)
        elif inspect.isawaitable(result):
            awaited = await result
        else:
            break
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


async def _await_future(future: asyncio.Future[object], cancel: Callable[[], bool]) -> object:
    """
    Await `future`, but raise a GeneratorExit from its task here.

    With a plain `await`, the event loop would close every coroutine that awaits the task, up to the
    outermost one.

    A cancellation is passed on, and does not end the wait: work that ends first has its own
    outcome, and a thread cannot be stopped.

    Args:
        cancel: cancels the work itself; returns False if that is not possible.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancel()
    return future.result()


def _is_coroutine_generator(function: object) -> bool:
    """Return True for a generator function decorated with `types.coroutine`."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return bool(code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE)


# ── messages that are not acked ───────────────────────────────────────────────────────────────────
class Retry(Exception):  # noqa: N818 - a request of the handler, not an error
    """
    Raise this in a handler to have its message retried instead of acked.

    The message is retried before any later message of its key. No traceback is logged.

        raise keylane.Retry("the warehouse is closed", after_s=30)

    Args:
        reason: the reason, for the log.
        after_s: the minimum number of seconds until the next attempt, up to a day; None: a growing
            pause, as after an error. If the lease ends earlier, the next owner handles the message
            at once. 0 means at once, but a message whose attempts repeatedly request this waits 1
            ms, 2 ms, 4 ms and so on, up to 1 s, so that it does not spin.

    Raises:
        InvalidRequestError: `after_s` is not a number from 0 to a day.
    """

    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = None if after_s is None else parse_wait_ms(after_s)
        """The milliseconds until the next attempt; None: as configured in the consumer's
        settings.
        """


SIGNALS_FROM = 128
"""By convention, the exit code of a program killed by a signal is 128 plus the signal's number."""


def is_signal(error: BaseException) -> bool:
    """Return True for an error that a signal raised. It may occur anywhere, so it says nothing
    about the message being handled.
    """
    if isinstance(error, SystemExit):
        code = error.code
        return code is None or (isinstance(code, int) and not 0 < code < SIGNALS_FROM)
    return isinstance(error, GeneratorExit | KeyboardInterrupt)


def only_retry(error: BaseException) -> Retry | None:
    """Return the Retry with the longest wait if an exception group, such as that of a TaskGroup,
    contains only retries; otherwise None.
    """
    if not isinstance(error, BaseExceptionGroup):
        return None
    causes = [only_retry(cause) or cause for cause in error.exceptions]
    retries = [cause for cause in causes if isinstance(cause, Retry)]
    if len(retries) < len(causes):
        return None
    return max(retries, key=lambda retry: retry.wait_ms or 0)


class _Nack:
    """The type of `NACK`."""

    def __repr__(self) -> str:
        return "keylane.NACK"

    def __reduce__(self) -> str:
        # A handler may return a result that comes from another process. A copy of NACK would not be
        # recognized, so the message would be acked.
        return "NACK"


NACK: Final = _Nack()
"""A handler returns this to have its message retried, as with `raise Retry()`."""


def parse_wait_ms(after_s: Any) -> int:
    """Convert `after_s` to milliseconds. Raises InvalidRequestError if it is not a number from 0 to
    a day.
    """
    is_number = isinstance(after_s, int | float) and not isinstance(after_s, bool)
    if not is_number or not 0 <= after_s <= AFTER_S_MAX:
        raise InvalidRequestError(
            f"after_s must be seconds from 0 to {AFTER_S_MAX}, not {after_s!r:.40}"
        )
    return int(after_s * 1000)


def limited_wait_ms(wait_ms: int, attempt: int) -> int:
    """Return the milliseconds until the next attempt if attempt number `attempt` requested
    `wait_ms`. The result is longer than requested if the handler would otherwise spin.
    """
    if attempt < 2:
        return wait_ms
    return max(wait_ms, min(1 << min(attempt - 2, 10), SHORTEST_MS_MAX))


# ── filters ───────────────────────────────────────────────────────────────────────────────────────
def filtered(handler: Handler[Any], message_filter: MessageFilter) -> Handler[Any]:
    """Return a handler that is called only for accepted messages. An error in the filter counts as
    an error in the handler.
    """
    matches = message_filter.matches

    async def handle_async(message: Message) -> Any:
        return await handler(message) if matches(message) else None

    def handle(message: Message) -> Any:
        return handler(message) if matches(message) else None

    return handle_async if is_async(handler) else handle


def filtered_batches(handler: Any, message_filter: MessageFilter) -> Any:
    """Return a batch handler that gets only the accepted messages, and is not called if there are
    none.
    """

    def handle(messages: list[Message]) -> Any:
        accepted = [message for message in messages if message_filter.matches(message)]
        return handler(accepted) if accepted else None

    return handle


# ── traces ────────────────────────────────────────────────────────────────────────────────────────
def traced(handler: Any, tracing: Tracing) -> Any:
    """Return a handler, of either kind, that runs inside the trace of what it gets: what it does
    is a part of the trace, also in threads.
    """
    begin = tracing.begin_handling

    async def handle_async(given: Any) -> None:
        await _finish_traced(begin(given), handler(given))

    def handle(given: Any) -> Any:
        trace = begin(given)
        token = trace.attach()
        try:
            result = handler(given)
        except BaseException as error:
            _end_failed(trace, error)
            raise
        finally:
            trace.detach(token)
        if result is not None:  # its worker awaits it, perhaps in another thread
            return _finish_traced(trace, await_result(result))
        trace.end()
        return None

    return handle_async if is_async(handler) else handle


async def _finish_traced(trace: HandlingTrace, handling: Awaitable[Any]) -> None:
    """Await the rest of a handler inside its trace, and end the trace; see `await_result`."""
    token = trace.attach()
    try:
        result = await handling
        if result is not None:
            await await_result(result)
    except BaseException as error:
        _end_failed(trace, error)
        raise
    finally:
        trace.detach(token)
    trace.end()


def _end_failed(trace: HandlingTrace, error: BaseException) -> None:
    is_retried = isinstance(error, Retry) or only_retry(error) is not None
    trace.end(error, is_retried=is_retried)
