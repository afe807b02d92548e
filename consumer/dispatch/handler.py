"""
Runs handlers of one message: `concurrency` workers that ask the partitions in turn.

    a partition offers ─▶ a worker asks ─┬─ a run, which it handles one after another
                                         ╰─ a bundle, from which all workers take

A handler runs in its worker's task. While no handler waits, one worker handles a run after another
without a look at any key. When one waits, the run ends there, and the workers share bundles of
messages whose keys differ. What is handled is reported at the latest in the next iteration of the
event loop, for all workers together, and brings the next bundle.

Cancelling
    Cancelling a handler means cancelling its worker's task. asyncio counts such requests
    (`Task.cancelling`) until they are withdrawn (`Task.uncancel`). The worker withdraws all of them
    as soon as the handler has ended: a pending request would break task groups and timeouts in
    later handlers. The worker itself ends when its consumer closes, or with the event loop, whose
    shutdown also cancels `_sentinel`, which handlers cannot reach. At any other time a
    CancelledError is either for the hand-over of `cancelled_message`, or raised by the handler
    itself, which counts as a failure.

Invariants
    The lease's end is checked before every attempt; a handler never starts after it. A message is
    handled only when its handler has returned and any awaitable result has been awaited. A worker
    ends only with its consumer, no matter what a handler raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ...protocol.clock import Clock, boot_seconds
from ...protocol.errors import HandlerTimeoutError, Reason, UsageError
from ...protocol.message import Message
from ...protocol.text import counted
from ...rpc.race import start_task
from ..handling.failing import FailureRules
from ..handling.handler_log import HandlerLog, LogLine
from ..handling.handlers import Handler, await_result, is_async
from ..handling.not_acked import Retry, is_signal, only_retry
from ..handling.worker_task import (
    IdleWorkers,
    WorkerTask,
    check_worker,
    current_task,
    is_coroutine_closed,
)
from ..log_names import message_name
from ..session.events import (
    Event,
    MessageFailed,
    MessagesHandled,
    MessagesReturned,
    RunEnded,
    WorkWanted,
)
from ..session.failure import Treatment
from ..session.ready import FailureOutcome
from ..session.state import PartitionSession
from ..settings import AckMode, ConsumerSettings
from .retry_share import RetryShare

log = logging.getLogger("keylane.consumer")
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
LOST_LOG_MS = 1_000
"""The minimum interval between log lines about lost messages, in milliseconds; messages lost in
between are counted.
"""
CANCEL_WARN_MS = 5_000
"""How long after its normal time limit, in milliseconds, a cancelled handler may keep running
before a warning is logged.
"""
CANCELLED_WAIT_S = 1.0
"""How long after an outside cancellation of a worker, in seconds, the consumer closes, unless the
whole program has ended by then.
"""
TIMEOUT_CHECK_S = 1.0
TIMEOUT_CHECKS = 20
"""How often handlers are checked within their timeout, but never more than once per
TIMEOUT_CHECK_S.
"""


class OfferingShell(Protocol):
    """What a worker needs of the shell of a partition."""

    partition_id: int
    state: PartitionSession
    is_shared: bool
    """True in a shared group."""
    begin_until_s: float
    """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""
    handled: list[Message]
    """Messages whose handlers have returned and that the session does not know of."""

    def has_expired(self, message: Message) -> bool:
        """Return True if another consumer of a shared group may soon have the message."""
        ...

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        ...

    def feed(self, event: Event) -> None:
        """Give the session an event; what it hands out goes to any worker."""
        ...

    async def wait_quiet(self) -> None:
        """Wait until no worker has a message of the partition, which is being handed over."""
        ...


class HandlerWorker(WorkerTask):
    """What one worker has."""

    __slots__ = ("done", "run", "shell")

    def __init__(self) -> None:
        super().__init__()
        self.shell: OfferingShell | None = None
        """The partition of `message`."""
        self.run: list[Message] | None = None
        """The run; None once a handler of it has waited."""
        self.done = 0
        """How many messages of the run are handled."""


