"""How consumers end: closed while they open, and never begun without a handler."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import Any

import pytest

from keylane import Consumer, ConsumerSettings, Message
from keylane.errors import ConfigError
from keylane.protocol.control import Done, Grants, Joined
from keylane.protocol.errors import ClosedError, HandlerTypeError, Reason, UsageError
from keylane.rpc.environment import Environment
from keylane.rpc.network import Network


class SlowMetaserver(Network):
    """A network with a metaserver that takes a while for each call, grants nothing and counts calls
    by path.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def control(self, method: str, address: str, path: str, answer: Any, **_: Any) -> Any:
        self.calls.append(path.rpartition("/")[2])
        await asyncio.sleep(0.05)
        if answer is Joined:
            return Joined(heartbeat_ms=1_000, ttl_ms=30_000)
        if answer is Grants:
            return Grants(version=1, ttl_ms=30_000, grants=())
        return Done()

    async def close(self) -> None:
        """Close nothing."""


def handle(_message: Message) -> None:
    raise AssertionError("nothing is granted")


def consumer_on(network: Network, *, several: bool) -> Consumer[bytes]:
    """A consumer of one subject, or of two in one object."""
    environment = Environment(network=network)
    if not several:
        return Consumer(
            "127.0.0.1:7000", subject="s", group="g", handler=handle, _environment=environment
        )
    consumer = Consumer[bytes]("127.0.0.1:7000", _environment=environment)
    consumer.on("s", group="g")(handle)
    consumer.on("s", group="h")(handle)
    return consumer


async def test_close_ends_a_consumer_when_another_task_is_opening_it():
    """It leaves the group once it is open, `run` returns, and it can be opened again."""
    network = SlowMetaserver()
    settings = ConsumerSettings(handover_ms=1_000)
    consumer = Consumer(
        "127.0.0.1:7000",
        subject="s",
        group="g",
        handler=handle,
        settings=settings,
        _environment=Environment(network=network),
    )
    for _ in range(2):
        network.calls.clear()
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(0.02)
        await asyncio.wait_for(consumer.close(), 10)
        await asyncio.wait_for(running, 10)
        assert network.calls.count("join") == network.calls.count("leave") == 1


@pytest.mark.parametrize("several", [False, True])
async def test_run_returns_at_once_when_the_consumer_is_closed_before_its_first_step(several: bool):
    """Nothing joins; a `run` that is called after the close opens the consumer."""
    network = SlowMetaserver()
    consumer = consumer_on(network, several=several)
    for opened_before in (False, True):
        running = asyncio.create_task(consumer.run())
        await consumer.close()
        await asyncio.wait_for(running, 10)
        assert ("join" in network.calls) == opened_before
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(0.2)
        assert not running.done()
        await consumer.close()
        await asyncio.wait_for(running, 10)
    assert network.calls.count("join") == network.calls.count("leave") == 2 * (1 + several)


def test_run_is_a_coroutine_function():
    """Frameworks ask before they await, of the method and of a bound one."""
    consumer = Consumer("127.0.0.1:7000", subject="s", group="g", handler=handle)
    for run in (Consumer.run, consumer.run, Consumer("127.0.0.1:7000").run):
        assert inspect.iscoroutinefunction(run)


@pytest.mark.parametrize("several", [False, True])
async def test_run_returns_when_an_open_consumer_is_closed_before_its_first_step(several: bool):
    """It does not open again what is being closed."""
    network = SlowMetaserver()
    consumer = consumer_on(network, several=several)
    await consumer.__aenter__()
    running = asyncio.create_task(consumer.run())
    await asyncio.wait_for(consumer.close(), 10)
    await asyncio.wait_for(running, 10)
    assert network.calls.count("join") == network.calls.count("leave") == 1 + several


@pytest.mark.parametrize("several", [False, True])
async def test_opening_is_an_error_when_the_consumer_is_closed_meanwhile(several: bool):
    """So the body of its block does not begin; everything is handed over when the error comes, and
    it may be opened again.
    """
    network = SlowMetaserver()
    consumer = consumer_on(network, several=several)
    opening = asyncio.create_task(consumer.__aenter__())
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(consumer.close())
    with pytest.raises(ClosedError, match="the consumer was closed while it was opened"):
        await asyncio.wait_for(opening, 10)
    assert network.calls.count("join") == network.calls.count("leave") == 1
    assert "closed" in repr(consumer)
    await asyncio.wait_for(closing, 10)
    async with consumer:
        assert "open" in repr(consumer)


