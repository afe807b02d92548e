"""
What the workers of a handler take: messages, in runs and bundles, or batches.

    a partition offers ─▶ a worker asks ─┬─ a run, which it handles one after another
                                         ├─ a bundle, from which all workers take
                                         ╰─ a batch: handled, failed or returned as a whole

A handler runs in its worker's task. While no handler waits, one worker handles a run after another
without a look at any key. When one waits, the run ends there, and the workers share bundles of
messages whose keys differ. What is handled is reported at the latest in the next iteration of the
event loop, for all workers together, and brings the next bundle. What becomes of a batch that has
failed, whole or in halves, is decided in its session.

Invariants
    The lease's end is checked before every attempt; a handler never starts after it. Messages are
    handled only when their handler has returned and any awaitable result has been awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...protocol.message import Message
from ..session.events import MessagesHandled, RunEnded
from .failures import log_line
from .handlers import Handler, await_result
from .offers import OfferingShell
from .workers import Worker, WorkerJobs, WorkerPool

RUN_MIN = 16
"""The number of messages in the first run, and in the next one after a handler has waited."""
RUN_MAX = 1_024
"""The largest number of messages in a run."""
BUNDLES_PER_WORKER = 2
BUNDLE_MAX = 64
"""The largest number of messages in a bundle."""


class MessageJobs(WorkerJobs):
    """Hands messages one by one to `handler`, in the workers of `pool`."""

    def __init__(self, handler: Handler[Any], pool: WorkerPool) -> None:
        super().__init__(handler, pool)
        self._unreported: dict[OfferingShell, list[Message]] = {}
        """The messages of each partition whose handlers have returned, and that its session does
        not know of.
        """
        self._running: Worker | None = None
        """The worker that has a run; None once a handler of it has waited."""
        self._done = 0
        """How many messages of the run are handled."""
        self._run_size = RUN_MIN
        self._bundle_size = min(BUNDLES_PER_WORKER * len(pool.workers), BUNDLE_MAX)
        self._loop = asyncio.get_running_loop()

    def next_job(self, worker: Worker) -> Coroutine[Any, Any, None] | None:
        """Return what a worker does next; None: there is nothing."""
        if self.given:
            return self._handle_given(worker)
        return self._take(worker) if self.pool.offers.ready else None

    async def _take(self, worker: Worker) -> None:
        """Ask the partition whose turn it is."""
        if self._running is not None:
            self._interrupt(self._running)
        run_size = self._run_size if self.pool.is_alone(worker) else 0
        shell, messages = self.pool.offers.ask_next(
            self._bundle_size, run_size, given=len(self.given)
        )
        if messages and messages is shell.state.lanes.run:
            self.pool.watch_timeouts()
            await self._handle_run(worker, shell, messages)
            return
        self.add_given(shell, messages, taken=1)

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────
    async def _handle_run(self, worker: Worker, shell: OfferingShell, run: list[Message]) -> None:
        """Handle messages one after another, until a handler waits or fails."""
        handler, is_awaited = self.handler, self.is_async
        assert worker.task is not None
        cancelling = worker.task.cancelling
        worker.shell = shell
        self._running, self._done = worker, 0
        interrupt = self._loop.call_soon(self._interrupt, worker)
        turn = self.pool.turn
        begun_s = since_s = next(turn.readings)
        try:
            for message, now_s in zip(run, turn.readings):  # noqa: B905 - readings are endless
                if now_s >= turn.until_s or now_s >= shell.begin_until_s:
                    break
                begun_s, worker.message = now_s, message
                try:
                    result = await handler(message) if is_awaited else handler(message)
                    if result is not None:
                        await await_result(result)
                    if cancelling() or worker.timed_out_message is message:
                        await self.pool.absorb_cancels(worker)
                except BaseException as error:  # noqa: BLE001 - `settle` decides
                    self._end_run(worker, has_next=True)
                    self.pool.count_calls(begun_s, before=worker.run_done, since_s=since_s)
                    await self.pool.settle(worker, error)
                    return
                if self._running is not worker:  # the handler has waited
                    self.pool.count_calls(begun_s, before=worker.run_done, since_s=since_s)
                    worker.message = None
                    self._report(shell, message)
                    return
                self._done += 1
            worker.message = None
            self._run_size = min(2 * self._run_size, RUN_MAX)
            if self._done:
                self.pool.count_calls(begun_s, before=self._done - 1, since_s=since_s)
            self._end_run(worker, has_next=False)
        finally:
            interrupt.cancel()

    def _interrupt(self, worker: Worker) -> None:
        """The handler waits: the run ends at its message, and others work beside it."""
        self._run_size = RUN_MIN
        self._end_run(worker, has_next=True)
        if self.pool.has_jobs:
            self.pool.idle.wake_one()

    def _end_run(self, worker: Worker, *, has_next: bool) -> None:
        if self._running is worker and worker.shell is not None:
            self._running, worker.run_done = None, self._done
            worker.shell.feed(RunEnded(self._done, has_next))

    # ── bundles ───────────────────────────────────────────────────────────────────────────────────
    async def _handle_given(self, worker: Worker) -> None:
        """Handle messages of bundles, one after another."""
        handler, is_awaited, turn = self.handler, self.is_async, self.pool.turn
        idle, ready = self.pool.idle, self.pool.offers.ready
        readings, observe = turn.readings, self.pool.handling.observe
        assert worker.task is not None
        cancelling = worker.task.cancelling
        while self.given and turn.has_time(now_s := next(turn.readings)):
            shell, message = self.given.popleft()
            if idle.waiting and (self.given or ready):
                idle.wake_one()  # this one's handler may wait
            if now_s >= shell.begin_until_s or (
                shell.state.flights.is_shared and shell.has_expired(message)
            ):
                self.give_back(shell, [message])
                continue
            worker.shell, worker.message = shell, message
            if is_retry := message.attempt != 1:
                self.pool.offers.begin_retry(message)
            try:
                result = await handler(message) if is_awaited else handler(message)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is message:
                    await self.pool.absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `settle` decides
                self.pool.count_calls(now_s)
                await self.pool.settle(worker, error)
            else:
                # As `count_calls` does, without its call: this is the path of most messages.
                observe(int((next(readings) - now_s) * 1e9))
                worker.message = None
                self._report(shell, message)
                if is_retry:
                    self.pool.offers.end_retry(message)
                    pool = self.pool
                    log_line(pool.failures.lines.record_handled(message, pool.boot_ms()))
            if not self.given:
                # Alone, it takes a run next.
                self._report_handled(takes=not self.pool.is_alone(worker))

    def _report(self, shell: OfferingShell, message: Message) -> None:
        """Report a handled message, in a moment."""
        handled = self._unreported.get(shell)
        if handled is not None:
            handled.append(message)
            return
        if not self._unreported:
            self._loop.call_soon(self._report_handled)
        self._unreported[shell] = [message]

    def _report_handled(self, *, takes: bool = True) -> None:
        """Report what is handled, and take as much again if `takes`."""
        offers = self.pool.offers
        unreported, self._unreported = self._unreported, {}
        for shell, handled in unreported.items():
            may_take = takes and offers.ready.keys() <= {shell} and not offers.limited
            may_take = may_take and not offers.are_over
            wanted = max(0, self._bundle_size - len(self.given)) if may_take else 0
            messages = shell.ask(MessagesHandled(handled, wanted))
            if messages:
                self.add_given(shell, messages)
        if offers.limited:
            offers.release()

    def take_back(self, worker: Worker) -> Any:
        """Take what a worker has, and return it; None if it has nothing. A run ends."""
        message = super().take_back(worker)
        self._end_run(worker, has_next=message is not None)
        return message


class BatchJobs(WorkerJobs):
    """Hands batches to `handler`, in the workers of `pool`."""

    in_batches = True

    def next_job(self, worker: Worker) -> Coroutine[Any, Any, None] | None:
        """Return what a worker does next; None: there is nothing."""
        if not self.given:
            if not self.pool.offers.ready:
                return None
            shell, messages = self.pool.offers.ask_next(1)
            if not messages:
                return None
            self.add_given(shell, messages, taken=1)
        shell, messages = self.given.popleft()
        return self._handle(worker, shell, messages)

    async def _handle(self, worker: Worker, shell: OfferingShell, messages: list[Message]) -> None:
        """Handle a batch, and while no other partition waits the next ones of this one."""
        handler, is_awaited, pool = self.handler, self.is_async, self.pool
        assert worker.task is not None
        cancelling = worker.task.cancelling
        turn = pool.turn
        now_s = next(turn.readings)
        while now_s < shell.begin_until_s and not (
            shell.state.flights.is_shared and any(map(shell.has_expired, messages))
        ):
            first = messages[0]
            worker.shell, worker.message, worker.messages = shell, first, messages
            if is_retry := first.attempt != 1:
                self.pool.offers.begin_retry(first)
            try:
                given = messages.copy()  # the list is the handler's own
                result = await handler(given) if is_awaited else handler(given)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is first:
                    await pool.absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `settle` decides
                pool.count_calls(now_s)
                await pool.settle(worker, error)
                return
            pool.count_calls(now_s)
            worker.message = worker.messages = None
            if is_retry:
                self.pool.offers.end_retry(first)
                log_line(pool.failures.lines.record_handled(first, pool.boot_ms()))
            now_s = next(turn.readings)
            is_next = turn.has_time(now_s) and self._may_go_on(shell)
            messages = shell.ask(MessagesHandled(messages, int(is_next)))
            if self.pool.offers.limited:
                self.pool.offers.release()
            if not messages:
                return
            if messages[0].attempt != 1:
                self.pool.offers.retry_share.take(id(messages[0]))
        self.give_back(shell, [messages])

    def _may_go_on(self, shell: OfferingShell) -> bool:
        """Return True if a worker may take the next batch of the partition of its last one."""
        offers = self.pool.offers
        if self.given or offers.limited or offers.are_over or not offers.ready.keys() <= {shell}:
            return False
        return bool(offers.room_for_retries(shell))
