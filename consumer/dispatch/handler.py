"""Runs handlers of one message: workers that ask the partitions in turn.

    a partition offers ─▶ a worker asks ─▶ a run, or one message ─▶ handler ─▶ the outcome, which
        brings the next message

A handler runs in its worker's task. While no handler waits, one worker handles a run after another
without a look at any key; when one waits, the run ends there, and others work beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ...protocol.message import Message
from ...protocol.parked import Failure
from ...rpc.race import start_task
from ..session.events import (
    Event,
    MessageFailed,
    MessagesHandled,
    MessagesReturned,
    RunEnded,
    WorkWanted,
)
from ..session.state import PartitionSession

RUN_MAX = 1_024
"""The largest number of messages in a run."""


class OfferingShell(Protocol):
    """What a worker needs of the shell of a partition."""

    session: PartitionSession

    @property
    def may_begin(self) -> bool:
        """True if a handler may begin with a message that was handed out."""
        ...

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        ...

    def feed(self, event: Event) -> None:
        """Give the session an event; what it hands out goes to any worker."""
        ...


class HandlerWorker:
    """What one worker has."""

    __slots__ = ("done", "is_cancelled", "message", "run", "shell", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.shell: OfferingShell | None = None
        self.message: Message | None = None
        self.run: list[Message] | None = None
        """The run; None once a handler of it has waited."""
        self.done = 0
        """How many messages of the run are handled."""
        self.is_cancelled = False


class HandlerDispatch:
    """
    `concurrency` workers for the partitions of one consumer.

    Args:
        handler: the program's function of one message.
        build_failure: makes the record of an error and the number of the try.
    """

    def __init__(
        self,
        handler: Callable[[Message], Awaitable[Any]],
        *,
        concurrency: int,
        build_failure: Callable[[BaseException, int], Failure],
    ) -> None:
        self._handler = handler
        self._build_failure = build_failure
        self._given: deque[tuple[OfferingShell, Message]] = deque()
        """Messages that were handed out and have no worker."""
        self._offers: dict[OfferingShell, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self._work = asyncio.Event()
        self._workers = [HandlerWorker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    def hand_out(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        self._given.extend((shell, message) for message in messages)
        self._work.set()

    def offer(self, shell: OfferingShell) -> None:
        """Note that a worker that asks this partition may get something."""
        if shell not in self._offers:
            self._offers[shell] = None
            self._work.set()

    def cancel(self, shell: OfferingShell) -> None:
        """Cancel the handlers that have messages of a partition, and return what has no worker."""
        waiting = [message for each, message in self._given if each is shell]
        self._given = deque(pair for pair in self._given if pair[0] is not shell)
        if waiting:
            shell.feed(MessagesReturned(waiting))
        for worker in self._workers:
            if worker.shell is shell and worker.task is not None:
                worker.is_cancelled = True
                worker.task.cancel()

    async def close(self) -> None:
        """Stop all workers."""
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────
    async def _run(self, worker: HandlerWorker) -> None:
        while True:
            if self._given:
                shell, message = self._given.popleft()
                await self._handle_lane(worker, shell, message)
            elif self._offers:
                await self._take(worker)
            else:
                self._work.clear()
                await self._work.wait()

    async def _take(self, worker: HandlerWorker) -> None:
        """Ask the partition whose turn it is."""
        shell = next(iter(self._offers))
        del self._offers[shell]  # it offers again if it has more
        is_alone = all(other.message is None for other in self._workers)
        messages = shell.ask(WorkWanted(1, 1, RUN_MAX if is_alone else 0))
        if not messages:
            return
        if messages is shell.session.lanes.run:
            await self._handle_run(worker, shell, messages)
        else:
            self.hand_out(shell, messages[1:])
            await self._handle_lane(worker, shell, messages[0])

    async def _handle_run(
        self, worker: HandlerWorker, shell: OfferingShell, run: list[Message]
    ) -> None:
        """Handle messages one after another, until a handler waits or fails."""
        handler = self._handler
        worker.shell, worker.run, worker.done = shell, run, 0
        interrupt = asyncio.get_running_loop().call_soon(self._interrupt, worker)
        try:
            for message in run:
                if not shell.may_begin:
                    break
                worker.message = message
                outcome: Event | None = None
                try:
                    await handler(message)
                except BaseException as error:  # noqa: BLE001 - `_end_of` decides
                    outcome = self._end_of(worker, message, error)
                if worker.run is None or outcome is not None:
                    self._end_run(worker, has_next=True)
                    following = self._report(worker, shell, message, outcome)
                    if following is not None:
                        await self._handle_chain(worker, shell, following)
                    return
                worker.done += 1
            self._end_run(worker, has_next=False)
        finally:
            interrupt.cancel()
            worker.shell = worker.message = None

    def _interrupt(self, worker: HandlerWorker) -> None:
        """The handler waits: the run ends at its message, and others work beside it."""
        self._end_run(worker, has_next=True)

    def _end_run(self, worker: HandlerWorker, *, has_next: bool) -> None:
        if worker.run is not None and worker.shell is not None:
            worker.run = None
            worker.shell.feed(RunEnded(worker.done, has_next))

    async def _handle_lane(
        self, worker: HandlerWorker, shell: OfferingShell, message: Message
    ) -> None:
        """Handle a message, and what its outcome brings."""
        worker.shell = shell
        try:
            await self._handle_chain(worker, shell, message)
        finally:
            worker.shell = worker.message = None

    async def _handle_chain(
        self, worker: HandlerWorker, shell: OfferingShell, message: Message
    ) -> None:
        """Handle a message, the next one that its outcome brings, and so on."""
        handler = self._handler
        while shell.may_begin:
            worker.message = message
            outcome: Event | None = None
            try:
                await handler(message)
            except BaseException as error:  # noqa: BLE001 - `_end_of` decides
                outcome = self._end_of(worker, message, error)
            following = self._report(worker, shell, message, outcome)
            if following is None:
                return
            message = following
        shell.feed(MessagesReturned([message]))

    def _report(
        self, worker: HandlerWorker, shell: OfferingShell, message: Message, outcome: Event | None
    ) -> Message | None:
        """Report an outcome, None if the message is handled; return the worker's next message."""
        worker.message = None
        if outcome is None:
            offset = message.offset
            outcome = MessagesHandled(((offset, offset + 1),), message.partition_id, 1)
        messages = shell.ask(outcome)
        if not messages:
            return None
        if len(messages) > 1:
            self.hand_out(shell, messages[1:])
        return messages[0]

    def _end_of(self, worker: HandlerWorker, message: Message, error: BaseException) -> Event:
        """Return what an error of a handler means; raise it if it ends the worker."""
        if isinstance(error, asyncio.CancelledError) and worker.is_cancelled:
            worker.is_cancelled = False
            assert worker.task is not None
            worker.task.uncancel()
            return MessagesReturned([message])
        if not isinstance(error, Exception):
            raise error
        return MessageFailed(message, self._build_failure(error, message.attempt))
