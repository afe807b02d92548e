"""
Runs handlers: `concurrency` worker tasks, each taking the next message that may run.

A handler runs inside its worker's task, so a handler that never waits costs neither a task nor an
iteration of the event loop.

Cancelling
    Cancelling a handler therefore means cancelling its worker's task. asyncio counts such requests
    (`Task.cancelling`) until they are withdrawn (`Task.uncancel`). The worker withdraws all of them
    as soon as the handler has ended, whether it raised CancelledError or not: a pending request
    would break task groups and timeouts in later handlers. The worker itself ends when its consumer
    closes, or with the event loop, whose shutdown also cancels `_sentinel`, which handlers cannot
    reach. At any other time a CancelledError is either for the hand-over of `cancelled_message`, or
    raised by the handler itself, which counts as a failure.

Invariants
    The lease's deadline is checked before every attempt; a handler never starts after it. A message
    is done only when its handler has returned and any awaitable result has been awaited. A failed
    message waits for its retry outside of the workers. Its key waits with it; all other keys
    proceed. A worker ends only with its consumer, no matter what a handler raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import Callable
from typing import Any

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock, boot_seconds
from ...protocol.errors import HandlerTimeoutError, Reason, UsageError
from ...protocol.message import Message
from ...protocol.text import format_seconds
from ...rpc.race import start_task
from ..delivery.user_acks import are_parked_together
from ..log_names import message_name
from ..pulling.pull_client import PullClient, client_of
from ..settings import ConsumerSettings
from .failing import FailureRules
from .handler_log import HandlerLog, LogLine
from .handlers import Handler, await_result, is_async
from .lanes import RUN_MIN, Lanes, Run, UnopenedBatch
from .not_acked import Retry, is_signal, only_retry
from .retries import Retries
from .worker_task import IdleWorkers, WorkerTask, check_worker, current_task, is_coroutine_closed

log = logging.getLogger("keylane.consumer")

CANCEL_WARN_MS = 5_000
"""How long after its normal time limit, in milliseconds, a cancelled handler may keep running
before a warning is logged.
"""
MESSAGES_PER_TURN = 256
"""The number of messages after which a worker yields to the event loop, for heartbeats and
pulls.
"""
RUN_MAX = 1_024
"""The same limit for a run, whose handlers do not wait; a run also ends after RUN_S."""
RUN_S = 0.005
CANCELLED_WAIT_S = 1.0
"""How long after an outside cancellation of a worker, in seconds, the consumer closes, unless the
whole program has ended by then.
"""
TIMER_MIN_NS = 1_000_000
TIMEOUT_CHECK_S = 1.0
TIMEOUT_CHECKS = 20
"""How often handlers are checked within their timeout, but never more than once per
TIMEOUT_CHECK_S.
"""


class _NextStep(enum.Enum):
    """The next step of a worker after a run."""

    RUN = enum.auto()
    TAKE = enum.auto()
    """Take messages one at a time."""
    TURN = enum.auto()
    """Yield to the event loop."""


class Workers:
    """
    A pool of `concurrency` workers that share one set of lanes.

    Args:
        handover_ms: how long running handlers may take when their partition is handed over, in
            milliseconds.
        backoff: the pauses between attempts of a failing message.
        on_crash: called with a fatal error, which closes the consumer.
        handler_timeout_ms: a handler that runs for longer, in milliseconds, is cancelled, at most a
            tenth later; 0: no limit.
        cancels: False: handlers run in threads, so they cannot be cancelled and are only reported
            as failed.
        ordered: False: messages of one key may run at the same time.
        acks_each: True: the next message of a key starts only when the previous one's ack is
            durable.
        failure_rules: decides when a message is no longer retried, and what is recorded about its
            error.
    """

    _messages_per_turn = MESSAGES_PER_TURN
    _messages_per_handler = 1
    """The maximum number of messages that a handler gets at once."""

    def __init__(
        self,
        handler: Handler[Any],
        *,
        concurrency: int,
        handover_ms: int,
        backoff: Backoff,
        clock: Clock,
        rng: random.Random,
        on_crash: Callable[[BaseException], None],
        handler_timeout_ms: int = 0,
        cancels: bool = True,
        ordered: bool = True,
        acks_each: bool = False,
        failure_rules: FailureRules | None = None,
    ) -> None:
        self._timeout_ms = handler_timeout_ms
        self._cancels = cancels
        self._timeout_check: asyncio.TimerHandle | None = None
        """The timer of the next timeout check."""
        self._acks_each = acks_each
        self._ordered = ordered
        self._failure_rules = failure_rules or FailureRules()
        self._lanes = Lanes(ordered=ordered)
        self._handler = handler
        self._is_async = is_async(handler)
        self._handover_ms = handover_ms
        self._backoff = backoff
        self._boot_ns = clock.boot_ns
        self._clock_readings = boot_seconds(clock)
        self._run_size = RUN_MIN
        """The size of the next run, which is doubled after each run in which no handler waited."""
        self._rng = rng
        self._on_crash = on_crash
        self._handler_log = HandlerLog(ordered=ordered)
        self._retries: Retries[Message] = Retries(concurrency)
        self._retry_timer: asyncio.TimerHandle | None = None
        """The timer that starts due retries."""
        self._retry_timer_ns = 0
        self._closed = False
        self._ack_tasks: set[asyncio.Task[None]] = set()
        """The tasks that wait for acks that were refused."""
        self._sentinel = start_task(asyncio.Event().wait(), name="end of the event loop")
        """A task that waits forever, and is cancelled only when all tasks are."""
        self._idle_workers = IdleWorkers()
        self._workers = [WorkerTask() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    def apply_settings(self, settings: ConsumerSettings) -> None:
        """Apply new settings for failing messages."""
        self._failure_rules.apply_settings(settings)
        self._backoff = settings.try_backoff

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in offset order."""
        self._lanes.put(messages)
        self._watch_timeouts()
        self._wake()

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch of one partition, which is opened when its messages are next."""
        self._lanes.put_batch(batch)
        self._watch_timeouts()
        self._wake()

    def _wake(self) -> None:
        """
        Wake as many workers as the new messages need.

        As long as no handler waits, one running worker is enough: it wakes the others once its
        handler waits.
        """
        idle_workers = self._idle_workers
        idle_count = len(idle_workers.waiting)
        if idle_count == len(self._workers) and self._lanes.may_begin_run and not self._acks_each:
            idle_workers.wake_one()
        elif idle_count and (
            self._acks_each or not self._lanes.may_begin_run or self._is_another_running(None)
        ):
            idle_workers.wake_all()

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def on_idle(self) -> Callable[[], None] | None:
        """The callback for a worker that becomes idle."""
        return self._idle_workers.on_idle

    @on_idle.setter
    def on_idle(self, call: Callable[[], None] | None) -> None:
        self._idle_workers.on_idle = call

    @property
    def spare_capacity(self) -> int:
        """The number of messages for which a worker is free; if negative, the number of messages
        that wait for one.
        """
        self._lanes.register_running()
        free = sum(worker.message is None for worker in self._workers)
        return free * self._messages_per_handler - self._lanes.runnable

    def messages_in_use(self, client: PullClient) -> list[Message]:
        """Return the client's messages whose handlers are running."""
        self._lanes.register_running()
        running = (worker.message for worker in self._workers)
        return [
            each
            for message in running
            if message is not None and client_of(message) is client
            for each in self._messages_of(message)
        ]

    @property
    def running(self) -> list[tuple[Message, int]]:
        """The message of each running handler, with the milliseconds for which it is known to have
        been running.
        """
        now_ms = self._now_ms()
        self._lanes.register_running()
        return [
            (message, now_ms - worker.checked_since_ms)
            for worker in self._workers
            if (message := worker.message) is not None and message is worker.checked_message
        ]

    @property
    def end_of_wait(self) -> str:
        """What ends the wait for running handlers when the consumer closes, as a clause."""
        if self._cancels:
            return f"it cancels them {format_seconds(self._handover_ms)} after the close began"
        return "handlers in threads cannot be cancelled"

    def _messages_of(self, message: Message) -> list[Message]:
        return [message]

    def pause(self, partition_id: int) -> None:
        """Start no handlers for a partition until `resume`, not even for retries."""
        self._lanes.pause(partition_id)
        self._retries.pause(partition_id)
        now_ns = self._boot_ns()
        for message in self._lanes.take_due(partition_id):
            message.attempt -= 1
            self._count_retrying(message, 1)
            self._retries.end(message, now_ns)
            self._retries.add(message, now_ns)

    def resume(self, partition_id: int) -> None:
        """Start handlers for a partition again."""
        self._retries.resume(partition_id)
        has_waiting = self._lanes.resume(partition_id)
        if has_waiting:
            self._watch_timeouts()
        if has_waiting or self._start_due_retries():
            self._idle_workers.wake_all()

    async def _run(self, worker: WorkerTask) -> None:
        message: Message | None = None
        try:
            while True:
                try:
                    await self._take_turns(worker, message)
                except (GeneratorExit, RuntimeError) as error:
                    message = self._recover_from_close(worker, error)
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            if not self._closed:
                # Probably the program and its event loop are ending. If not, end the consumer,
                # because it must not continue without a worker.
                worker.clear_message()
                asyncio.get_running_loop().call_later(CANCELLED_WAIT_S, self._on_cancelled)
            raise
        except BaseException as error:
            try:
                self._record_crash(worker, error)
            finally:
                worker.clear_message()
                self._on_crash(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # these two would end the event loop before the hand-over

    @property
    def _is_ending(self) -> bool:
        """True if workers must end themselves, not just their handlers."""
        return self._closed or self._sentinel.done() or bool(self._sentinel.cancelling())

    async def _absorb_cancels(self, worker: WorkerTask) -> None:
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
        if (
            self._cancels
            and worker.timed_out_message is not None
            and worker.timed_out_message is worker.message
        ):
            raise self._timeout_error()

    async def _wait_for_ack(self, worker: WorkerTask, message: Message) -> bool:
        """Wait for the reply to a handled message's ack. Return False if the ack is not durable
        yet.
        """
        worker.message = None
        try:
            delivery = message.delivery
            is_durable: bool = await delivery.wait_for_ack_reply(message.offset)  # type: ignore[union-attr]
        except asyncio.CancelledError:
            if self._is_ending:
                raise
            worker.uncancel()
            return False
        return is_durable

    def _recover_from_close(self, worker: WorkerTask, error: BaseException) -> Message | None:
        """
        Recover after a task that a handler awaited has ended with a GeneratorExit.

        The event loop then closes every coroutine that awaits the task, up to the worker's
        outermost coroutine, which may continue.

        Returns:
            The next message of the lane, which counts as running, if this message is dropped; None
            if it is retried.

        Raises:
            BaseException: `error`, if it is of another kind, or if the worker's own coroutine is
                being closed.
        """
        message = worker.message
        must_end = self._closed or message is None or current_task() is not worker.task
        if must_end or not is_coroutine_closed(error):
            raise error
        assert message is not None
        if self._retry_or_drop(message, error):
            return None
        return self._lanes.finish(message.key)

    def _record_crash(self, worker: WorkerTask, error: BaseException) -> None:
        """Record the attempt of a handler whose error closes the consumer, so that the next owner
        continues the count; or set its message aside.
        """
        message = worker.message
        if message is None or isinstance(error, Exception) or is_signal(error):
            return
        if self._is_last(message, error):
            worker.message = None
            self._set_aside(message, error)
        else:
            failure = self._failure_rules.build_failure(error, message.attempt)
            message.delivery.report_failure(message, failure)  # type: ignore[union-attr]

    def _on_cancelled(self) -> None:
        if not self._closed:
            self._on_crash(UsageError(Reason.WORKER_CANCELLED))

    async def _take_turns(  # noqa: C901, PLR0912 - deliberately one loop
        self, worker: WorkerTask, message: Message | None
    ) -> None:
        # One loop that calls no helper functions, because a consumer spends most of its time here.
        lanes = self._lanes
        take, finish = lanes.take, lanes.finish
        boot_ns, handler, is_awaited = self._boot_ns, self._handler, self._is_async
        acks_each, idle_workers, retries = self._acks_each, self._idle_workers, self._retries
        assert worker.task is not None
        cancelling = worker.task.cancelling
        while True:
            remaining = self._messages_per_turn
            if message is not None or (message := lanes.take_single()) is None:
                may_handle_runs = message is None and lanes.may_begin_run and not acks_each
                if may_handle_runs and not self._is_another_running(worker):
                    message, remaining = await self._handle_runs(worker)
                if remaining and idle_workers.waiting and lanes.has_waiting:
                    idle_workers.wake_all()
            for _ in range(remaining):
                if message is None:
                    if (
                        lanes.may_take_unregistered
                        and lanes.arrivals[0].key not in lanes.busy_lanes
                    ):
                        message = lanes.unregistered = lanes.arrivals.popleft()
                    elif (message := take()) is None:
                        break
                    if message.attempt != 1:
                        message = await self._run_retry(worker, message)
                        continue
                client: PullClient = message.delivery  # type: ignore[assignment]
                if boot_ns() < client.deadline_ns:
                    worker.message = message
                    try:
                        result = await handler(message) if is_awaited else handler(message)
                        if result is not None:
                            await await_result(result)
                        if cancelling() or worker.timed_out_message is message:
                            await self._absorb_cancels(worker)
                    except BaseException as error:  # noqa: BLE001 - `_failed` decides
                        lanes.register_running()
                        if await self._failed(worker, message, error):
                            message = None
                            continue
                    else:
                        client.mark_handled(message.offset)
                        if acks_each and not await self._wait_for_ack(worker, message):
                            self._release_when_acked(message)
                            message = None
                            continue
                else:
                    client.discard_in_flight(1)
                if message is lanes.unregistered:
                    message = lanes.unregistered = None
                else:
                    message = finish(message.key)
            worker.message = None
            if self._is_ending:
                raise asyncio.CancelledError  # a handler has swallowed it
            idle = (
                message is None
                and not lanes.has_waiting
                and not (retries.waiting and self._start_due_retries())
            )
            try:
                await (idle_workers.wait() if idle else asyncio.sleep(0))
            except asyncio.CancelledError:
                if self._is_ending:
                    raise
                # A handler that has ended left the request behind, from a timer or another task.
                worker.uncancel()

    def _is_another_running(self, worker: WorkerTask | None) -> bool:
        """Return True if another worker's handler is running and waiting."""
        if worker is not None and len(self._idle_workers.waiting) >= len(self._workers) - 1:
            return False  # all others are idle
        for other in self._workers:  # noqa: SIM110 - a generator costs twice as much
            if other.message is not None and other is not worker:
                return True
        return False

    async def _handle_runs(self, worker: WorkerTask) -> tuple[Message | None, int]:
        """
        Handle messages in runs, each from one pull client, while no other handler is running, for
        at most one turn.

        A handler that does not wait needs no lane. Handled messages are reported when a handler
        waits or at the end of the run, because nothing can observe them earlier.

        Returns:
            The next message of the last message's lane, which counts as running, and how many more
            messages may run in this turn.
        """
        lanes, remaining, until_s = self._lanes, RUN_MAX, next(self._clock_readings) + RUN_S
        while remaining > 0 and (run := lanes.begin_run(min(remaining, self._run_size), worker)):
            worker.message = None
            interrupt = asyncio.get_running_loop().call_soon(self._interrupt, run)
            try:
                message, next_step = await self._handle_run(worker, run, until_s)
            finally:
                interrupt.cancel()
            if next_step is _NextStep.TURN:
                return None, 0
            remaining -= run.started + 1
            if next_step is _NextStep.TAKE:
                return message, max(0, min(remaining, self._messages_per_turn))
        return None, max(0, min(remaining, self._messages_per_turn))

    async def _handle_run(
        self, worker: WorkerTask, run: Run, until_s: float
    ) -> tuple[Message | None, _NextStep]:
        """Handle the messages of a run. Return the next message of the last message's lane, and the
        next step.
        """
        lanes, client, handler, is_awaited = self._lanes, run.client, self._handler, self._is_async
        next_step = _NextStep.RUN
        assert worker.task is not None
        cancelling = worker.task.cancelling
        pairs = zip(run.remaining, self._clock_readings)  # noqa: B905 - the readings are endless
        for message, now_s in pairs:
            if now_s >= client.deadline_s or now_s >= until_s:
                next_step = _NextStep.TAKE if now_s >= client.deadline_s else _NextStep.TURN
                break
            try:
                result = await handler(message) if is_awaited else handler(message)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out_message is message:
                    await self._absorb_cancels(worker)
            except BaseException as error:  # noqa: BLE001 - `_failed` decides
                next_step = _NextStep.RUN if lanes.run is run else _NextStep.TAKE
                lanes.register_running()
                if await self._failed(worker, message, error):
                    return None, next_step
                return lanes.finish(message.key), _NextStep.TAKE
            if lanes.run is not run:  # the handler waited
                client.mark_handled(message.offset)
                worker.uncancel()
                self._run_size = RUN_MIN
                return lanes.finish(message.key), _NextStep.TAKE
        handled = run.started - (next_step is not _NextStep.RUN)
        lanes.end_run(run, handled)
        if handled:
            client.mark_all_handled(run.messages[:handled])
        self._run_size = min(2 * self._run_size, RUN_MAX)
        return None, next_step

    def _interrupt(self, run: Run) -> None:
        """End a run at the message whose handler waits, so that other workers may run beside it."""
        lanes = self._lanes
        if lanes.run is run:
            lanes.register_running()
        if lanes.has_waiting:
            self._idle_workers.wake_all()

    async def _run_retry(self, worker: WorkerTask, message: Message) -> Message | None:
        """Run a message's retry. Return the next message of its lane if this one is finished."""
        client: PullClient = message.delivery  # type: ignore[assignment]
        start_ns = self._boot_ns()
        try:
            if start_ns >= client.deadline_ns:
                self._drop_message(message)
            else:
                self._retries.begin(message, start_ns)
                worker.message = message
                try:
                    result = self._handler(message)
                    if result is not None:
                        await await_result(result)
                    assert worker.task is not None
                    if worker.task.cancelling() or worker.timed_out_message is message:
                        await self._absorb_cancels(worker)
                except BaseException as error:  # noqa: BLE001 - `_failed` decides
                    if await self._failed(worker, message, error):
                        return None
                else:
                    client.mark_handled(message.offset)
                    self._log_line(self._handler_log.record_handled(message, self._now_ms()))
                    if self._acks_each and not await self._wait_for_ack(worker, message):
                        self._release_when_acked(message)
                        return None
        finally:
            self._retries.end(message, self._boot_ns())
            self._start_due_retries()
        return self._lanes.finish(message.key)

    def _release_when_acked(self, message: Message) -> None:
        """Block the key of a message whose ack was refused until the ack is durable. Other keys
        proceed, because their acks may free space.
        """
        self._lanes.hold_for_ack(message)
        task = start_task(self._wait_and_release(message), name="ack")
        self._ack_tasks.add(task)
        task.add_done_callback(self._ack_tasks.discard)

    async def _wait_and_release(self, message: Message) -> None:
        await message.delivery.wait_until_acked(message.offset)  # type: ignore[union-attr]
        self._lanes.release(message)
        self._idle_workers.wake_all()

    async def _failed(self, worker: WorkerTask, message: Message, error: BaseException) -> bool:
        """
        Handle a handler's error. Return True if the worker must not finish the message's lane,
        because a retry blocks it or it is already released.

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
                self._drop_message(message)
                return False
        assert worker.task is not None
        if (is_timed_out or worker.task.cancelling()) and not is_closed:
            with contextlib.suppress(asyncio.CancelledError, HandlerTimeoutError):
                await self._absorb_cancels(worker)
            if self._is_ending:
                raise error
        worker.timed_out_message = None
        if is_closed or not isinstance(error, Exception | asyncio.CancelledError):
            raise error  # `_run`, the worker's outermost coroutine, handles it
        return self._retry_or_drop(message, error)

    def _retry_or_drop(self, message: Message, error: BaseException) -> bool:
        """Schedule the retry of `message`, set it aside, or drop it if its lease has ended. Returns
        the same as `_failed`.
        """
        now_ns = self._boot_ns()
        client: PullClient = message.delivery  # type: ignore[assignment]
        if now_ns >= client.deadline_ns:
            if now_ns < client_of(message).deadline_ns:
                # Another consumer may get the message, and must count this attempt.
                client.report_failure(
                    message, self._failure_rules.build_failure(error, message.attempt)
                )
            self._drop_message(message)
            return False
        if self._is_last(message, error):
            return self._set_aside(message, error)
        self._schedule_retry(message, error, now_ns)
        return True

    def _schedule_retry(self, message: Message, error: BaseException, now_ns: int) -> None:
        """Schedule the retry of a message that failed with `error`."""
        client: PullClient = message.delivery  # type: ignore[assignment]
        error = only_retry(error) or error
        failure = self._failure_rules.build_failure(error, message.attempt)
        client.report_failure(message, failure)
        wait_ms = self._backoff.wait_ms(message.attempt, self._rng)
        reason = None
        if isinstance(error, Retry):
            reason = error.reason
            if error.wait_ms is not None:
                wait_ms = self._failure_rules.retry_wait_ms(error.wait_ms, message.attempt)
        line = self._handler_log.record_failure(
            *(message, type(error).__qualname__, now_ns // 1_000_000, wait_ms),
            text=failure.text,
            asked_for=reason,
            sealed=client_of(message).sealed,
        )
        self._log_line(line, error)
        due_ns = now_ns + wait_ms * 1_000_000
        self._retries.add(message, due_ns)
        self._count_retrying(message, 1)
        self._set_retry_timer(due_ns, now_ns)

    def _failed_message(self, message: Message) -> Message | None:
        """Return the single message that failed, or None if several failed together."""
        return message

    def _is_last(self, message: Message, error: BaseException) -> bool:
        """Return True if `message`, whose attempt failed with `error`, is no longer retried in
        place.
        """
        failed = self._failed_message(message)
        return failed is not None and self._failure_rules.is_last(failed, error)

    def _set_aside(self, message: Message, error: BaseException) -> bool:
        """Park a message that failed too often, make it a dead letter, or set it aside for a later
        retry. Return True if its lane is already released.
        """
        failed = self._failed_message(message)
        assert failed is not None
        client: PullClient = failed.delivery  # type: ignore[assignment]
        failure = self._failure_rules.build_failure(only_retry(error) or error, failed.attempt)
        parks = self._ordered and self._failure_rules.parks(failed)
        signal = only_retry(error) or error
        requested_ms = signal.wait_ms if isinstance(signal, Retry) else None
        pause_ms = self._failure_rules.pause_ms(failed, requested_ms)
        line = self._handler_log.record_set_aside(
            *(failed, failure.kind, self._now_ms()),
            with_key=parks,
            pause_ms=pause_ms,
            asked_for=isinstance(signal, Retry),
        )
        self._log_line(line, error)
        if pause_ms is not None:
            client.retry(failed, failure, pause_ms)
            return False
        if not parks:
            client.dead_letter(failed, failure)
            return False
        waiting = self._lanes.collect(message, lambda other: are_parked_together(failed, other))
        client.park(failed, failure, waiting)
        if self._lanes.has_waiting:
            self._idle_workers.wake_all()
        return True

    def _count_retrying(self, message: Message, sign: int) -> None:
        """Add `sign` (1 or -1) to the client's count of messages that are waiting for a retry."""
        client_of(message).add_retrying(sign)

    def _drop_message(self, message: Message) -> None:
        message.delivery.discard_in_flight(1)  # type: ignore[union-attr]
        self._log_line(self._handler_log.record_given_up(message, self._now_ms()))

    # ── due retries ───────────────────────────────────────────────────────────────────────────────
    def _start_due_retries(self) -> bool:
        """Put messages whose retry may start now into the lanes. Return True if there are any."""
        if not self._retries:
            return False
        now_ns = self._boot_ns()
        first_attempts_wait = self._lanes.has_waiting
        due = self._retries.take_due(now_ns, first_attempts_wait=first_attempts_wait)
        for message in due:
            message.attempt += 1
            self._count_retrying(message, -1)
        if due:
            self._watch_timeouts()
            self._lanes.put_due(due)
            self._idle_workers.wake_all()
        next_ns = self._retries.next_ns(now_ns, first_attempts_wait=first_attempts_wait)
        if next_ns is not None:
            self._set_retry_timer(next_ns, now_ns)
        return bool(due)

    def _set_retry_timer(self, due_ns: int, now_ns: int) -> None:
        """Make the timer start due retries at `due_ns` or earlier."""
        if self._closed or (self._retry_timer is not None and self._retry_timer_ns <= due_ns):
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._retry_timer_ns = max(due_ns, now_ns + TIMER_MIN_NS)
        wait_s = (self._retry_timer_ns - now_ns) / 1e9
        self._retry_timer = asyncio.get_running_loop().call_later(wait_s, self._on_retry_timer)

    def _on_retry_timer(self) -> None:
        self._retry_timer = None
        self._start_due_retries()

    # ── handlers that take too long ───────────────────────────────────────────────────────────────
    def _watch_timeouts(self) -> None:
        """Schedule timeout checks while there are messages to handle."""
        if self._timeout_ms and self._timeout_check is None and not self._closed:
            interval_s = min(TIMEOUT_CHECK_S, self._timeout_ms / 1000 / TIMEOUT_CHECKS)
            self._timeout_check = asyncio.get_running_loop().call_later(
                interval_s, self._check_timeouts
            )

    def _check_timeouts(self) -> None:
        self._timeout_check = None
        self._lanes.register_running()
        now_ms = self._now_ms()
        for worker in self._workers:
            if (
                worker.measure_running_ms(now_ms) >= self._timeout_ms
                and worker.timed_out_message is None
            ):
                self._time_out(worker)
        if self._retries or self._lanes.has_waiting or any(each.message for each in self._workers):
            self._watch_timeouts()

    def _time_out(self, worker: WorkerTask) -> None:
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
            failure = self._failure_rules.build_failure(self._timeout_error(), message.attempt)
            message.delivery.report_failure(message, failure)  # type: ignore[union-attr]
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
        now_ms = self._now_ms()
        self._lanes.register_running()
        for worker in self._workers:
            if worker.message is not None or worker.checked_message is not None:
                self._log_line(check_worker(worker, self._handler_log, self._failure_rules, now_ms))
        self._log_line(self._handler_log.build_summary(now_ms))

    def _now_ms(self) -> int:
        return self._boot_ns() // 1_000_000

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
    async def quiesce(self, client: PullClient) -> None:
        """
        Drop the waiting messages of `client`'s partition, and wait for its running handlers.

        Handlers are cancelled after `handover_ms`, or when the lease ends.
        """
        timeout_ms = min(self._handover_ms, client.left_ms)
        self._drop(client)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await client.wait_handled()
        except TimeoutError:
            await self._cancel(client, warn_ms=max(timeout_ms, CANCEL_WARN_MS))

    def _drop(self, client: PullClient) -> None:
        """Drop the queued messages of `client`'s partition: first attempts and retries."""
        now_ms = self._now_ms()
        failed = self._retries.drop(client.has_handed_out)
        self._retries.resume(client.partition_id)
        client.add_retrying(-len(failed))
        waiting = self._lanes.drop(client.partition_id, client.has_handed_out)
        for message in failed:
            self._lanes.release(message)
            self._log_line(self._handler_log.record_given_up(message, now_ms))
        for message in waiting:
            if message.attempt != 1:
                self._retries.end(message, self._boot_ns())
                self._log_line(self._handler_log.record_given_up(message, now_ms))
        client.discard_in_flight(len(failed) + len(waiting) + self._lanes.drop_batches(client))
        if self._lanes.has_waiting:
            self._idle_workers.wake_all()
        self._start_due_retries()

    async def _cancel(self, client: PullClient, *, warn_ms: int) -> None:
        """
        Cancel the running handlers of `client`, and wait until they have ended, however long that
        takes.

        Only then may the next owner start: a handler that is still running would break the order.
        """
        hanging = [
            worker
            for worker in self._workers
            if worker.message and client_of(worker.message) is client
        ]
        for worker in hanging:
            worker.cancel_handler()
        try:
            async with asyncio.timeout(warn_ms / 1000):
                await client.wait_handled()
        except TimeoutError:
            for message in (worker.message for worker in hanging if worker.message):
                log.warning(
                    "handler of %s was cancelled %d ms ago and is still running; the "
                    "hand-over waits for it",
                    message_name(message),
                    warn_ms,
                )
            await client.wait_handled()
        for worker in hanging:
            worker.uncancel()

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._log_line(self._handler_log.build_summary(self._now_ms(), last=True))
        for timer in (self._retry_timer, self._timeout_check):
            if timer is not None:
                timer.cancel()
        worker_tasks = [worker.task for worker in self._workers if worker.task is not None]
        tasks: list[asyncio.Task[Any]] = [*worker_tasks, *self._ack_tasks, self._sentinel]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            worker.forget_checks()
