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
from .complaints import Complaints
from .lanes import Lanes
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")

Failure = Exception | asyncio.CancelledError
Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]
PATIENCE_MS = 5_000
"""A cancelled handler that takes longer than this to end, and than it had before, is worth a word."""
MESSAGES_PER_TURN = 256
"""After so many the worker lets the event loop turn: heartbeats and pulls must go on."""


class _Worker:
    __slots__ = ("cancelled", "message", "task")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.cancelled: Message | None = None
        """The last one whose handler was cancelled here; None once that is over."""
        self.task: asyncio.Task[None] | None = None

    def is_to_end(self, message: Message) -> bool:
        """A cancellation met while `message` is handled was asked for, and is not of its handler's making."""
        assert self.task is not None
        return self.cancelled is message or self.task.cancelling() > (self.cancelled is not None)


class Workers:
    """`concurrency` workers over one set of lanes."""

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        handover_ms: int,
        backoff: Backoff,
        clock: Clock,
        dice: random.Random,
        on_crash: Callable[[BaseException], None],
        ordered: bool = True,
    ) -> None:
        self._lanes = Lanes(ordered=ordered)
        self._handler = handler
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._handover_ms = handover_ms
        self._backoff = backoff
        self._boot_ns = clock.boot_ns
        self._dice = dice
        self._on_crash = on_crash
        self._complaints = Complaints()
        self._work = asyncio.Event()
        self._workers = [_Worker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = asyncio.create_task(self._run(worker), name=f"handler {index}")

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        self._lanes.put(messages)
        self._work.set()

    async def _run(self, worker: _Worker) -> None:
        # One loop without calls of our own in between: this is where a consumer's time goes.
        take, finish = self._lanes.take, self._lanes.finish
        boot_ns, handler, is_async = self._boot_ns, self._handler, self._is_async
        message: Message | None = None
        try:
            while True:
                for _ in range(MESSAGES_PER_TURN):
                    if message is None:
                        message = take()
                        if message is None:
                            break
                    client: PullClient = message.delivery  # type: ignore[assignment]
                    if boot_ns() < client.deadline_ns:
                        worker.message = message
                        try:
                            if is_async:
                                await handler(message)
                            else:
                                handler(message)
                        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                            await self._again(worker, message, error)
                        else:
                            client.done(message.offset)
                    else:
                        client.forget(1)
                    message = finish(message.order_key)
                worker.message = None
                self._forget_cancel(worker)
                if message is None and not self._lanes.arrived:
                    self._work.clear()
                    await self._work.wait()
                else:
                    await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            if message is not None:
                message.delivery.forget(1)  # type: ignore[union-attr]
            self._on_crash(error)
            raise

    async def _again(self, worker: _Worker, message: Message, error: Failure) -> None:
        """A handler raised: try again in place until it succeeds or the partition is lost."""
        client: PullClient = message.delivery  # type: ignore[assignment]
        try:
            while True:
                if isinstance(error, asyncio.CancelledError) and worker.is_to_end(message):
                    raise error
                await self._failed(message, error)
                if self._boot_ns() >= client.deadline_ns:
                    break
                try:
                    if self._is_async:
                        await self._handler(message)
                    else:
                        self._handler(message)
                except (Exception, asyncio.CancelledError) as next_error:  # noqa: BLE001
                    error = next_error
                else:
                    client.done(message.offset)
                    return
        except asyncio.CancelledError:
            if worker.cancelled is not message:
                raise
        self._forget_cancel(worker)
        client.forget(1)

    @staticmethod
    def _forget_cancel(worker: _Worker) -> None:
        """The cancellation of a handler ends with it, whether it was taken or swallowed."""
        if worker.cancelled is not None:
            worker.cancelled = None
            assert worker.task is not None
            while worker.task.uncancel():
                pass

    async def _failed(self, message: Message, error: Failure) -> None:
        """Say so, once for each message and not too often, and wait before the next try."""
        if message.attempt == 1:
            self._complain(message, error)
        wait_ms = self._backoff.wait_ms(message.attempt, self._dice)
        message.attempt += 1
        await asyncio.sleep(wait_ms / 1000)

    def _complain(self, message: Message, error: Failure) -> None:
        kind = type(error).__qualname__
        complaint = self._complaints.failed(kind, self._boot_ns() // 1_000_000)
        if complaint is None:
            return
        log.warning(
            "handler failed with %s on %s partition %d offset %d%s; trying again in place",
            kind,
            message.subject,
            message.partition_id,
            message.offset,
            f", and on {complaint.untold} messages before it" if complaint.untold else "",
            exc_info=error if complaint.whole else None,
        )

    async def quiesce(self, client: PullClient) -> None:
        """
        Forget what waits of `client`'s partition; let its running handlers end or be cancelled: after `handover_ms`,
        or as soon as the lease ends.
        """
        timeout_ms = min(self._handover_ms, client.left_ms)
        client.forget(self._lanes.drop(client.partition_id))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await client.settled()
        except TimeoutError:
            await self._cancel(client, patience_ms=max(timeout_ms, PATIENCE_MS))

    async def _cancel(self, client: PullClient, *, patience_ms: int) -> None:
        """
        Cancel the running handlers of `client`, and wait for them to end, however long that takes.

        Only then may somebody else go on: as long as one runs, what it does would be out of order.
        """
        late = [one for one in self._workers if one.message and _holder(one.message) is client]
        for worker in late:
            self._forget_cancel(worker)
            worker.cancelled = worker.message
            assert worker.task is not None
            worker.task.cancel()
        try:
            async with asyncio.timeout(patience_ms / 1000):
                await client.settled()
        except TimeoutError:
            for message in (one.message for one in late if one.message):
                log.warning(
                    "handler of partition %d offset %d, key %.80r, was cancelled %d ms ago and goes on; "
                    "the partition is not handed over before it ends",
                    message.partition_id, message.offset, message.order_key, patience_ms,
                )  # fmt: skip
            await client.settled()
        for worker in late:
            self._forget_cancel(worker)

    async def close(self) -> None:
        """Stop all workers."""
        for kind, count in self._complaints.close().items():
            log.warning("handlers failed with %s on %d more messages", kind, count)
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for worker in self._workers:
            worker.cancelled = None  # this one is for the worker, not for its handler
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _holder(message: Message) -> PullClient:
    """The pull client that `message` came from."""
    client: PullClient = message.delivery.holder  # type: ignore[union-attr]
    return client
