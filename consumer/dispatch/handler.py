"""Runs handlers of one message: workers that ask the partitions in turn.

    a partition offers ─▶ a worker asks ─┬─ a run, which it handles one after another
                                         ╰─ a bundle, from which all workers take

A handler runs in its worker's task. While no handler waits, one worker handles a run after another
without a look at any key. When one waits, the run ends there, and the workers share bundles of
messages whose keys differ. What is handled is reported at the latest in the next iteration of the
event loop, for all workers together, and brings the next bundle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ...protocol.clock import Clock, boot_seconds
from ...protocol.message import Message
from ...protocol.parked import Failure
from ...rpc.race import start_task
from ..handling.worker_task import IdleWorkers
from ..session.events import (
    Event,
    MessageFailed,
    MessagesHandled,
    MessagesReturned,
    RunEnded,
    WorkWanted,
)
from ..session.state import PartitionSession

RUN_MIN = 16
"""The number of messages in the first run, and in the next one after a handler has waited."""
RUN_MAX = 1_024
"""The largest number of messages in a run."""
RUN_S = 0.005
"""The time in seconds after which a run ends, so that heartbeats and answers have a turn."""
BUNDLES_PER_WORKER = 2
BUNDLE_MAX = 64
"""The largest number of messages in a bundle."""
MESSAGES_PER_TURN = 256
"""The number of messages of bundles after which a worker yields to the event loop."""


class OfferingShell(Protocol):
    """What a worker needs of the shell of a partition."""

    session: PartitionSession
    begin_until_s: float
    """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""
    handled: list[Message]
    """Messages whose handlers have returned and that the session does not know of."""

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
        clock: Clock,
        build_failure: Callable[[BaseException, int], Failure],
    ) -> None:
        self._handler = handler
        self._build_failure = build_failure
        self._readings = boot_seconds(clock)
        self._given: deque[tuple[OfferingShell, Message]] = deque()
        """Messages that were handed out and have no worker."""
        self._offers: dict[OfferingShell, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self._unreported: list[OfferingShell] = []
        """The partitions with handled messages that their sessions do not know of."""
        self._running: HandlerWorker | None = None
        """The worker that has a run."""
        self._run_size = RUN_MIN
        self._bundle_size = min(BUNDLES_PER_WORKER * concurrency, BUNDLE_MAX)
        self._loop = asyncio.get_running_loop()
        self._idle = IdleWorkers()
        self._workers = [HandlerWorker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    def hand_out(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        self._given.extend([(shell, message) for message in messages])
        for _ in messages:
            self._idle.wake_one()

    def offer(self, shell: OfferingShell) -> None:
        """Note that a worker that asks this partition may get something."""
        if shell not in self._offers:
            self._offers[shell] = None
            self._idle.wake_one()

    def cancel(self, shell: OfferingShell) -> None:
        """Cancel the handlers that have messages of a partition, and return what has no worker."""
        waiting = [message for each, message in self._given if each is shell]
        self._given = deque(pair for pair in self._given if pair[0] is not shell)
        if waiting:
            shell.feed(MessagesReturned(waiting))
        for worker in self._workers:
            if worker.shell is shell and worker.message is not None and worker.task is not None:
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
        turn_until_s = 0.0
        while True:
            if self._given:
                await self._handle_given(worker)
            elif self._offers:
                await self._take(worker)
            else:
                await self._idle.wait()
                turn_until_s = next(self._readings) + RUN_S
            if next(self._readings) >= turn_until_s:
                await asyncio.sleep(0)
                turn_until_s = next(self._readings) + RUN_S

    async def _take(self, worker: HandlerWorker) -> None:
        """Ask the partition whose turn it is."""
        if self._running is not None:
            self._interrupt(self._running)
        shell = next(iter(self._offers))
        del self._offers[shell]  # it offers again if it has more
        run_size = self._run_size if self._is_alone(worker) else 0
        messages = shell.ask(WorkWanted(self._bundle_size, 1, run_size))
        if messages and messages is shell.session.lanes.run:
            await self._handle_run(worker, shell, messages)
        else:
            self._given.extend([(shell, message) for message in messages])
            for _ in messages[1:]:
                self._idle.wake_one()

    def _is_alone(self, worker: HandlerWorker) -> bool:
        """Return True if no other worker has a message."""
        if len(self._idle.waiting) >= len(self._workers) - 1:
            return True
        return all(other.message is None for other in self._workers if other is not worker)

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────
    async def _handle_run(
        self, worker: HandlerWorker, shell: OfferingShell, run: list[Message]
    ) -> None:
        """Handle messages one after another, until a handler waits or fails."""
        handler = self._handler
        worker.shell, worker.run, worker.done = shell, run, 0
        self._running = worker
        interrupt = self._loop.call_soon(self._interrupt, worker)
        until_s = min(next(self._readings) + RUN_S, shell.begin_until_s)
        try:
            for message, now_s in zip(run, self._readings):  # noqa: B905 - readings are endless
                if now_s >= until_s:
                    break
                worker.message = message
                outcome: Event | None = None
                try:
                    await handler(message)
                except BaseException as error:  # noqa: BLE001 - `_end_of` decides
                    outcome = self._end_of(worker, message, error)
                if worker.run is None or outcome is not None:
                    self._end_run(worker, has_next=True)
                    worker.message = None
                    self._report(shell, message, outcome)
                    return
                worker.done += 1
            worker.message = None
            self._run_size = min(2 * self._run_size, RUN_MAX)
            self._end_run(worker, has_next=False)
        finally:
            interrupt.cancel()
            worker.shell = worker.message = None

    def _interrupt(self, worker: HandlerWorker) -> None:
        """The handler waits: the run ends at its message, and others work beside it."""
        self._run_size = RUN_MIN
        self._end_run(worker, has_next=True)

    def _end_run(self, worker: HandlerWorker, *, has_next: bool) -> None:
        if worker.run is not None and worker.shell is not None:
            worker.run = self._running = None
            worker.shell.feed(RunEnded(worker.done, has_next))

    # ── bundles ───────────────────────────────────────────────────────────────────────────────────
    async def _handle_given(self, worker: HandlerWorker) -> None:
        """Handle messages of bundles, one after another."""
        handler, given, readings = self._handler, self._given, self._readings
        for _ in range(MESSAGES_PER_TURN):
            if not given:
                return
            shell, message = given.popleft()
            if next(readings) >= shell.begin_until_s:
                shell.feed(MessagesReturned([message]))
                continue
            worker.shell, worker.message = shell, message
            outcome: Event | None = None
            try:
                await handler(message)
            except BaseException as error:  # noqa: BLE001 - `_end_of` decides
                outcome = self._end_of(worker, message, error)
            finally:
                worker.message = None
            given = self._given
            self._report(shell, message, outcome)
            if not given:
                # Alone, it takes a run next.
                self._report_handled(takes=not self._is_alone(worker))

    def _report(self, shell: OfferingShell, message: Message, outcome: Event | None) -> None:
        """Report an outcome, None if the message is handled; that may wait a moment."""
        if outcome is not None:
            shell.feed(outcome)
            return
        handled = shell.handled
        if not handled:
            if not self._unreported:
                self._loop.call_soon(self._report_handled)
            self._unreported.append(shell)
        handled.append(message)

    def _report_handled(self, *, takes: bool = True) -> None:
        """Report what is handled, and take as much again if `takes`."""
        unreported, self._unreported = self._unreported, []
        for shell in unreported:
            handled, shell.handled = shell.handled, []
            may_take = takes and self._offers.keys() <= {shell}
            wanted = max(0, self._bundle_size - len(self._given)) if may_take else 0
            messages = shell.ask(MessagesHandled(handled, wanted))
            if messages:
                self.hand_out(shell, messages)

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
