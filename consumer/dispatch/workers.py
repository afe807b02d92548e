"""
The workers of a consumer: tasks that take what partition sessions hand out.

    idle ─▶ woken ─▶ a turn: `WorkerJobs` takes and handles ─▶ idle, or the next turn
                       ╰─ a handler raised ─▶ settle ─┬─ its attempt has failed
                                                      ├─ cancelled for a hand-over: goes back
                                                      ╰─ the worker ends, or its consumer

Cancelling
    Cancelling a handler means cancelling its worker's task. asyncio counts such requests
    (`Task.cancelling`) until they are withdrawn (`Task.uncancel`). The worker withdraws all of them
    as soon as the handler has ended: a pending request would break task groups and timeouts in
    later handlers. The worker itself ends when its consumer closes, or with the event loop, whose
    shutdown also cancels `_sentinel`, which handlers cannot reach. At any other time a
    CancelledError is either for the hand-over of `cancelled_message`, or raised by the handler
    itself, which counts as a failure.

Invariant
    A worker ends only with its consumer, no matter what a handler raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ...protocol.clock import Clock, boot_seconds
from ...protocol.errors import HandlerTimeoutError, Reason, UsageError
from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted, format_seconds
from ...rpc.operating.client_counts import HANDLING_BOUNDS_S
from ...rpc.operating.histogram import Histogram
from ...rpc.race import start_task
from ..handed_out import shell_of
from ..log_names import message_name
from ..session.events import MessageHangs, MessagesReturned
from ..settings import AckMode
from .failures import FailedAttempts, FailureRecords, log_line
from .handler_log import HandlerLog
from .handlers import is_async, is_signal
from .offers import OfferingShell, PartitionOffers

log = logging.getLogger("keylane.consumer")
_IGNORED_EXIT = "coroutine ignored GeneratorExit"
"""Python's error message for a coroutine that awaits something after it was closed."""
TURN_S = 0.005
"""How long workers may go on in one iteration of the event loop, in seconds."""
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


class Worker:
    """What one worker has, and for how long."""

    __slots__ = (
        "cancelled_message",
        "message",
        "messages",
        "run_done",
        "seen",
        "shell",
        "task",
        "timed_out_message",
    )

    def __init__(self) -> None:
        self.message: Message | None = None
        """The message whose handler is running; of a batch, the first one."""
        self.messages: list[Message] | None = None
        """The batch whose handler is running; None if it is a handler of one message."""
        self.run_done = 0
        """How many messages of its last run were handled when the run ended."""
        self.shell: OfferingShell | None = None
        """The partition of `message`."""
        self.cancelled_message: Message | None = None
        """The message whose handler was asked to cancel, until the request is withdrawn."""
        self.task: asyncio.Task[None] | None = None
        self.seen: tuple[Message, int, int] | None = None
        """The message at the last check, its attempt, and the time when it was first seen."""
        self.timed_out_message: Message | None = None
        """The message whose handler has exceeded its timeout."""

    def forget_checks(self) -> None:
        """Drop the checked messages: they refer to the consumer, and the garbage collector does not
        track messages.
        """
        self.seen = self.timed_out_message = None

    def cancel_handler(self) -> None:
        """Request the cancellation of the running handler."""
        assert self.task is not None
        self.cancelled_message = self.message
        self.task.cancel()

    def measure_running_ms(self, now_ms: int) -> int:
        """Return how long the handler is known to have been running, in milliseconds. Called by
        each check.
        """
        message, seen = self.message, self.seen
        if message is None:
            self.seen = None
            return 0
        if seen is None or seen[0] is not message or seen[1] != message.attempt:
            self.seen = (message, message.attempt, now_ms)
            self.timed_out_message = None
            return 0
        return now_ms - seen[2]

    def uncancel(self) -> None:
        """Withdraw all cancel requests: the handler they were meant for has ended."""
        self.cancelled_message = None
        assert self.task is not None
        while self.task.uncancel():
            pass


class IdleWorkers:
    """
    The idle workers of a consumer, woken in LIFO order.

    Wake-ups of busy workers are not stored: a worker looks for messages immediately before it
    waits, without yielding to the event loop in between.
    """

    __slots__ = ("on_idle", "waiting")

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] | None = None
        """Called when a worker becomes idle."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """The futures of the idle workers."""

    def __len__(self) -> int:
        return len(self.waiting)

    def wake_one(self) -> None:
        """Wake an idle worker."""
        while self.waiting:
            waiter = self.waiting.popitem()[0]
            if not waiter.done():
                waiter.set_result(None)
                return

    async def wait(self) -> None:
        """Wait until this worker is woken."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = None
        if self.on_idle is not None:
            self.on_idle()
        try:
            await waiter
        except BaseException:
            if waiter in self.waiting:
                del self.waiting[waiter]
            else:
                self.wake_one()  # pass the wake-up on to another worker
            raise