class HandlerDispatch:
    """
    The workers of one consumer.

    Args:
        handover_ms: how long running handlers may take when their partition is handed over.
        on_crash: called with a fatal error, which closes the consumer.
        handler_timeout_ms: a handler that runs for longer is cancelled, at most a tenth later; 0:
            no limit.
        cancels: False: handlers run in threads, so they cannot be cancelled and are only reported
            as failed.
        ordered: False: no message waits for another one of its key.
    """

    def __init__(
        self,
        handler: Handler[Any],
        *,
        concurrency: int,
        handover_ms: int,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        failure_rules: FailureRules,
        handler_timeout_ms: int = 0,
        cancels: bool = True,
        ordered: bool = True,
    ) -> None:
        self._handler = handler
        self._is_async = is_async(handler)
        self._handover_ms = handover_ms
        self._on_crash = on_crash
        self._rules = failure_rules
        self._timeout_ms = handler_timeout_ms
        self._cancels = cancels
        self._timeout_check: asyncio.TimerHandle | None = None
        self._readings = boot_seconds(clock)
        self._boot_ms = clock.boot_ms
        self._log = HandlerLog(ordered=ordered)
        self._retry_share = RetryShare(concurrency)
        self._retry_timer: asyncio.TimerHandle | None = None
        self._given: deque[tuple[OfferingShell, Message]] = deque()
        """Messages that were handed out and have no worker."""
        self._offers: dict[OfferingShell, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self._held_offers: dict[OfferingShell, bool] = {}
        """Those that wait for free workers (True), or have only retries, for which there is no room
        (False).
        """
        self._limited: dict[OfferingShell, None] = {}
        """The partitions that give no more messages than workers are free: those whose workers wait
        for each ack, and those of shared groups, where another consumer may be free.
        """
        self._unreported: list[OfferingShell] = []
        """The partitions with handled messages that their sessions do not know of."""
        self._outcomes: list[FailureOutcome] = []
        """What sessions have decided about the failure that is reported now."""
        self._lost_count = 0
        """The number of messages lost since the last log line about them."""
        self._next_lost_ms = 0
        self._running: HandlerWorker | None = None
        """The worker that has a run."""
        self._run_size = RUN_MIN
        self._bundle_size = min(BUNDLES_PER_WORKER * concurrency, BUNDLE_MAX)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._sentinel = start_task(asyncio.Event().wait(), name="end of the event loop")
        """A task that waits forever, and is cancelled only when all tasks are."""
        self._idle = IdleWorkers()
        self._workers = [HandlerWorker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    def apply_settings(self, settings: ConsumerSettings) -> None:
        """Apply new settings for failing messages, which sessions have been told already."""
        self._rules.apply_settings(settings)

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def on_idle(self) -> Callable[[], None] | None:
        """The callback for a worker that becomes idle."""
        return self._idle.on_idle

    @on_idle.setter
    def on_idle(self, call: Callable[[], None] | None) -> None:
        self._idle.on_idle = call

    @property
    def spare_capacity(self) -> int:
        """The number of messages for which a worker is free; if negative, the number of messages
        that wait for one.
        """
        shells = (*self._offers, *self._held_offers)
        return self._count_free() - sum(shell.state.count_waiting for shell in shells)

    def _count_free(self) -> int:
        """
        Return how many workers have no message, and wait for no ack.

        An end of the process loses what is acked before its handler, and repeats what is not acked
        after it: no more than one message for each worker. A refused ack occupies none.
        """
        busy = sum(worker.message is not None for worker in self._workers)
        acking = sum(
            len(each.state.acks.awaited)
            for each in self._limited
            if not each.state.acks.handled.is_refused
        )
        return len(self._workers) - busy - len(self._given) - acking

    def pause(self, partition_id: int) -> None:
        """Nothing: the session hands out nothing while its partition is paused."""

    def resume(self, partition_id: int) -> None:
        """Nothing: the session offers its messages again."""

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    def hand_out(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        self._accept(shell, messages)
        for _ in messages:
            self._idle.wake_one()

    def _accept(self, shell: OfferingShell, messages: list[Message]) -> None:
        for message in messages:
            if message.attempt != 1:
                self._retry_share.take(id(message))
        self._given.extend([(shell, message) for message in messages])
        if self._timeout_ms:
            self._watch_timeouts()

    def offer(self, shell: OfferingShell) -> None:
        """Note that a worker that asks this partition may get something."""
        if self._held_offers.get(shell):
            del self._held_offers[shell]  # an ack may have freed a worker
        if shell not in self._offers and shell not in self._held_offers:
            self._offers[shell] = None
            self._idle.wake_one()

    def cancel(self, shell: OfferingShell) -> None:
        """Cancel the handlers that have messages of a partition, and return what has no worker."""
        self._return_given(shell)
        for worker in self._workers:
            if worker.shell is shell and worker.message is not None:
                worker.cancel_handler()

    def _return_given(self, shell: OfferingShell) -> None:
        given = [message for each, message in self._given if each is shell]
        if given:
            self._given = deque(pair for pair in self._given if pair[0] is not shell)
            self._return(shell, given)

    def _return(self, shell: OfferingShell, messages: list[Message]) -> None:
        now_ms = self._boot_ms()
        for message in messages:
            self._retry_share.end(id(message), now_ms)
        shell.feed(MessagesReturned(messages))
        if self._limited:
            self._release_offers()

    def note_outcome(self, outcome: FailureOutcome) -> None:
        """Note what becomes of a failed message, for the log."""
        if outcome.treatment is Treatment.EXPIRED:
            self._log_line(self._log.record_given_up(outcome.message, self._boot_ms()))
        else:
            self._outcomes.append(outcome)

    def forget(self, shell: OfferingShell) -> None:
        """Note that a partition is being handed over: it offers nothing more, and its failed
        messages are given up, except those in handlers.
        """
        self._offers.pop(shell, None)
        self._held_offers.pop(shell, None)
        self._limited.pop(shell, None)
        running = {id(worker.message) for worker in self._workers if worker.message is not None}
        if shell.state.settings.ack is not AckMode.BEFORE:  # others are acked: nobody gets them
            self._return_given(shell)
        lines = self._log.record_all_given_up(
            lambda each: (
                each.delivery is not None
                and getattr(each.delivery, "client", None) is shell
                and id(each) not in running
            ),
            self._boot_ms(),
        )
        for line in lines:
            self._log_line(line)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────
    async def _run(self, worker: HandlerWorker) -> None:
        try:
            while True:
                try:
                    await self._take_turns(worker)
                except (GeneratorExit, RuntimeError) as error:
                    self._recover_from_close(worker, error)
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            self._abandon(worker)
            if not self._closed:
                # Probably the program and its event loop are ending. If not, end the consumer,
                # because it must not continue without a worker.
                self._loop.call_later(CANCELLED_WAIT_S, self._on_cancelled)
            raise
        except BaseException as error:
            try:
                self._record_crash(worker, error)
            finally:
                self._abandon(worker)
                self._on_crash(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # these two would end the event loop before the hand-over

    async def _take_turns(self, worker: HandlerWorker) -> None:
        readings = self._readings
        turn_until_s = 0.0
        while True:
            if self._given:
                await self._handle_given(worker)
            elif self._offers:
                await self._take(worker)
            if self._is_ending:
                raise asyncio.CancelledError  # a handler has swallowed it
            is_idle = not (self._given or self._offers)
            if not is_idle and next(readings) < turn_until_s:
                continue
            try:
                await (self._idle.wait() if is_idle else asyncio.sleep(0))
            except asyncio.CancelledError:
                if self._is_ending:
                    raise
                # A handler that has ended left the request behind, from a timer or another task.
                worker.uncancel()
            turn_until_s = next(readings) + RUN_S

    async def _take(self, worker: HandlerWorker) -> None:
        """Ask the partition whose turn it is."""
        if self._running is not None:
            self._interrupt(self._running)
        shell = next(iter(self._offers))
        del self._offers[shell]  # it offers again if it has more
        count = self._bundle_size
        if not shell.state.may_be_bundled:
            self._limited[shell] = None
            count = self._count_free()
            if count <= 0:
                self._held_offers[shell] = True
                return
        run_size = self._run_size if self._is_alone(worker) else 0
        retries = self._room_for_retries(shell)
        if not retries:
            self._held_offers[shell] = False  # so that it does not offer before it was asked
        messages = shell.ask(WorkWanted(count, retries, run_size))
        if not retries:
            self._held_offers.pop(shell, None)
            if messages:
                self._offers[shell] = None
            else:
                self._hold_offer(shell)
        if messages and messages is shell.state.lanes.run:
            if self._timeout_ms:
                self._watch_timeouts()
            await self._handle_run(worker, shell, messages)
            return
        self._accept(shell, messages)
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
        handler, is_awaited = self._handler, self._is_async
        assert worker.task is not None
        cancelling = worker.task.cancelling
        worker.shell, worker.run, worker.done = shell, run, 0
        self._running = worker
        interrupt = self._loop.call_soon(self._interrupt, worker)
        until_s = next(self._readings) + RUN_S
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
                        await self._absorb_cancels(worker)
                except BaseException as error:  # noqa: BLE001 - `_fail` decides
                    self._end_run(worker, has_next=True)
                    await self._fail(worker, shell, message, error)
                    return
                if worker.run is None:  # the handler has waited
                    worker.message = None
                    self._report(shell, message)
                    return
                worker.done += 1
            worker.message = None
            self._run_size = min(2 * self._run_size, RUN_MAX)
            self._end_run(worker, has_next=False)
        finally:
            interrupt.cancel()

    def _interrupt(self, worker: HandlerWorker) -> None:
        """The handler waits: the run ends at its message, and others work beside it."""
        self._run_size = RUN_MIN
        self._end_run(worker, has_next=True)
        if self._given or self._offers:
            self._idle.wake_one()

    def _end_run(self, worker: HandlerWorker, *, has_next: bool) -> None:
        if worker.run is not None and worker.shell is not None:
            worker.run = self._running = None
            worker.shell.feed(RunEnded(worker.done, has_next))

    # ── bundles ───────────────────────────────────────────────────────────────────────────────────
    async def _handle_given(self, worker: HandlerWorker) -> None:
        """Handle messages of bundles, one after another."""
        handler, is_awaited, readings = self._handler, self._is_async, self._readings
        idle = self._idle
        assert worker.task is not None
        cancelling = worker.task.cancelling
        for _ in range(MESSAGES_PER_TURN):
            if not self._given:
                return
            shell, message = self._given.popleft()
            if idle.waiting and (self._given or self._offers):
                idle.wake_one()  # this one's handler may wait
            if next(readings) >= shell.begin_until_s or (
                shell.is_shared and shell.has_expired(message)
            ):
                self._return(shell, [message])
                continue
            worker.shell, worker.message = shell, message
            if is_retry := message.attempt != 1:
                self._retry_share.begin(id(message), self._boot_ms())
            try:
                result = await handler(message) if is_awaited else handler(message)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is message:
                    await self._absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `_fail` decides
                await self._fail(worker, shell, message, error)
            else:
                worker.message = None
                self._report(shell, message)
                if is_retry:
                    self._end_retry(message)
                    self._log_line(self._log.record_handled(message, self._boot_ms()))
            if not self._given:
                # Alone, it takes a run next.
                self._report_handled(takes=not self._is_alone(worker))

    def _report(self, shell: OfferingShell, message: Message) -> None:
        """Report a handled message, in a moment."""
        if not shell.handled:
            if not self._unreported:
                self._loop.call_soon(self._report_handled)
            self._unreported.append(shell)
        shell.handled.append(message)

    def _report_handled(self, *, takes: bool = True) -> None:
        """Report what is handled, and take as much again if `takes`."""
        unreported, self._unreported = self._unreported, []
        for shell in unreported:
            handled, shell.handled = shell.handled, []
            may_take = takes and self._offers.keys() <= {shell} and not self._limited
            wanted = max(0, self._bundle_size - len(self._given)) if may_take else 0
            messages = shell.ask(MessagesHandled(handled, wanted))
            if messages:
                self.hand_out(shell, messages)
        if self._limited:
            self._release_offers()

    # ── retries ───────────────────────────────────────────────────────────────────────────────────
    def _room_for_retries(self, shell: OfferingShell) -> int:
        return self._retry_share.room(
            self._boot_ms(), first_attempts_wait=self._has_first_attempts(shell)
        )

    def _has_first_attempts(self, shell: OfferingShell) -> bool:
        """Return True if first attempts wait for a worker."""
        lanes = shell.state.lanes
        return bool(self._given or self._offers or lanes.opened or lanes.stored)

    def _hold_offer(self, shell: OfferingShell) -> None:
        """Ask a partition that has only retries again when there is room for one."""
        self._offers.pop(shell, None)
        if not shell.state.lanes.may_have_more(self._boot_ms()):
            return
        self._held_offers[shell] = False
        now_ms = self._boot_ms()
        next_ms = self._retry_share.next_ms(now_ms, first_attempts_wait=False)
        if next_ms is not None and self._retry_timer is None:
            delay_s = max(next_ms - now_ms, 1) / 1000
            self._retry_timer = self._loop.call_later(delay_s, self._release_offers)

    def _end_retry(self, message: Message) -> None:
        self._retry_share.end(id(message), self._boot_ms())
        self._release_offers()

    def _release_offers(self) -> None:
        """There may be room for retries."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        held, self._held_offers = self._held_offers, {}
        for shell in held:
            self.offer(shell)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────
    async def _fail(
        self, worker: HandlerWorker, shell: OfferingShell, message: Message, error: BaseException
    ) -> None:
        """
        Report a handler's error.

        Raises:
            BaseException: `error`, if it ends the worker or closes the consumer.
        """
        is_closed = is_coroutine_closed(error)
        is_timed_out = self._cancels and worker.timed_out_message is message and not is_closed
        if is_timed_out and isinstance(error, Exception | asyncio.CancelledError):
            if self._is_ending:
                raise error
            if not isinstance(error, HandlerTimeoutError):
                error = self._timeout_error(error)
        if isinstance(error, asyncio.CancelledError):
            if self._is_ending:
                raise error
            if worker.cancelled_message is message:
                worker.uncancel()
                worker.message = None
                self._end_retry(message)
                shell.feed(MessagesReturned([message]))
                self._log_line(self._log.record_given_up(message, self._boot_ms()))
                return
        assert worker.task is not None
        if (is_timed_out or worker.task.cancelling()) and not is_closed:
            with contextlib.suppress(asyncio.CancelledError, HandlerTimeoutError):
                await self._absorb_cancels(worker)
            if self._is_ending:
                raise error
        worker.timed_out_message = None
        if is_closed or not isinstance(error, Exception | asyncio.CancelledError):
            raise error  # `_run`, the worker's outermost coroutine, handles it
        worker.message = None
        self._report_failure(shell, message, error)

    def _report_failure(self, shell: OfferingShell, message: Message, error: BaseException) -> None:
        """Report a failed attempt, and log what becomes of the message."""
        error = only_retry(error) or error
        is_asked = isinstance(error, Retry)
        failure = self._rules.build_failure(error, message.attempt)
        if message.attempt != 1:
            self._end_retry(message)
        if self._limited:
            self._release_offers()
        self._outcomes.clear()
        asked_ms = error.wait_ms if isinstance(error, Retry) else None
        shell.feed(MessageFailed(message, failure, asked_ms, is_asked))
        now_ms = self._boot_ms()
        if not self._outcomes:
            self._log_line(self._log.record_given_up(message, now_ms))
            return
        outcome = self._outcomes.pop()
        if outcome.treatment is Treatment.LOST:
            self._log_lost(message, error)
            return
        if outcome.treatment is Treatment.AGAIN:
            line = self._log.record_failure(
                message,
                type(error).__qualname__,
                now_ms,
                outcome.pause_ms or 0,
                text=failure.text,
                asked_for=error.reason if isinstance(error, Retry) else None,
                sealed=shell.state.offsets.end_offset is not None,
            )
        else:
            line = self._log.record_set_aside(
                message,
                failure.kind,
                now_ms,
                with_key=outcome.treatment is Treatment.PARKED,
                pause_ms=outcome.pause_ms,
                asked_for=is_asked,
            )
        self._log_line(line, error)

    def _log_lost(self, message: Message, error: BaseException) -> None:
        """Log the failure of a message that was acked before its handler was called."""
        self._lost_count += 1
        now_ms = self._boot_ms()
        if now_ms < self._next_lost_ms:
            return
        log.error(
            "handler failed with %s on %s, which is already acked, so it is not retried; %s lost",
            type(error).__qualname__,
            message_name(message),
            counted(self._lost_count, "message is", "messages are"),
            exc_info=error,
        )
        self._lost_count = 0
        self._next_lost_ms = now_ms + LOST_LOG_MS

    def _recover_from_close(self, worker: HandlerWorker, error: BaseException) -> None:
        """
        Recover after a task that a handler awaited has ended with a GeneratorExit.

        The event loop then closes every coroutine that awaits the task, up to the worker's
        outermost coroutine, which may continue.

        Raises:
            BaseException: `error`, if it is of another kind, or if the worker's own coroutine is
                being closed.
        """
        message, shell = worker.message, worker.shell
        must_end = self._closed or message is None or current_task() is not worker.task
        if must_end or not is_coroutine_closed(error):
            raise error
        assert message is not None
        assert shell is not None
        worker.message = None
        self._report_failure(shell, message, error)

    def _record_crash(self, worker: HandlerWorker, error: BaseException) -> None:
        """Report the attempt of a handler whose error closes the consumer, so that the next owner
        continues the count.
        """
        message, shell = worker.message, worker.shell
        if message is None or shell is None or isinstance(error, Exception) or is_signal(error):
            return
        worker.message = None
        self._report_failure(shell, message, error)

    def _abandon(self, worker: HandlerWorker) -> None:
        """Return the message of a worker that has ended, so that no hand-over waits for it."""
        message, shell = worker.message, worker.shell
        worker.message = None
        if worker.run is not None and shell is not None:
            worker.run = self._running = None
            shell.feed(RunEnded(worker.done, message is not None))
        if message is not None and shell is not None:
            shell.feed(MessagesReturned([message]))

    def _on_cancelled(self) -> None:
        if not self._closed:
            self._on_crash(UsageError(Reason.WORKER_CANCELLED))

    @property
    def _is_ending(self) -> bool:
        """True if workers must end themselves, not just their handlers."""
        return self._closed or self._sentinel.done() or bool(self._sentinel.cancelling())

    async def _absorb_cancels(self, worker: HandlerWorker) -> None:
        """
        Withdraw cancel requests that are pending when a handler ends.

        Raises:
            CancelledError: a request was not delivered yet; it counts as a failure of this handler,
                not of a later one.
            HandlerTimeoutError: the handler was cancelled because it timed out, but returned
                normally.
        """
        assert worker.task is not None
        if self._is_ending:
            # The handler has swallowed the request: make the worker's next await raise it.
            worker.task.cancel()
            return
        try:
            await asyncio.sleep(0)
        finally:
            if not self._is_ending:
                worker.uncancel()
        is_timed_out = worker.timed_out_message is not None
        if self._cancels and is_timed_out and worker.timed_out_message is worker.message:
            raise self._timeout_error()

    # ── handlers that take too long ───────────────────────────────────────────────────────────────
    def _watch_timeouts(self) -> None:
        """Schedule timeout checks while there are messages to handle."""
        if self._timeout_check is None and not self._closed:
            interval_s = min(TIMEOUT_CHECK_S, self._timeout_ms / 1000 / TIMEOUT_CHECKS)
            self._timeout_check = self._loop.call_later(interval_s, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timeout_check = None
        now_ms = self._boot_ms()
        for worker in self._workers:
            running_ms = worker.measure_running_ms(now_ms)
            if running_ms >= self._timeout_ms and worker.timed_out_message is None:
                self._time_out(worker)
        if self._given or self._offers or any(each.message for each in self._workers):
            self._watch_timeouts()

    def _time_out(self, worker: HandlerWorker) -> None:
        """Cancel a handler that has exceeded its timeout, unless a hand-over has already cancelled
        it or it runs in a thread.
        """
        message = worker.message
        assert message is not None
        if worker.cancelled_message is not None:
            return
        if self._cancels:
            worker.cancel_handler()
        else:
            failure = self._rules.build_failure(self._timeout_error(), message.attempt)
            message.delivery.report_hang(message, failure, self._timeout_ms)  # type: ignore[union-attr]
            log.warning(
                "%s has been in a thread for longer than handler_timeout_ms (%d ms); a thread "
                "cannot be cancelled, so its key and its thread wait until the handler returns",
                message_name(message),
                self._timeout_ms,
            )
        worker.timed_out_message = message

    def _timeout_error(self, cause: BaseException | None = None) -> HandlerTimeoutError:
        error = HandlerTimeoutError(
            f"the handler did not return within {self._timeout_ms} ms", timeout_ms=self._timeout_ms
        )
        error.__cause__ = None if isinstance(cause, asyncio.CancelledError) else cause
        return error

    def take_timeout_error(self, task: asyncio.Task[Any] | None) -> HandlerTimeoutError | None:
        """Return, once, the error of the handler that has ended in `task`, if the handler was
        cancelled because it timed out.
        """
        for worker in self._workers:
            hanging = worker.message is not None and worker.timed_out_message is worker.message
            if worker.task is task and hanging and self._cancels and not self._is_ending:
                worker.timed_out_message = None
                return self._timeout_error()
        return None

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    def check_long_running(self) -> None:
        """Log and report long-running handlers, and log the summary of failing messages. Call this
        about once a second.
        """
        now_ms = self._boot_ms()
        for worker in self._workers:
            if worker.message is not None or worker.checked_message is not None:
                self._log_line(check_worker(worker, self._log, self._rules, now_ms))
        self._log_line(self._log.build_summary(now_ms))

    @staticmethod
    def _log_line(line: LogLine | None, error: BaseException | None = None) -> None:
        if line is not None:
            level = logging.WARNING if line.warns else logging.INFO
            log.log(level, "%s", line.text, exc_info=error if line.traceback else None)

    def is_ending_worker(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is a worker's task and the worker must end itself, not just its
        handler.
        """
        return self._is_ending and self.is_worker_task(task)

    def is_worker_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is a worker's task, in which its handler runs."""
        return any(worker.task is task for worker in self._workers)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def quiesce(self, shell: OfferingShell) -> None:
        """
        Wait for the running handlers of a partition that is being handed over.

        Its session has them cancelled after `handover_ms`, or when the lease ends.
        """
        self.forget(shell)
        timeout_ms = self._handover_ms
        try:
            async with asyncio.timeout((timeout_ms + max(timeout_ms, CANCEL_WARN_MS)) / 1000):
                await shell.wait_quiet()
        except TimeoutError:
            for worker in self._workers:
                if worker.shell is shell and worker.message is not None:
                    log.warning(
                        "handler of %s was cancelled %d ms ago and is still running; the "
                        "hand-over waits for it",
                        message_name(worker.message),
                        max(timeout_ms, CANCEL_WARN_MS),
                    )
            await shell.wait_quiet()
        for worker in self._workers:
            if worker.shell is shell and worker.cancelled_message is not None:
                worker.uncancel()

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._log_line(self._log.build_summary(self._boot_ms(), last=True))
        for timer in (self._retry_timer, self._timeout_check):
            if timer is not None:
                timer.cancel()
        tasks: list[asyncio.Task[Any]] = [self._sentinel]
        tasks += [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
