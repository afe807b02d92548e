"""
What the workers of a handler of batches take: one batch after another.

    a partition offers ─▶ a worker asks ─▶ a batch ─▶ handler ─▶ handled, failed or returned: whole

What becomes of a batch that has failed, whole or in halves, is decided in its session. A worker is
known by the first message of its batch, which log lines and operators see.

Invariants
    The lease's end is checked before every attempt; a handler never starts after it. A batch is
    handled only when its handler has returned and any awaitable result has been awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import Any

from ...protocol.message import Message
from ..session.events import BatchHandled, BatchReturned
from .failed_attempts import log_line
from .handlers import BatchHandler, await_result, is_async
from .offers import OfferingShell
from .workers import TURN_S, Worker, WorkerPool


class BatchJobs:
    """Hands batches to `handler`, in the workers of `pool`."""

    in_batches = True

    def __init__(self, handler: BatchHandler[Any], pool: WorkerPool) -> None:
        self._handler = handler
        self._is_async = is_async(handler)
        self._pool = pool
        self._offers = pool.offers
        self.given: deque[tuple[OfferingShell, list[Message]]] = deque()
        """Batches that were handed out and have no worker."""

    def accept(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept a batch, and wake a worker for it."""
        self._accept(shell, messages)
        self._pool.idle.wake_one()

    def _accept(self, shell: OfferingShell, messages: list[Message]) -> None:
        if messages[0].attempt != 1:
            self._offers.retry_share.take(id(messages[0]))
        self.given.append((shell, messages))
        self._pool.watch_timeouts()

    def give_back_given(self, shell: OfferingShell) -> None:
        """Return what a partition has handed out and no worker has."""
        given = [messages for each, messages in self.given if each is shell]
        if given:
            self.given = deque(pair for pair in self.given if pair[0] is not shell)
        for messages in given:
            self._return(shell, messages)

    def _return(self, shell: OfferingShell, messages: list[Message]) -> None:
        self._offers.retry_share.end(id(messages[0]), self._pool.boot_ms())
        shell.feed(BatchReturned(messages))
        if self._offers.limited:
            self._offers.release()

    def next_job(self, worker: Worker) -> Coroutine[Any, Any, None] | None:
        """Return what a worker does next; None: there is nothing."""
        if not self.given:
            if not self._offers.ready:
                return None
            shell, messages = self._offers.ask_next(1)
            if not messages:
                return None
            self._accept(shell, messages)
        shell, messages = self.given.popleft()
        return self._handle(worker, shell, messages)

    async def _handle(self, worker: Worker, shell: OfferingShell, messages: list[Message]) -> None:
        """Handle a batch, and while no other partition waits the next ones of this one."""
        handler, is_awaited, pool = self._handler, self._is_async, self._pool
        assert worker.task is not None
        cancelling = worker.task.cancelling
        now_s = next(pool.readings)
        until_s = now_s + TURN_S
        while now_s < shell.begin_until_s and not (
            shell.is_shared and any(map(shell.has_expired, messages))
        ):
            first = messages[0]
            worker.shell, worker.message, worker.messages = shell, first, messages
            if is_retry := first.attempt != 1:
                self._offers.begin_retry(first)
            try:
                given = messages.copy()  # the list is the handler's own
                result = await handler(given) if is_awaited else handler(given)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is first:
                    await pool.absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `settle` decides
                await pool.settle(worker, error)
                return
            worker.message = worker.messages = None
            if is_retry:
                self._offers.end_retry(first)
                log_line(pool.failures.lines.record_handled(first, pool.boot_ms()))
            now_s = next(pool.readings)
            is_next = now_s < until_s and self._may_go_on(shell)
            messages = shell.ask(BatchHandled(messages, int(is_next)))
            if self._offers.limited:
                self._offers.release()
            if not messages:
                return
            if messages[0].attempt != 1:
                self._offers.retry_share.take(id(messages[0]))
        self._return(shell, messages)

    def _may_go_on(self, shell: OfferingShell) -> bool:
        """Return True if a worker may take the next batch of the partition of its last one."""
        offers = self._offers
        if self.given or offers.limited or offers.are_over or not offers.ready.keys() <= {shell}:
            return False
        return bool(offers.room_for_retries(shell))

    # ── what is not handled ───────────────────────────────────────────────────────────────────────
    def fail(self, worker: Worker, error: BaseException) -> None:
        """Report the failed attempt of the batch that a worker has."""
        shell, messages = self._take_from(worker)
        if messages[0].attempt != 1:
            self._offers.end_retry(messages[0])
        if self._offers.limited:
            self._offers.release()
        self._pool.failures.report_error(shell, messages, error)

    def give_back(self, worker: Worker) -> None:
        """Return what a worker has to its session; no attempt counts."""
        if worker.message is not None:
            shell, messages = self._take_from(worker)
            self._offers.end_retry(messages[0])
            shell.feed(BatchReturned(messages))

    def _take_from(self, worker: Worker) -> tuple[OfferingShell, list[Message]]:
        shell, messages = worker.shell, worker.messages
        assert shell is not None
        assert messages is not None
        worker.message = worker.messages = None
        return shell, messages
