"""Runs handlers: so many worker tasks, each taking the next message that may run.

A handler runs inside its worker task, so one that never waits costs no task and no turn of the event loop.

Invariants
    The lease's deadline is looked at before every handler starts; a handler never starts after it.
    A message is done only when its handler returned; one that raised is tried again in place, with back-off.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from ..protocol.backoff import Backoff
from ..protocol.clock import Clock
from ..protocol.message import Message
from .lanes import Lanes
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]
MESSAGES_PER_TURN = 256
"""After so many the worker lets the event loop turn: heartbeats and pulls must go on."""


class _Worker:
    __slots__ = ("cancelled", "message", "task")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None


class Workers:
    """`concurrency` workers over one set of lanes."""

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        backoff: Backoff,
        clock: Clock,
        dice: random.Random,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._lanes = Lanes()
        self._handler = handler
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._backoff = backoff
        self._boot_ns = clock.boot_ns
        self._dice = dice
        self._on_crash = on_crash
        self._work = asyncio.Event()
        self._workers = [_Worker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = asyncio.create_task(self._run(worker), name=f"handler {index}")

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        self._lanes.put(messages)
        self._work.set()

    async def _run(self, worker: _Worker) -> None:
        try:
            message: Message | None = None
            while True:
                for _ in range(MESSAGES_PER_TURN):
                    message = message or self._lanes.take()
                    if message is None:
                        break
                    await self._handle(worker, message)
                    message = self._lanes.finish(message.order_key)
                if message is None and not self._lanes.arrived:
                    self._work.clear()
                    await self._work.wait()
                else:
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._on_crash(error)
            raise

    async def _handle(self, worker: _Worker, message: Message) -> None:
        """Handle one message, until it is done or its partition is lost."""
        client = message.delivery
        assert client.__class__ is PullClient
        worker.message = message
        try:
            while self._boot_ns() < client.deadline_ns:
                try:
                    if self._is_async:
                        await self._handler(message)
                    else:
                        self._handler(message)
                except Exception as error:  # noqa: BLE001 - whatever a user's handler raises
                    await self._failed(message, error)
                else:
                    client.done(message.offset)
                    return
            client.forget(1)
        except asyncio.CancelledError:
            if not worker.cancelled:
                raise
            assert worker.task is not None
            worker.task.uncancel()
            client.forget(1)
        finally:
            worker.message = None
            worker.cancelled = False

    async def _failed(self, message: Message, error: Exception) -> None:
        """Say so once, and wait before the next try."""
        if message.attempt == 1:
            log.warning(
                "handler failed on %s partition %d offset %d; trying again in place",
                message.subject,
                message.partition_id,
                message.offset,
                exc_info=error,
            )
        wait_ms = self._backoff.wait_ms(message.attempt, self._dice)
        message.attempt += 1
        await asyncio.sleep(wait_ms / 1000)

    async def quiesce(self, client: PullClient, *, timeout_ms: int) -> None:
        """Forget what waits of `client`'s partition; let its running handlers end or, late, be cancelled."""
        client.forget(self._lanes.drop(client.partition_id))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await client.settled()
        except TimeoutError:
            for worker in self._workers:
                if worker.message is not None and worker.message.delivery is client:
                    worker.cancelled = True
                    assert worker.task is not None
                    worker.task.cancel()
            await client.settled()

    async def close(self) -> None:
        """Stop all workers."""
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
