"""
What the workers of a handler of one message take: runs and bundles.

    a partition offers ─▶ a worker asks ─┬─ a run, which it handles one after another
                                         ╰─ a bundle, from which all workers take

A handler runs in its worker's task. While no handler waits, one worker handles a run after another
without a look at any key. When one waits, the run ends there, and the workers share bundles of
messages whose keys differ. What is handled is reported at the latest in the next iteration of the
event loop, for all workers together, and brings the next bundle.

Invariants
    The lease's end is checked before every attempt; a handler never starts after it. A message is
    handled only when its handler has returned and any awaitable result has been awaited.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from ...protocol.message import Message
from ..session.events import MessagesHandled, MessagesReturned, RunEnded
from .failed_attempts import log_line
from .handlers import Handler, await_result, is_async
from .offers import OfferingShell
from .workers import TURN_S, Worker, WorkerPool

RUN_MIN = 16
"""The number of messages in the first run, and in the next one after a handler has waited."""
RUN_MAX = 1_024
"""The largest number of messages in a run."""
BUNDLES_PER_WORKER = 2
BUNDLE_MAX = 64
"""The largest number of messages in a bundle."""
MESSAGES_PER_TURN = 256
"""The number of messages of bundles after which a worker yields to the event loop."""


class MessageJobs:
    """Hands messages one by one to `handler`, in the workers of `pool`."""

    in_batches = False

    def __init__(self, handler: Handler[Any], pool: WorkerPool) -> None:
        self._handler = handler
        self._is_async = is_async(handler)
        self._pool = pool
        self._idle = pool.idle
        self._offers = pool.offers
        self._readings = pool.readings
        self.given: deque[tuple[OfferingShell, Message]] = deque()
        """Messages that were handed out and have no worker."""
        self._unreported: list[OfferingShell] = []
        """The partitions with handled messages that their sessions do not know of."""
        self._running: Worker | None = None
        """The worker that has a run; None once a handler of it has waited."""
        self._done = 0
        """How many messages of the run are handled."""
        self._run_size = RUN_MIN
        self._bundle_size = min(BUNDLES_PER_WORKER * len(pool.workers), BUNDLE_MAX)
        self._loop = asyncio.get_running_loop()

    def accept(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept what a session has handed out, and wake a worker for each message."""
        self._accept(shell, messages)
        for _ in messages:
            self._idle.wake_one()

    def _accept(self, shell: OfferingShell, messages: list[Message]) -> None:
        for message in messages:
            if message.attempt != 1:
                self._offers.retry_share.take(id(message))
        self.given.extend([(shell, message) for message in messages])
        self._pool.watch_timeouts()

    def give_back_given(self, shell: OfferingShell) -> None:
        """Return what a partition has handed out and no worker has."""
        given = [message for each, message in self.given if each is shell]
        if given:
            self.given = deque(pair for pair in self.given if pair[0] is not shell)
            self._return(shell, given)

    def _return(self, shell: OfferingShell, messages: list[Message]) -> None:
        now_ms = self._pool.boot_ms()
        for message in messages:
            self._offers.retry_share.end(id(message), now_ms)
        shell.feed(MessagesReturned(messages))
        if self._offers.limited:
            self._offers.release()

    def next_job(self, worker: Worker) -> Coroutine[Any, Any, None] | None:
        """Return what a worker does next; None: there is nothing."""
        if self.given:
            return self._handle_given(worker)
        return self._take(worker) if self._offers.ready else None

    async def _take(self, worker: Worker) -> None:
        """Ask the partition whose turn it is."""
        if self._running is not None:
            self._interrupt(self._running)
        run_size = self._run_size if self._pool.is_alone(worker) else 0
        shell, messages = self._offers.ask_next(self._bundle_size, run_size, given=len(self.given))
        if messages and messages is shell.state.lanes.run:
            self._pool.watch_timeouts()
            await self._handle_run(worker, shell, messages)
            return
        self._accept(shell, messages)
        for _ in messages[1:]:
            self._idle.wake_one()

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────
    async def _handle_run(self, worker: Worker, shell: OfferingShell, run: list[Message]) -> None:
        """Handle messages one after another, until a handler waits or fails."""
        handler, is_awaited = self._handler, self._is_async
        assert worker.task is not None
        cancelling = worker.task.cancelling
        worker.shell = shell
        self._running, self._done = worker, 0
        interrupt = self._loop.call_soon(self._interrupt, worker)
        until_s = next(self._readings) + TURN_S
        try:
            for message, now_s in zip(run, self._readings):  # noqa: B905 - readings are endless
                if now_s >= until_s or now_s >= shell.begin_until_s:
                    break
                worker.message = message
                try:
                    result = await handler(message) if is_awaited else handler(message)
                    if result is not None:
                        await await_result(result)
                    if cancelling() or worker.timed_out_message is message:
                        await self._pool.absorb_cancels(worker)
                except BaseException as error:  # noqa: BLE001 - `settle` decides
                    self._end_run(worker, has_next=True)
                    await self._pool.settle(worker, error)
                    return
                if self._running is not worker:  # the handler has waited
                    worker.message = None
                    self._report(shell, message)
                    return
                self._done += 1
            worker.message = None
            self._run_size = min(2 * self._run_size, RUN_MAX)
            self._end_run(worker, has_next=False)
        finally:
            interrupt.cancel()

    def _interrupt(self, worker: Worker) -> None:
        """The handler waits: the run ends at its message, and others work beside it."""
        self._run_size = RUN_MIN
        self._end_run(worker, has_next=True)
        if self._pool.has_jobs:
            self._idle.wake_one()

    def _end_run(self, worker: Worker, *, has_next: bool) -> None:
        if self._running is worker and worker.shell is not None:
            self._running = None
            worker.shell.feed(RunEnded(self._done, has_next))

    # ── bundles ───────────────────────────────────────────────────────────────────────────────────
    async def _handle_given(self, worker: Worker) -> None:
        """Handle messages of bundles, one after another."""
        handler, is_awaited, readings = self._handler, self._is_async, self._readings
        idle, ready = self._idle, self._offers.ready
        assert worker.task is not None
        cancelling = worker.task.cancelling
        for _ in range(MESSAGES_PER_TURN):
            if not self.given:
                return
            shell, message = self.given.popleft()
            if idle.waiting and (self.given or ready):
                idle.wake_one()  # this one's handler may wait
            if next(readings) >= shell.begin_until_s or (
                shell.is_shared and shell.has_expired(message)
            ):
                self._return(shell, [message])
                continue
            worker.shell, worker.message = shell, message
            if is_retry := message.attempt != 1:
                self._offers.begin_retry(message)
            try:
                result = await handler(message) if is_awaited else handler(message)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is message:
                    await self._pool.absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `settle` decides
                await self._pool.settle(worker, error)
            else:
                worker.message = None
                self._report(shell, message)
                if is_retry:
                    self._offers.end_retry(message)
                    pool = self._pool
                    log_line(pool.failures.lines.record_handled(message, pool.boot_ms()))
            if not self.given:
                # Alone, it takes a run next.
                self._report_handled(takes=not self._pool.is_alone(worker))

    def _report(self, shell: OfferingShell, message: Message) -> None:
        """Report a handled message, in a moment."""
        if not shell.handled:
            if not self._unreported:
                self._loop.call_soon(self._report_handled)
            self._unreported.append(shell)
        shell.handled.append(message)

    def _report_handled(self, *, takes: bool = True) -> None:
        """Report what is handled, and take as much again if `takes`."""
        offers = self._offers
        unreported, self._unreported = self._unreported, []
        for shell in unreported:
            handled, shell.handled = shell.handled, []
            may_take = takes and offers.ready.keys() <= {shell} and not offers.limited
            may_take = may_take and not offers.are_over
            wanted = max(0, self._bundle_size - len(self.given)) if may_take else 0
            messages = shell.ask(MessagesHandled(handled, wanted))
            if messages:
                self.accept(shell, messages)
        if offers.limited:
            offers.release()

    # ── what is not handled ───────────────────────────────────────────────────────────────────────
    def fail(self, worker: Worker, error: BaseException) -> None:
        """Report the failed attempt of the message that a worker has."""
        message, shell = worker.message, worker.shell
        assert message is not None
        assert shell is not None
        worker.message = None
        if message.attempt != 1:
            self._offers.end_retry(message)
        if self._offers.limited:
            self._offers.release()
        self._pool.failures.report_error(shell, message, error)

    def give_back(self, worker: Worker) -> None:
        """Return what a worker has to its session; no attempt counts."""
        message, shell = worker.message, worker.shell
        worker.message = None
        self._end_run(worker, has_next=message is not None)
        if message is not None and shell is not None:
            self._offers.end_retry(message)
            shell.feed(MessagesReturned([message]))
