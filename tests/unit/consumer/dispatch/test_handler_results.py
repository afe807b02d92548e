"""Results of handlers: awaitables are awaited before the ack, generators are errors, other values
are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import keylane
from keylane import Consumer
from keylane.consumer.dispatch.handlers import check_handler, is_async
from keylane.protocol.errors import ConfigError, HandlerTypeError
from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client, workers_of


class Work:
    """The body of a handler: it starts, waits for `gate`, and ends."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.gate = asyncio.Event()

    async def handle(self, message: Message) -> None:
        self.begun += 1
        await self.gate.wait()
        self.ended += 1


def of_lambda(work: Work) -> Any:
    return lambda message: work.handle(message)  # noqa: PLW0108 - what users write


def of_partial_of_lambda(work: Work) -> Any:
    return functools.partial(lambda work, message: work.handle(message), work)


def of_partial(work: Work) -> Any:
    async def handle(work: Work, message: Message) -> None:
        await work.handle(message)

    return functools.partial(handle, work)


def of_decorator_that_gives_another_argument(work: Work) -> Any:
    """Return a handler whose wrapper passes two arguments; `inspect.signature` reports the wrapped
    function's parameters by default.
    """

    def with_work(function: Callable[[Message, Work], Any]) -> Callable[[Message], Any]:
        @functools.wraps(function)
        async def wrapper(message: Message) -> Any:
            return await function(message, work)

        return wrapper

    @with_work
    async def handle(message: Message, work: Work) -> None:
        await work.handle(message)

    return handle


def of_plain_decorator(work: Work) -> Any:
    def timed(function: Callable[[Message], Any]) -> Callable[[Message], Any]:
        def wrapper(message: Message) -> Any:
            return function(message)

        return wrapper

    return timed(work.handle)


def of_task(work: Work) -> Any:
    return lambda message: asyncio.create_task(work.handle(message))


def of_future(work: Work) -> Any:
    return lambda message: asyncio.gather(work.handle(message))


def of_class_of_awaitables(work: Work) -> Any:
    class Awaitable:
        def __init__(self, message: Message) -> None:
            self.message = message

        def __await__(self) -> Any:
            return work.handle(self.message).__await__()

    return Awaitable


def of_object_with_async_call(work: Work) -> Any:
    class AsyncHandler:
        async def __call__(self, message: Message) -> None:
            await work.handle(message)

    return AsyncHandler()


def of_object_that_returns_coroutines(work: Work) -> Any:
    class CoroutineHandler:
        def __call__(self, message: Message) -> Any:
            return work.handle(message)

    return CoroutineHandler()


def of_generator_based_coroutine(work: Work) -> Any:
    @types.coroutine
    def handle(message: Message) -> Any:
        yield from work.handle(message).__await__()

    return handle


def of_coroutine_in_a_coroutine(work: Work) -> Any:
    async def handle(message: Message) -> Any:
        return work.handle(message)

    return handle


def of_task_in_a_coroutine(work: Work) -> Any:
    async def handle(message: Message) -> Any:
        return asyncio.create_task(work.handle(message))

    return handle


@pytest.mark.parametrize(
    "handler_of",
    [
        of_lambda,
        of_partial_of_lambda,
        of_partial,
        of_decorator_that_gives_another_argument,
        of_plain_decorator,
        of_task,
        of_future,
        of_class_of_awaitables,
        of_object_with_async_call,
        of_object_that_returns_coroutines,
        of_generator_based_coroutine,
        of_coroutine_in_a_coroutine,
        of_task_in_a_coroutine,
    ],
)
async def test_awaitable_result_is_awaited_before_the_ack(
    handler_of: Callable[[Work], Any],
):
    """The body runs to its end, for one message of a key at a time, before the message is acked."""
    work, client = Work(), Client()
    workers = workers_of(handler_of(work))
    client.give(workers, b"k", b"k")
    await eventually(lambda: work.begun)
    await asyncio.sleep(0.02)
    assert (work.begun, work.ended, client.handled) == (1, 0, [])
    work.gate.set()
    await eventually(lambda: client.handled == [0, 1])
    assert work.ended == 2
    await workers.close()


