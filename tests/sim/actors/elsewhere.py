"""A user's thread with an event loop of its own that uses a producer or a consumer which is open in
another loop.

Every such call has to be refused with an UsageError (an opening: with an UsageError).
That a refused call has done nothing is judged with everything else: what it would have sent is in
no history, so it is a phantom where it is stored, and what it would have closed, acked or suspended
is missed in the owner's loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keylane.consumer.client import Consumer
from keylane.producer.client import Producer
from keylane.producer.send_future import SendFuture
from keylane.protocol.errors import Fate, KeylaneError, UsageError
from keylane.protocol.message import Message
from sim.machines.threads import new_thread

if TYPE_CHECKING:
    from sim.actors.hosts import Host

GAP_S = 1.0
"""Between two calls of a thread, on average."""
Calls = dict[str, Callable[[], Awaitable[Any]]]


class Visitor:
    """
    A thread of a host's process, until that process ends.

    Args:
        calls: what the thread may call just now, by name; nothing while the object is not open.
    """

    def __init__(self, host: Host, calls: Callable[[], Calls]) -> None:
        self._host = host
        self._process = host.process
        self._calls = calls
        self._rng = random.Random(f"elsewhere {host.name} {host.starts}")
        thread = new_thread(host.process, host.loop, number=2)
        host.process.threads.append(thread)
        task = thread.loop.create_task(self._work(), context=thread.context.copy())
        task.add_done_callback(host._task_ended, context=thread.context.copy())

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(2 * GAP_S * self._rng.random() ** 2)
            calls = {} if self._process.paused else self._calls()
            if calls:
                name = self._rng.choice(sorted(calls))
                await self._expect_refusal(name, calls[name])

    async def _expect_refusal(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await call()
        except UsageError:
            return
        except (KeylaneError, RuntimeError) as error:
            self._note(f"{name} in another event loop is told {error!r}")
        else:
            self._note(f"{name} in another event loop is not refused")

    def _note(self, problem: str) -> None:
        self._host.loop.faults.append(problem)


def calls_of_producer(
    producer: Producer, subject: str, key: bytes, future: SendFuture | None, rng: random.Random
) -> Calls:
    """The calls that another thread may make on a producer."""
    if not producer._loop_binding.is_open_here:
        return {}

    async def send() -> None:
        producer.send(subject, b"elsewhere", key=key if rng.random() < 0.8 else b"")

    async def send_much() -> None:
        producer.send(subject, b"elsewhere".ljust(producer._large_bytes + 1, b"."), key=key)

    async def send_all() -> None:
        await producer.send_all(subject, [(key, b"elsewhere")])

    calls: Calls = {
        "send": send,
        "send of a large message": send_much,
        "flush": producer.flush,
        "room in the queue": producer.drain,
        "close": producer.close,
        "close without a flush": lambda: producer.close(flush=False),
        "opening": producer.__aenter__,
    }
    if future is not None and not future.done():
        calls["a future's wait"] = lambda: _unknown(future)
    return calls


async def _unknown(future: SendFuture) -> None:
    """A waiter in another event loop may not be told that the message is not stored."""
    try:
        await future
    except UsageError as error:
        if error.fate is not Fate.UNKNOWN:
            raise RuntimeError("a message on its way is told as not done") from error
        raise


def calls_of_consumer(consumer: Consumer, in_hand: Message | None) -> Calls:
    """The calls that another thread may make on a consumer."""
    if not consumer._loop_binding.is_open_here:
        return {}
    calls: Calls = {
        "close": consumer.close,
        "wait": consumer.wait,
        "run": consumer.run,
        "suspend": consumer.suspend,
        "resume": consumer.resume,
        "iteration": consumer.__anext__,
        "opening": consumer.__aenter__,
    }
    if in_hand is not None:
        calls["ack"] = in_hand.ack
    return calls