class WorkerJobs(ABC):
    """
    What the workers of a pool take, and what becomes of it: messages, or whole batches. A batch is
    known by its first message, which log lines and operators see.
    """

    in_batches = False
    """True: sessions hand out batches."""

    def __init__(self, handler: Callable[[Any], Any], pool: WorkerPool) -> None:
        self.handler = handler
        self.is_async = is_async(handler)
        self.pool = pool
        self.given: deque[tuple[OfferingShell, Any]] = deque()
        """Messages or batches that were handed out and have no worker, each with its partition."""

    @abstractmethod
    def next_job(self, worker: Worker) -> Coroutine[Any, Any, None] | None:
        """Return what a worker does next; None: there is nothing."""

    def add_given(self, shell: OfferingShell, messages: list[Message], *, taken: int = 0) -> None:
        """Accept what a session has handed out, and wake workers for it, except for the first
        `taken` ones.
        """
        jobs: list[Any] = [messages] if self.in_batches else messages
        for first in messages[:1] if self.in_batches else messages:
            if first.attempt != 1:
                self.pool.offers.retry_share.take(id(first))
        self.given.extend([(shell, job) for job in jobs])
        self.pool.watch_timeouts()
        for _ in jobs[taken:]:
            self.pool.idle.wake_one()

    def give_back_given(self, shell: OfferingShell) -> None:
        """Return what a partition has handed out and no worker has."""
        given = [job for each, job in self.given if each is shell]
        if given:
            self.given = deque(pair for pair in self.given if pair[0] is not shell)
            self.give_back(shell, given)

    def give_back(self, shell: OfferingShell, jobs: list[Any]) -> None:
        """Return messages, or batches, to their session; no attempt counts."""
        offers = self.pool.offers
        for job in jobs:
            first: Message = job[0] if self.in_batches else job
            if first.attempt != 1:
                offers.end_retry(first)
        for event in map(MessagesReturned, jobs if self.in_batches else [jobs]):
            shell.feed(event)
        if offers.limited:
            offers.release()

    def take_back(self, worker: Worker) -> Any:
        """Take what a worker has, and return it; None if it has nothing."""
        job = worker.message if worker.messages is None else worker.messages
        worker.message = worker.messages = None
        return job


class WorkerTurn:
    """
    How long the workers of a consumer may go on in one iteration of the event loop.

    They share the time, however many they are, so that heartbeats and answers wait for it once.

    Args:
        readings: readings of the boot clock in seconds, without end.
    """

    __slots__ = ("_has_begun", "_loop", "readings", "until_s")

    def __init__(self, readings: Iterator[float]) -> None:
        self.readings = readings
        self._loop = asyncio.get_running_loop()
        self.until_s = 0.0
        """Until when, once a worker has gone on in this iteration."""
        self._has_begun = False

    def has_time(self, now_s: float) -> bool:
        """Return True if a worker may go on. The first one in an iteration always may."""
        if self._has_begun:
            return now_s < self.until_s
        self._has_begun = True
        self.until_s = now_s + TURN_S
        self._loop.call_soon(self._end)
        return True

    def _end(self) -> None:
        self._has_begun = False