async def test_future_of_a_thread_pool_is_awaited_before_the_ack():
    """The message is acked when the thread has finished, and not if its work failed."""
    client, tries = Client(), []

    def work(message: Message) -> None:
        tries.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("not yet")

    def handle(message: Message) -> Future[None]:
        return pool.submit(work, message)

    with ThreadPoolExecutor(1) as pool:
        workers = workers_of(handle)
        client.give(workers, b"k")
        await eventually(lambda: client.handled == [0])
        await workers.close()
    assert tries == [1, 2]


async def test_message_is_tried_again_when_its_awaitable_fails():
    """An error of the awaitable is an error of the handler."""
    client = Client()

    async def work(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt < 3:
            raise ValueError("not yet")

    workers = workers_of(lambda message: work(message))  # noqa: PLW0108 - what users write
    (message,) = client.give(workers, b"k")
    await eventually(lambda: client.handled == [0])
    assert message.attempt == 3
    await workers.close()


async def test_message_is_not_acked_when_its_handler_returns_a_generator():
    """The generator's body never runs, so the message fails until the handler is fixed."""
    client, mended = Client(), False

    async def agen(message: Message) -> AsyncIterator[int]:
        yield 1

    def gen(message: Message) -> Iterator[int]:
        yield 1

    def handle(message: Message) -> Any:
        if mended:
            return None
        return agen(message) if message.key == b"a" else gen(message)

    workers = workers_of(handle)
    messages = client.give(workers, b"a", b"b")
    await eventually(lambda: all(message.attempt > 3 for message in messages))
    assert client.handled == []
    mended = True
    await eventually(lambda: sorted(client.handled) == [0, 1])
    await workers.close()


@pytest.mark.parametrize("manager", [contextlib.contextmanager, contextlib.asynccontextmanager])
async def test_message_is_not_acked_when_its_handler_is_a_context_manager_function(manager: Any):
    """As with a generator, a call runs nothing of the body."""
    client, begun = Client(), []
    if manager is contextlib.contextmanager:

        @contextlib.contextmanager
        def handle(message: Message) -> Iterator[None]:
            begun.append(message)
            yield

    else:

        @contextlib.asynccontextmanager
        async def handle(message: Message) -> AsyncIterator[None]:
            begun.append(message)
            yield

    workers = workers_of(handle)
    [message] = client.give(workers, b"a")
    await eventually(lambda: message.attempt > 2)
    assert (client.handled, begun) == ([], [])
    await workers.close()


async def test_message_is_not_acked_when_its_coroutine_was_awaited_before():
    """Awaiting it raises an error, and the message is retried."""
    client = Client()

    async def work() -> None:
        return None

    spent = work()
    await spent
    workers = workers_of(lambda message: spent if message.attempt < 3 else None)
    (message,) = client.give(workers, b"k")
    await eventually(lambda: client.handled == [0])
    assert message.attempt == 3
    await workers.close()


async def test_message_is_acked_when_its_handler_returns_another_value():
    """A number, a string, an object: the handler returned, so the message is handled."""

    class Pool:
        """Behaves like database pools: awaiting it returns itself, any number of times."""

        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return self

    values = [7, "done", object(), False, [], contextlib.nullcontext(), Pool()]
    client = Client()
    workers = workers_of(lambda message: values[message.offset])
    client.give(workers, *[b"k"] * len(values))
    await eventually(lambda: client.handled == list(range(len(values))))
    await workers.close()


async def agen_handler(message: Message) -> AsyncIterator[int]:
    yield 1


def gen_handler(message: Message) -> Iterator[int]:
    yield 1


class AgenObject:
    async def __call__(self, message: Message) -> AsyncIterator[int]:
        yield 1

    async def method(self, message: Message) -> AsyncIterator[int]:
        yield 1


class GenObject:
    def __call__(self, message: Message) -> Iterator[int]:
        yield 1


class ClassHandler:
    """A class whose call only creates an object and never runs the method."""

    def __init__(self, message: Message) -> None: ...

    async def __call__(self, message: Message) -> None: ...


class PartialMethods:
    """Has a handler made by `functools.partialmethod`."""

    async def method(self, number: int, message: Message) -> AsyncIterator[int]:
        yield number

    bound = functools.partialmethod(method, 1)


@pytest.mark.parametrize(
    "handler",
    [
        agen_handler,
        gen_handler,
        functools.partial(agen_handler),
        functools.partial(gen_handler),
        AgenObject(),
        AgenObject().method,
        GenObject(),
        functools.partial(AgenObject()),
        functools.partial(functools.partial(AgenObject()), 1),
        functools.partial(GenObject()),
        functools.partial(AgenObject().method),
        PartialMethods().bound,
        ClassHandler,
        functools.partial(ClassHandler),
        "handle",
    ],
)
def test_handler_whose_body_would_not_run_is_refused_at_construction(handler: Any):
    """The error is a TypeError and a ConfigError, and is raised before anything is opened."""
    with pytest.raises(TypeError) as caught:
        Consumer("127.0.0.1:1", subject="s", group="g", handler=handler)
    assert isinstance(caught.value, HandlerTypeError)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.code == 1010


def test_generator_based_coroutine_is_accepted_as_a_handler():
    """`types.coroutine` makes its result awaitable, also through a partial."""

    @types.coroutine
    def handle(message: Message) -> Any:
        yield

    Consumer("127.0.0.1:1", subject="s", group="g", handler=handle)
    Consumer("127.0.0.1:1", subject="s", group="g", handler=functools.partial(handle))


def test_partial_of_a_callable_object_is_accepted_when_its_body_runs():
    """Also if `__call__` is a coroutine function or a generator that `types.coroutine` makes
    awaitable.
    """

    class Plain:
        def __call__(self, message: Message) -> None: ...

    class Async:
        async def __call__(self, message: Message) -> None: ...

    class Based:
        @types.coroutine
        def __call__(self, message: Message) -> Any:
            yield

    for made in (Plain(), Async(), Based()):
        handler = functools.partial(made)
        Consumer("127.0.0.1:1", subject="s", group="g", handler=handler)
        assert is_async(handler) is isinstance(made, Async)


def _two(first: Message, second: object) -> None:
    raise AssertionError


async def _with_name(message: Message, *, name: str) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    "handler", [_two, _with_name, lambda: None, "text".title, functools.partial(_two, 1, 2)]
)
def test_handler_is_refused_when_it_cannot_be_called_with_one_message(handler: Any):
    """It would fail for every message."""
    with pytest.raises(HandlerTypeError, match="cannot be called with one message"):
        Consumer("127.0.0.1:1", subject="s", group="g", handler=handler)


