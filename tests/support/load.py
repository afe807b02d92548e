"""A producer and consumers of several groups at work on one subject, while a test changes the
partitions below.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable
from typing import Self

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.producer import ProducerSettings
from keylane.protocol.backoff import Backoff
from support.cluster import eventually

AT_ONCE = 20
PAUSE_SECONDS = 0.01
"""Two thousand messages a second: enough to be cut by every change, and the processors have time
for the change.
"""
QUICK = ProducerSettings(backoff=Backoff(first_ms=10, max_ms=50), call_timeout_ms=2_000)


class Load:
    """Sends numbered messages of `keys` keys until `finish`; every group has `consumers`
    consumers.
    """

    def __init__(
        self,
        meta: str | list[str],
        subject: str,
        *,
        groups: Iterable[str] = ("audit",),
        consumers: int = 2,
        keys: int = 100,
        ttl_ms: int = 5_000,
    ) -> None:
        self.sent: dict[bytes, list[bytes]] = {}
        self.handled: dict[str, list[Message]] = {group: [] for group in groups}
        self.consumers: dict[str, list[Consumer]] = {}
        self.count = 0
        self.slowest_ms = 0.0
        """The longest that a send waited for its ack."""
        self._meta = meta
        self._subject = subject
        self._consumer_count = consumers
        self._keys = [b"key-%d" % number for number in range(keys)]
        self._settings = ConsumerSettings(
            ttl_ms=ttl_ms, handler_backoff=Backoff(first_ms=10, max_ms=50)
        )
        self._stack = contextlib.AsyncExitStack()
        self._sending = True
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.producer = await self._stack.enter_async_context(Producer(self._meta, settings=QUICK))
        for group in self.handled:
            self.consumers[group] = []
            for _ in range(self._consumer_count):
                await self.join(group)
        self._task = asyncio.create_task(self._send())
        return self

    async def join(self, group: str) -> Consumer:
        """Add a consumer; a new group begins with the first message."""
        seen = self.handled.setdefault(group, [])

        async def handle(message: Message) -> None:
            seen.append(message)

        consumer = Consumer(
            self._meta,
            subject=self._subject,
            group=group,
            handler=handle,
            settings=self._settings,
        )
        await self._stack.enter_async_context(consumer)
        self.consumers.setdefault(group, []).append(consumer)
        return consumer

    async def _send(self) -> None:
        for number in itertools.count():
            if not self._sending:
                break
            key = self._keys[number * 7 % len(self._keys)]
            value = b"%d" % number
            await self.producer.drain()
            self.producer.send(self._subject, value, key=key)
            self.sent.setdefault(key, []).append(value)
            self.count += 1
            if number % AT_ONCE == 0:
                await asyncio.sleep(PAUSE_SECONDS)

    async def progress(self, messages: int, *, seconds: float = 60.0) -> None:
        """Wait until every group has handled `messages` more."""
        goal = {group: len(seen) + messages for group, seen in self.handled.items()}
        await eventually(
            lambda: all(len(self.handled[group]) >= count for group, count in goal.items()),
            seconds=seconds,
            what=f"{messages} more messages in {self._state()}",
        )

    async def finish(self, *, seconds: float = 40.0) -> None:
        """Send no more; wait until everything is acked and handled by every group."""
        self._sending = False
        assert self._task is not None
        await self._task
        async with asyncio.timeout(seconds):
            await self.producer.flush()
        until = time.monotonic() + seconds
        while any(len(seen) < self.count for seen in self.handled.values()):
            assert time.monotonic() < until, f"of {self.count}: {self._state()}\n{self._held()}"
            await asyncio.sleep(0.01)

    def _state(self) -> dict[str, int]:
        return {group: len(seen) for group, seen in self.handled.items()}

    def _held(self) -> str:
        """The partitions that every consumer has, hands over, and waits for."""
        return "\n".join(
            f"{group} {consumer._current.membership.session[:8]}: {consumer.assignment}, "
            f"hands over {[client.partition_id for client in consumer._assignments.handing_over]}"
            for group, consumers in self.consumers.items()
            for consumer in consumers
            if consumer._current is not None
        )

    def check(self) -> None:
        """Every group handled the messages of each key in the order of sending, each once."""
        for group, seen in self.handled.items():
            by_key: dict[bytes, list[bytes]] = {}
            for message in seen:
                by_key.setdefault(message.key, []).append(message.value)
            for key, values in self.sent.items():
                assert by_key.get(key) == values, f"group {group}, key {key.decode()}"

    async def __aexit__(self, *_error: object) -> None:
        self._sending = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()