class WorkerPool:
    """
    The workers of one consumer, to its shells and to the consumer.

    Args:
        make_jobs: makes what the workers take, for this pool.
        runner: the phrase that log lines use for the handler.
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
        make_jobs: Callable[[WorkerPool], WorkerJobs],
        *,
        concurrency: int,
        handover_ms: int,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        failures: FailureRecords,
        runner: str = "handler",
        handler_timeout_ms: int = 0,
        cancels: bool = True,
        ordered: bool = True,
    ) -> None:
        self._handover_ms = handover_ms
        self._on_crash = on_crash
        self._timeout_ms = handler_timeout_ms
        self._cancels = cancels
        self._timeout_check: asyncio.TimerHandle | None = None
        self.turn = WorkerTurn(boot_seconds(clock))
        self.handling = Histogram(HANDLING_BOUNDS_S)
        """How long calls of the handler take."""
        self.boot_ms = clock.boot_ms
        self.failures = FailedAttempts(
            failures, HandlerLog(runner=runner, ordered=ordered), boot_ms=clock.boot_ms
        )
        self.idle = IdleWorkers()
        self.offers = PartitionOffers(
            concurrency,
            boot_ms=clock.boot_ms,
            wake=self.idle.wake_one,
            count_free=lambda: sum(worker.message is None for worker in self.workers),
        )
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._sentinel = start_task(asyncio.Event().wait(), name="end of the event loop")
        """A task that waits forever, and is cancelled only when all tasks are."""
        self.workers = [Worker() for _ in range(concurrency)]
        self._jobs = make_jobs(self)
        for index, worker in enumerate(self.workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    def count_calls(self, begun_s: float, *, before: int = 0, since_s: float = 0.0) -> None:
        """
        Count a call of the handler that has just ended, for metrics.

        Args:
            begun_s: when it began.
            before: the number of calls just before it, one after another, none of which has waited.
                They began within TURN_S, so their mean is good enough, and costs nothing per call.
            since_s: when the first of these began.
        """
        end_s = next(self.turn.readings)
        self.handling.observe(round((end_s - begun_s) * 1e9))
        if before:
            self.handling.observe_many(before, round((begun_s - since_s) * 1e9))

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def on_idle(self) -> Callable[[], None] | None:
        """The callback for a worker that becomes idle."""
        return self.idle.on_idle

    @on_idle.setter
    def on_idle(self, call: Callable[[], None] | None) -> None:
        self.idle.on_idle = call

    def count_spare(self, shell: OfferingShell) -> int:
        """Return for how many messages a worker is free; if negative, how many messages wait for
        one.
        """
        per_worker = shell.state.settings.max_records if self.in_batches else 1
        return self.offers.count_spare(len(self._jobs.given), per_worker)

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    @property
    def in_batches(self) -> bool:
        """True if sessions are to hand out batches."""
        return self._jobs.in_batches

    by_column = False

    def hand_out(self, shell: OfferingShell, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        self._jobs.add_given(shell, messages)
        if self.offers.are_over:
            self._return_unbegun(shell)

    def offer(self, shell: OfferingShell) -> None:
        """Note that a worker that asks this partition may get something."""
        self.offers.add(shell)

    def cancel(self, shell: OfferingShell) -> None:
        """Cancel the handlers that have messages of a partition, and return what has no worker."""
        self._jobs.give_back_given(shell)
        for worker in self.workers:
            if worker.shell is shell and worker.message is not None:
                worker.cancel_handler()

    def forget(self, shell: OfferingShell) -> None:
        """Note that a partition is being handed over: it offers nothing more, and its failed
        messages are given up, except those in handlers.
        """
        self.offers.remove(shell)
        running = {id(worker.message) for worker in self.workers if worker.message is not None}
        self._return_unbegun(shell)
        lines = self.failures.lines.record_all_given_up(
            lambda each: shell_of(each) is shell and id(each) not in running,
            self.boot_ms(),
        )
        for line in lines:
            log_line(line)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────
    @property
    def has_jobs(self) -> bool:
        """True if a worker may get something."""
        return bool(self._jobs.given or self.offers.ready)

    def is_alone(self, worker: Worker) -> bool:
        """Return True if no other worker has a message."""
        if len(self.idle.waiting) >= len(self.workers) - 1:
            return True
        return all(other.message is None for other in self.workers if other is not worker)

    async def _run(self, worker: Worker) -> None:
        try:
            while True:
                try:
                    await self._take_turns(worker)
                except (GeneratorExit, RuntimeError) as error:
                    self._recover_from_close(worker, error)
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            self._give_back(worker)
            if not self._closed:
                # Probably the program and its event loop are ending. If not, end the consumer,
                # because it must not continue without a worker.
                self._loop.call_later(CANCELLED_WAIT_S, self._on_cancelled)
            raise
        except BaseException as error:
            self.begin_no_more()
            try:
                self._record_crash(worker, error)
            finally:
                self._give_back(worker)
                self._on_crash(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # these two would end the event loop before the hand-over

    async def _take_turns(self, worker: Worker) -> None:
        jobs, turn, readings = self._jobs, self.turn, self.turn.readings
        while True:
            is_idle = not self.has_jobs
            if is_idle or not turn.has_time(next(readings)):
                try:
                    await (self.idle.wait() if is_idle else asyncio.sleep(0))
                except asyncio.CancelledError:
                    if self.is_ending:
                        raise
                    # A handler that has ended left the request behind, from a timer or another
                    # task.
                    worker.uncancel()
                continue
            job = jobs.next_job(worker)
            if job is not None:
                await job
            if self.is_ending:
                raise asyncio.CancelledError  # a handler has swallowed it

    @property
    def running(self) -> list[tuple[Message, int]]:
        """The message of each running handler, with the milliseconds for which it is known to have
        been running.
        """
        now_ms = self.boot_ms()
        return [
            (seen[0], now_ms - seen[2])
            for worker in self.workers
            if (seen := worker.seen) is not None and seen[0] is worker.message
        ]

    @property
    def end_of_wait(self) -> str:
        """What ends the wait for running handlers when the consumer closes, as a clause."""
        if self._cancels:
            return f"it cancels them {format_seconds(self._handover_ms)} after the close began"
        return "handlers in threads cannot be cancelled"

    # ── handlers that end with an error ───────────────────────────────────────────────────────────
    async def settle(self, worker: Worker, error: BaseException) -> None:
        """
        Decide about the error of a worker's handler, and report what its message's attempt is.

        Raises:
            BaseException: `error`, if it ends the worker or closes the consumer.
        """
        message = worker.message
        is_closed = is_coroutine_closed(error)
        is_timed_out = self._cancels and worker.timed_out_message is message and not is_closed
        if is_timed_out and isinstance(error, Exception | asyncio.CancelledError):
            if self.is_ending:
                raise error
            if not isinstance(error, HandlerTimeoutError):
                error = self._timeout_error(error)
        if isinstance(error, asyncio.CancelledError):
            if self.is_ending:
                raise error
            if worker.cancelled_message is message:
                assert message is not None
                worker.uncancel()
                self._log_cancelled(worker, message)
                self._give_back(worker)
                return
        assert worker.task is not None
        if (is_timed_out or worker.task.cancelling()) and not is_closed:
            with contextlib.suppress(asyncio.CancelledError, HandlerTimeoutError):
                await self.absorb_cancels(worker)
            if self.is_ending:
                raise error
        worker.timed_out_message = None
        if is_closed or not isinstance(error, Exception | asyncio.CancelledError):
            raise error  # `_run`, the worker's outermost coroutine, handles it
        self._fail(worker, error)

    def _fail(self, worker: Worker, error: BaseException) -> None:
        """Report the failed attempt of what a worker has."""
        shell, job = worker.shell, self._jobs.take_back(worker)
        assert shell is not None
        first = job[0] if self.in_batches else job
        if first.attempt != 1:
            self.offers.end_retry(first)
        if self.offers.limited:
            self.offers.release()
        self.failures.report_error(shell, job, error)

    def _give_back(self, worker: Worker) -> None:
        """Return what a worker has to its session; no attempt counts."""
        shell, job = worker.shell, self._jobs.take_back(worker)
        if job is not None and shell is not None:
            self._jobs.give_back(shell, [job])

    def _log_cancelled(self, worker: Worker, message: Message) -> None:
        assert worker.shell is not None
        settings, lines = worker.shell.state.settings, self.failures.lines
        if settings.broadcast:  # it has no next owner
            log_line(lines.record_given_up(message, self.boot_ms()))
            return
        count = 1 if worker.messages is None else len(worker.messages)
        again = settings.ack is not AckMode.BEFORE
        log_line(lines.record_cancelled(message, count, self.boot_ms(), again=again))

    def _recover_from_close(self, worker: Worker, error: BaseException) -> None:
        """
        Recover after a task that a handler awaited has ended with a GeneratorExit.

        The event loop then closes every coroutine that awaits the task, up to the worker's
        outermost coroutine, which may continue.

        Raises:
            BaseException: `error`, if it is of another kind, or if the worker's own coroutine is
                being closed.
        """
        must_end = self._closed or worker.message is None or current_task() is not worker.task
        if must_end or not is_coroutine_closed(error):
            raise error
        self._fail(worker, error)

    def _record_crash(self, worker: Worker, error: BaseException) -> None:
        """Report the attempt of a handler whose error closes the consumer, so that the next owner
        continues the count.
        """
        if worker.message is not None and not isinstance(error, Exception) and not is_signal(error):
            self._fail(worker, error)

    def begin_no_more(self) -> None:
        """Let no handler begin, because the consumer ends: the next owners get the messages."""
        self.offers.end()
        for shell in dict.fromkeys(shell for shell, _ in self._jobs.given):
            self._return_unbegun(shell)

    def _return_unbegun(self, shell: OfferingShell) -> None:
        """Return what a partition has handed out and no worker has, unless it is acked already:
        nobody else would get it.
        """
        if shell.state.settings.ack is not AckMode.BEFORE:
            self._jobs.give_back_given(shell)

    def _on_cancelled(self) -> None:
        if not self._closed:
            self._on_crash(UsageError(Reason.WORKER_CANCELLED))

    @property
    def is_ending(self) -> bool:
        """True if workers must end themselves, not just their handlers."""
        return self._closed or self._sentinel.done() or bool(self._sentinel.cancelling())

    async def absorb_cancels(self, worker: Worker) -> None:
        """
        Withdraw cancel requests that are pending when a handler ends.

        Raises:
            CancelledError: a request was not delivered yet; it counts as a failure of this handler,
                not of a later one.
            HandlerTimeoutError: the handler was cancelled because it timed out, but returned
                normally.
        """
        assert worker.task is not None
        if self.is_ending:
            # The handler has swallowed the request: make the worker's next await raise it.
            worker.task.cancel()
            return
        try:
            await asyncio.sleep(0)
        finally:
            if not self.is_ending:
                worker.uncancel()
        is_timed_out = worker.timed_out_message is not None
        if self._cancels and is_timed_out and worker.timed_out_message is worker.message:
            raise self._timeout_error()

    # ── handlers that take too long ───────────────────────────────────────────────────────────────
    def watch_timeouts(self) -> None:
        """Schedule timeout checks while there are messages to handle."""
        if self._timeout_ms and self._timeout_check is None and not self._closed:
            interval_s = min(TIMEOUT_CHECK_S, self._timeout_ms / 1000 / TIMEOUT_CHECKS)
            self._timeout_check = self._loop.call_later(interval_s, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timeout_check = None
        now_ms = self.boot_ms()
        for worker in self.workers:
            running_ms = worker.measure_running_ms(now_ms)
            if running_ms >= self._timeout_ms and worker.timed_out_message is None:
                self._time_out(worker)
        if self.has_jobs or any(each.message for each in self.workers):
            self.watch_timeouts()

    def _time_out(self, worker: Worker) -> None:
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
            failure = self.failures.records.build_failure(self._timeout_error(), message.attempt)
            shell_of(message).feed(MessageHangs(message, failure, self._timeout_ms, True))
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

    def check_long_running(self) -> None:
        """Log and report long-running handlers, and log the summary of failing messages. Call this
        about once a second.
        """
        now_ms = self.boot_ms()
        lines, records = self.failures.lines, self.failures.records
        running: list[Message] = []
        for worker in self.workers:
            running_ms, message = worker.measure_running_ms(now_ms), worker.message
            if message is None:
                continue
            running.append(message)
            if running_ms >= HANGS_MS:
                failure = records.build_hang_failure(_describe_hang(worker), message.attempt)
                shell_of(message).feed(MessageHangs(message, failure, running_ms))
            log_line(lines.record_running(message, now_ms - running_ms, now_ms))
        for line in lines.record_stopped(running, now_ms):
            log_line(line)
        log_line(lines.build_summary(now_ms))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def is_ending_worker(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is a worker's task and the worker must end itself, not just its
        handler.
        """
        return self.is_ending and self.is_worker_task(task)

    def is_worker_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is a worker's task, in which its handler runs."""
        return any(worker.task is task for worker in self.workers)

    async def quiesce(self, shell: OfferingShell) -> None:
        """
        Wait for the running handlers of a partition that is being handed over.

        Its session has them cancelled after `handover_ms`, or when the lease ends.
        """
        self.forget(shell)
        timeout_ms = self._handover_ms
        warn_ms = max(timeout_ms, CANCEL_WARN_MS)
        try:
            async with asyncio.timeout((timeout_ms + warn_ms) / 1000):
                await shell.wait_quiet()
        except TimeoutError:
            for worker in self.workers:
                if worker.shell is shell and worker.message is not None:
                    log.warning(
                        "handler of %s was cancelled %d ms ago and is still running; the "
                        "hand-over waits for it",
                        message_name(worker.message),
                        warn_ms,
                    )
            await shell.wait_quiet()
        for worker in self.workers:
            if worker.shell is shell and worker.cancelled_message is not None:
                worker.uncancel()

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        log_line(self.failures.lines.build_summary(self.boot_ms(), last=True))
        self.offers.close()
        if self._timeout_check is not None:
            self._timeout_check.cancel()
        tasks: list[asyncio.Task[Any]] = [self._sentinel]
        tasks += [worker.task for worker in self.workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self.workers:
            worker.forget_checks()


def is_coroutine_closed(error: BaseException) -> bool:
    """Return True for the error of a closed coroutine, after which neither it nor its callers may
    await anything.
    """
    ignored = isinstance(error, RuntimeError) and error.args == (_IGNORED_EXIT,)
    return ignored or isinstance(error, GeneratorExit)


def current_task() -> asyncio.Task[object] | None:
    """Return the running task, or None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _describe_hang(worker: Worker) -> str:
    if worker.messages is None:
        return "its handler has not returned"
    return (
        f"the handler of its batch of {counted(len(worker.messages), 'message')} has not returned"
    )