@pytest.mark.parametrize(
    "handler",
    [
        print,
        [].append,
        functools.partial(_two, 1),
        functools.partial(_with_name, name="n"),
        lambda m, other=1: m,
        max,
    ],
)
def test_handler_is_accepted_when_it_takes_one_message(handler: Any):
    """Also a builtin whose parameters are unknown."""
    Consumer("127.0.0.1:1", subject="s", group="g", handler=handler)


def test_handler_is_refused_when_its_decorator_takes_two_arguments():
    """The wrapped function takes one message, but the wrapper is what is called."""

    @functools.wraps(print)
    def wrapper(message: object, number: object) -> None: ...

    with pytest.raises(HandlerTypeError, match="cannot be called with one message"):
        Consumer("127.0.0.1:1", subject="s", group="g", handler=wrapper)


def test_hint_says_what_handlers_take_and_return_when_one_is_refused():
    """The keywords are those of `Consumer`, and the names those that `keylane` exports."""
    with pytest.raises(HandlerTypeError) as caught:
        check_handler(lambda: None)
    parameters = inspect.signature(Consumer).parameters
    for keyword in ("handler", "batch_handler"):
        assert f"{keyword}=" in caught.value.hint
        assert keyword in parameters
    for name in ("Retry", "NACK"):
        assert f"keylane.{name}" in caught.value.hint
        assert hasattr(keylane, name)