async def test_run_of_several_ends_when_they_are_closed_while_the_first_one_opens():
    """Those that are not open yet are not opened."""
    network = SlowMetaserver()
    consumer = Consumer[bytes]("127.0.0.1:7000", _environment=Environment(network=network))
    consumer.on("s", group="g")(handle)
    consumer.on("s", group="h")(handle)
    running = asyncio.create_task(consumer.run())
    await asyncio.sleep(0.02)
    await asyncio.wait_for(consumer.close(), 10)
    await asyncio.wait_for(running, 10)
    assert network.calls.count("join") == network.calls.count("leave") == 1


async def test_run_refuses_a_consumer_without_a_handler():
    """No message would reach any code; while the consumer is open, an iteration may take the
    messages.
    """
    network = SlowMetaserver()
    consumer = Consumer(
        "127.0.0.1:7000", subject="s", group="g", _environment=Environment(network=network)
    )
    with pytest.raises(HandlerTypeError, match="this consumer has none") as refused:
        await consumer.run()
    assert "handler=" in refused.value.hint
    assert network.calls == []
    async with consumer:
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(0.02)
        await consumer.close()
        await asyncio.wait_for(running, 10)


def noting_leaves(network: SlowMetaserver) -> list[str]:
    """The groups that were left, each once its call has ended."""
    left: list[str] = []
    answer = network.control

    async def control(method: str, address: str, path: str, kind: Any, **more: Any) -> Any:
        done = await answer(method, address, path, kind, **more)
        left.extend(["left"] * path.endswith("/leave"))
        return done

    network.control = control  # type: ignore[method-assign]
    return left


@pytest.mark.parametrize("several", [False, True])
def test_consumer_leaves_its_group_when_the_event_loop_ends_while_it_closes(several: bool):
    """`asyncio.run` cancels what is left after a time-out; a group that is not left waits for the
    ttl.
    """
    network = SlowMetaserver()
    left = noting_leaves(network)

    async def program() -> None:
        consumer = consumer_on(network, several=several)
        await consumer.__aenter__()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await consumer.close()

    asyncio.run(program())
    assert len(left) == 1 + several


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("several", [False, True])
def test_consumer_leaves_its_group_when_the_event_loop_ends_as_it_begins_to_close(
    several: bool, turns: int
):
    """A task that is cancelled before its first step never runs."""
    network = SlowMetaserver()
    left = noting_leaves(network)

    async def program() -> None:
        consumer = consumer_on(network, several=several)
        await consumer.__aenter__()
        closing = asyncio.create_task(consumer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not closing.done()

    asyncio.run(program())
    assert len(left) == 1 + several


def test_consumer_leaves_its_group_when_the_event_loop_ends_while_its_opening_is_given_up():
    """The opening was cancelled while it joined, and the loop ends while it leaves."""
    network = SlowMetaserver()
    left = noting_leaves(network)

    async def program() -> None:
        opening = asyncio.create_task(consumer_on(network, several=False).__aenter__())
        await asyncio.sleep(0.02)
        opening.cancel()
        while "leave" not in network.calls:
            await asyncio.sleep(0)

    asyncio.run(program())
    assert left == ["left"]


async def test_consumer_opens_again_when_the_system_gave_too_few_threads(
    monkeypatch: pytest.MonkeyPatch,
):
    """As at a limit of processes: the threads that began end, and nothing of the opening is
    left.
    """
    network, started, left = SlowMetaserver(), [], 2
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) >= left:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    consumer = Consumer(
        "127.0.0.1:7000",
        subject="s",
        group="g",
        handler=handle,
        settings=ConsumerSettings(threads=3),
        _environment=Environment(network=network),
    )
    with pytest.raises(ConfigError, match="only 2 of 3 handler threads could be started: can't"):
        await consumer.__aenter__()
    assert not network.calls
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
    left = 9
    async with consumer:
        assert repr(consumer).endswith("open>")


@pytest.mark.parametrize("several", [False, True])
async def test_consumer_refuses_to_give_out_messages_when_it_has_a_handler(several: bool):
    """The error says that the handler takes them, and not that the consumer is closed."""
    consumer = consumer_on(SlowMetaserver(), several=several)
    async with consumer:
        for take in (
            lambda: consumer.getmany(timeout_ms=0),
            lambda: anext(consumer),
            lambda: anext(aiter(consumer)),
        ):
            with pytest.raises(UsageError, match="taken by its handler") as refused:
                await take()
            assert refused.value.reason is Reason.MIXED_USE
