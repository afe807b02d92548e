"""Runs handlers: `concurrency` worker tasks, each taking the next message that may run.

A handler runs inside its worker's task, so a handler that never waits costs no task and no turn of
the event loop.

Cancelling
    Cancelling a handler therefore means cancelling its worker's task. asyncio counts such requests
    (`Task.cancelling`) until they are taken back (`Task.uncancel`). The worker takes all of them
    back as soon as the handler has ended, with the CancelledError or in spite of it: a remaining
    request would break task groups and time-outs of later handlers. The worker itself ends when its
    consumer closes, or with the event loop, whose end cancels `_sentinel` too, which no handler
    knows. A CancelledError at any other time is for the hand-over of a message,
    `cancelled_message`, or it is the handler's own, and a failure.

Invariants
    The lease's deadline is checked before every try; a handler never starts after it.
    A message is done only when its handler has returned, and an awaitable result was awaited.
    A failed message waits for its next try outside of the workers. Its key waits with it; all
    other keys proceed. A worker ends only with its consumer, whatever a handler raises.
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
from ...rpc.race import start_task
from ..delivery.user_acks import are_parked_together
from ..log_names import message_name
from ..pulling.pull_client import PullClient, client_of
from ..settings import ConsumerSettings
from .failing import Failing
from .handler_log import HandlerLog, LogLine
from .handlers import Handler, await_result, is_async
from .lanes import RUN_MIN, Lanes, Run, UnopenedBatch
from .not_acked import Retry, is_a_signal, only_retry
from .retries import Retries
from .worker_task import IdleWorkers, WorkerTask, closes_coroutines, current_task, look_at

log = logging.getLogger("keylane.consumer")

CANCEL_WARN_MS = 5_000
"""The milliseconds, beyond the time that it had before, after which a cancelled handler that has
not ended causes a warning.
"""
MESSAGES_PER_TURN = 256
"""The number of messages after which a worker lets the event loop turn, for heartbeats and
pulls.
"""
RUN_MAX = 1_024
"""The same number for a run, whose handlers do not wait, if they take less than RUN_S together."""
RUN_S = 0.005
CANCELLED_WAIT_S = 1.0
"""Seconds after which a worker that was cancelled from outside ends the consumer, unless the whole
program has ended by then.
"""
TIMER_MIN_NS = 1_000_000
TIMEOUT_LOOK_S = 1.0
TIMEOUT_LOOKS = 20
"""The number of checks for handlers that take too long within their time; at most one check is made
in a second.
"""


class _Then(enum.Enum):
    """The next step of a worker after a run."""

    RUN = enum.auto()
    TAKE = enum.auto()
    """The worker takes messages one at a time."""
    TURN = enum.auto()
    """The worker lets the event loop turn."""


class Workers:
    """
    `concurrency` workers over one set of lanes.

    Args:
        handover_ms: the time that running handlers have to end when their partition is handed over.
        backoff: the pauses between tries of a failing message.
        on_crash: called with an error that ends the consumer.
        handler_timeout_ms: a handler that runs for longer is cancelled, up to a tenth later; 0: no
            limit.
        cancels: False: handlers run in threads, so they are not cancelled, but only reported as
            failed.
        ordered: False: messages of one key may run at the same time.
        acks_each: True: a worker waits until the ack of its message is durable, before the next of
            its key may run.
        failing: decides when a message is not tried again, and which part of its error is kept.
    """

    _per_turn = MESSAGES_PER_TURN
    _per_handler = 1
    """The most messages that a handler gets at once."""

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
        failing: Failing | None = None,
    ) -> None:
        self._timeout_ms = handler_timeout_ms
        self._cancels = cancels
        self._timeouts: asyncio.TimerHandle | None = None
        """The timer of the next check for handlers that take too long."""
        self._acks_each = acks_each
        self._ordered = ordered
        self._failing = failing or Failing()
        self._lanes = Lanes(ordered=ordered)
        self._handler = handler
        self._is_async = is_async(handler)
        self._handover_ms = handover_ms
        self._backoff = backoff
        self._boot_ns = clock.boot_ns
        self._readings = boot_seconds(clock)
        self._run_size = RUN_MIN
        """The size of the next run: it doubles after each run that ends without a wait."""
        self._rng = rng
        self._on_crash = on_crash
        self._handler_log = HandlerLog(ordered=ordered)
        self._retries: Retries[Message] = Retries(concurrency)
        self._timer: asyncio.TimerHandle | None = None
        """The timer that starts the tries that are due."""
        self._timer_ns = 0
        self._closed = False
        self._acking: set[asyncio.Task[None]] = set()
        """The tasks that wait for acks that were refused."""
        self._sentinel = start_task(asyncio.Event().wait(), name="end of the event loop")
        """A task that waits for ever, so that it is cancelled only together with all other
        tasks.
        """
        self._work = IdleWorkers()
        self._workers = [WorkerTask() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = start_task(self._run(worker), name=f"handler {index}")

    def adopt(self, settings: ConsumerSettings) -> None:
        """Treat failing messages by these settings from now on."""
        self._failing.adopt(settings)
        self._backoff = settings.try_backoff

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
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
        Wake the workers that are needed for the arrived messages.

        While no handler waits, one worker is woken, or none if one is awake: it wakes the others
        once its handler waits.
        """
        work, idle = self._work, len(self._work.waiting)
        if idle == len(self._workers) and self._lanes.may_run and not self._acks_each:
            work.wake_one()
        elif idle and (self._acks_each or not self._lanes.may_run or self._runs_beside(None)):
            work.wake_all()

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def on_idle(self) -> Callable[[], None] | None:
        """Return the callable that is called when a worker becomes idle."""
        return self._work.on_idle

    @on_idle.setter
    def on_idle(self, call: Callable[[], None] | None) -> None:
        self._work.on_idle = call

    @property
    def spare(self) -> int:
        """Return the number of further messages for which a worker is free; if it is negative, that
        many wait for a worker.
        """
        self._lanes.note_alone()
        free = sum(worker.message is None for worker in self._workers)
        return free * self._per_handler - self._lanes.runnable

    def held(self, client: PullClient) -> list[Message]:
        """Return the client's messages whose handlers run."""
        self._lanes.note_alone()
        running = (worker.message for worker in self._workers)
        return [
            each
            for message in running
            if message is not None and client_of(message) is client
            for each in self._messages_of(message)
        ]

    def _messages_of(self, message: Message) -> list[Message]:
        return [message]

    def pause(self, partition_id: int) -> None:
        """Start no handler for a partition until `resume`, even for messages that failed."""
        self._lanes.pause(partition_id)
        self._retries.pause(partition_id)
        now_ns = self._boot_ns()
        for message in self._lanes.take_due(partition_id):
            message.attempt -= 1
            self._count_retrying(message, 1)
            self._retries.end(message, now_ns)
            self._retries.wait(message, now_ns)

    def resume(self, partition_id: int) -> None:
        """Start handlers for a partition again."""
        self._retries.resume(partition_id)
        runs = self._lanes.resume(partition_id)
        if runs:
            self._watch_timeouts()
        if runs or self._start_due():
            self._work.wake_all()

    async def _run(self, worker: WorkerTask) -> None:
        message: Message | None = None
        try:
            while True:
                try:
                    await self._take_turns(worker, message)
                except (GeneratorExit, RuntimeError) as error:
                    message = self._closed_with_its_task(worker, error)
        except GeneratorExit:
            raise
        except asyncio.CancelledError:
            if not self._closed:
                # Perhaps the whole program ends, and the event loop with it. If not, the consumer
                # must not lose a worker.
                worker.forget()
                asyncio.get_running_loop().call_later(CANCELLED_WAIT_S, self._on_cancelled)
            raise
        except BaseException as error:
            try:
                self._count_try(worker, error)
            finally:
                worker.forget()
                self._on_crash(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # those two would end the event loop before anything is handed over

    @property
    def _is_ending(self) -> bool:
        """Return True if workers must themselves end, not only their handlers."""
        return self._closed or self._sentinel.done() or bool(self._sentinel.cancelling())

    async def _settle(self, worker: WorkerTask) -> None:
        """
        Take back the cancel requests that a handler has left at its end.

        Raises:
            CancelledError: a request had not arrived: its cause is a failure of this handler, and
                of no later one.
            HandlerTimeoutError: the handler was cancelled because it took too long, but has
                returned nevertheless.
        """
        assert worker.task is not None
        if self._is_ending:
            # The handler has not passed the request on: the next one does, before it waits.
            worker.task.cancel()
            return
        try:
            await asyncio.sleep(0)
        finally:
            if not self._is_ending:
                worker.take_back_cancel()
        if self._cancels and worker.timed_out is not None and worker.timed_out is worker.message:
            raise self._timeout_error()

    async def _answered(self, worker: WorkerTask, message: Message) -> bool:
        """Wait for the answer to the ack of a handled message, and return False if it is not
        durable now.
        """
        worker.message = None
        try:
            delivery = message.delivery
            answered: bool = await delivery.answered(message.offset)  # type: ignore[union-attr]
        except asyncio.CancelledError:
            if self._is_ending:
                raise
            worker.take_back_cancel()
            return False
        return answered

    def _closed_with_its_task(self, worker: WorkerTask, error: BaseException) -> Message | None:
        """
        Continue after a task that a handler awaited ended with a GeneratorExit.

        The event loop then closes every coroutine that awaits the task, up to the worker's
        outermost one, which may continue.

        Returns:
            The next message of the lane, which counts as running, if this message is given up.

        Raises:
            BaseException: `error`, if it is of another kind, or the worker's own coroutine is being
                closed.
        """
        message = worker.message
        ends = self._closed or message is None or current_task() is not worker.task
        if ends or not closes_coroutines(error):
            raise error
        assert message is not None
        if self._tried_again_later(message, error):
            return None
        return self._lanes.finish(message.key)

    def _count_try(self, worker: WorkerTask, error: BaseException) -> None:
        """Count the try of a handler that ends the consumer, so that the tries of the next owner
        continue after it; or set its message aside.
        """
        message = worker.message
        if message is None or isinstance(error, Exception) or is_a_signal(error):
            return
        if self._is_last(message, error):
            worker.message = None
            self._set_aside(message, error)
        else:
            failure = self._failing.failure(error, message.attempt)
            message.delivery.note_failed(message, failure)  # type: ignore[union-attr]

    def _on_cancelled(self) -> None:
        if not self._closed:
            self._on_crash(UsageError(Reason.WORKER_CANCELLED))

    async def _take_turns(  # noqa: C901, PLR0912 - one loop, on purpose
        self, worker: WorkerTask, message: Message | None
    ) -> None:
        # This is one loop without calls of our own: a consumer spends most of its time here.
        lanes = self._lanes
        take, finish = lanes.take, lanes.finish
        boot_ns, handler, awaited = self._boot_ns, self._handler, self._is_async
        acks_each, work, retries = self._acks_each, self._work, self._retries
        assert worker.task is not None
        cancelling = worker.task.cancelling
        while True:
            left = self._per_turn
            if message is not None or (message := lanes.take_only()) is None:
                alone = message is None and lanes.may_run and not acks_each
                if alone and not self._runs_beside(worker):
                    message, left = await self._run_alone(worker)
                if left and work.waiting and lanes.has_waiting:
                    work.wake_all()
            for _ in range(left):
                if message is None:
                    if lanes.may_be_alone and lanes.arrived[0].key not in lanes.busy:
                        message = lanes.alone = lanes.arrived.popleft()
                    elif (message := take()) is None:
                        break
                    if message.attempt != 1:
                        message = await self._try_again(worker, message)
                        continue
                client: PullClient = message.delivery  # type: ignore[assignment]
                if boot_ns() < client.deadline_ns:
                    worker.message = message
                    try:
                        result = await handler(message) if awaited else handler(message)
                        if result is not None:
                            await await_result(result)
                        if cancelling() or worker.timed_out is message:
                            await self._settle(worker)
                    except BaseException as error:  # noqa: BLE001 - decided there
                        lanes.note_alone()
                        if await self._failed(worker, message, error):
                            message = None
                            continue
                    else:
                        client.done(message.offset)
                        if acks_each and not await self._answered(worker, message):
                            self._free_later(message)
                            message = None
                            continue
                else:
                    client.forget(1)
                if message is lanes.alone:
                    message = lanes.alone = None
                else:
                    message = finish(message.key)
            worker.message = None
            if self._is_ending:
                raise asyncio.CancelledError  # a handler has not passed it on
            idle = (
                message is None
                and not lanes.has_waiting
                and not (retries.waiting and self._start_due())
            )
            try:
                await (work.wait() if idle else asyncio.sleep(0))
            except asyncio.CancelledError:
                if self._is_ending:
                    raise
                # A handler that has ended left the request, by a timer or another task.
                worker.take_back_cancel()

    def _runs_beside(self, worker: WorkerTask | None) -> bool:
        """Return True if the handler of another worker is running, and waits."""
        if worker is not None and len(self._work.waiting) >= len(self._workers) - 1:
            return False  # all others are idle
        for other in self._workers:  # noqa: SIM110 - a generator costs twice as much
            if other.message is not None and other is not worker:
                return True
        return False

    async def _run_alone(self, worker: WorkerTask) -> tuple[Message | None, int]:
        """
        Handle messages of one pull client after another, while no other handler runs, for at most a
        turn.

        A handler that does not wait costs no lane. Handled messages are reported when a handler
        waits, or at the end of the run: nothing else can check earlier.

        Returns:
            The next message of the last one's lane, which counts as running, and how many more
            messages may run in this turn.
        """
        lanes, left, until_s = self._lanes, RUN_MAX, next(self._readings) + RUN_S
        while left > 0 and (run := lanes.begin_run(min(left, self._run_size), worker)):
            worker.message = None
            waits = asyncio.get_running_loop().call_soon(self._interrupt, run)
            try:
                message, then = await self._handle_run(worker, run, until_s)
            finally:
                waits.cancel()
            if then is _Then.TURN:
                return None, 0
            left -= run.begun + 1
            if then is _Then.TAKE:
                return message, max(0, min(left, self._per_turn))
        return None, max(0, min(left, self._per_turn))

    async def _handle_run(
        self, worker: WorkerTask, run: Run, until_s: float
    ) -> tuple[Message | None, _Then]:
        """Handle the messages of a run, and return the next of the last one's lane, and the next
        step.
        """
        lanes, client, handler, awaited = self._lanes, run.client, self._handler, self._is_async
        then = _Then.RUN
        assert worker.task is not None
        cancelling = worker.task.cancelling
        for message, now_s in zip(run.left, self._readings):  # noqa: B905 - readings have no end
            if now_s >= client.deadline_s or now_s >= until_s:
                then = _Then.TAKE if now_s >= client.deadline_s else _Then.TURN
                break
            try:
                result = await handler(message) if awaited else handler(message)
                if result is not None:
                    await await_result(result)
                if cancelling() or worker.timed_out is message:
                    await self._settle(worker)
            except BaseException as error:  # noqa: BLE001 - decided there
                then = _Then.RUN if lanes.run is run else _Then.TAKE
                lanes.note_alone()
                if await self._failed(worker, message, error):
                    return None, then
                return lanes.finish(message.key), _Then.TAKE
            if lanes.run is not run:  # it waited
                client.done(message.offset)
                worker.take_back_cancel()
                self._run_size = RUN_MIN
                return lanes.finish(message.key), _Then.TAKE
        handled = run.begun - (then is not _Then.RUN)
        lanes.end_run(run, handled)
        if handled:
            client.done_all(run.messages[:handled])
        self._run_size = min(2 * self._run_size, RUN_MAX)
        return None, then

    def _interrupt(self, run: Run) -> None:
        """End a run with the message whose handler waits: others may run beside it."""
        lanes = self._lanes
        if lanes.run is run:
            lanes.note_alone()
        if lanes.has_waiting:
            self._work.wake_all()

    async def _try_again(self, worker: WorkerTask, message: Message) -> Message | None:
        """Run the next try of a failed message, and return the next message of its lane, if this
        one is over.
        """
        client: PullClient = message.delivery  # type: ignore[assignment]
        began_ns = self._boot_ns()
        try:
            if began_ns >= client.deadline_ns:
                self._give_up(message)
            else:
                self._retries.begin(message, began_ns)
                worker.message = message
                try:
                    result = self._handler(message)
                    if result is not None:
                        await await_result(result)
                    assert worker.task is not None
                    if worker.task.cancelling() or worker.timed_out is message:
                        await self._settle(worker)
                except BaseException as error:  # noqa: BLE001 - decided there
                    if await self._failed(worker, message, error):
                        return None
                else:
                    client.done(message.offset)
                    self._log_line(self._handler_log.handled(message, self._now_ms()))
                    if self._acks_each and not await self._answered(worker, message):
                        self._free_later(message)
                        return None
        finally:
            self._retries.end(message, self._boot_ns())
            self._start_due()
        return self._lanes.finish(message.key)

    def _free_later(self, message: Message) -> None:
        """Keep the key of a message whose ack was refused until the ack is durable; other keys,
        which may make room, continue.
        """
        self._lanes.hold_for_ack(message)
        task = start_task(self._free_once_acked(message), name="ack")
        self._acking.add(task)
        task.add_done_callback(self._acking.discard)

    async def _free_once_acked(self, message: Message) -> None:
        await message.delivery.acked(message.offset)  # type: ignore[union-attr]
        self._lanes.release(message)
        self._work.wake_all()

    async def _failed(self, worker: WorkerTask, message: Message, error: BaseException) -> bool:
        """
        Act on the error of a handler, and return True if its message now waits for another try,
        False if it was given up.

        Raises:
            BaseException: `error`, if it ends the worker, or the consumer.
        """
        closes = closes_coroutines(error)
        timed_out = self._cancels and worker.timed_out is message and not closes
        if timed_out and isinstance(error, Exception | asyncio.CancelledError):
            if self._is_ending:
                raise error
            if not isinstance(error, HandlerTimeoutError):
                error = self._timeout_error(error)
        if isinstance(error, asyncio.CancelledError):
            if self._is_ending:
                raise error
            if worker.cancelled_message is message:
                worker.take_back_cancel()
                self._give_up(message)
                return False
        assert worker.task is not None
        if (timed_out or worker.task.cancelling()) and not closes:
            with contextlib.suppress(asyncio.CancelledError, HandlerTimeoutError):
                await self._settle(worker)
            if self._is_ending:
                raise error
        worker.timed_out = None
        if closes or not isinstance(error, Exception | asyncio.CancelledError):
            raise error  # the worker's outermost coroutine decides
        return self._tried_again_later(message, error)

    def _tried_again_later(self, message: Message, error: BaseException) -> bool:
        """Return True if `message`, which failed with `error`, now waits for another try, False if
        it was given up.
        """
        now_ns = self._boot_ns()
        client: PullClient = message.delivery  # type: ignore[assignment]
        if now_ns >= client.deadline_ns:
            if (
                now_ns < client_of(message).deadline_ns
            ):  # it may be handed out elsewhere, and counts there
                client.note_failed(message, self._failing.failure(error, message.attempt))
            self._give_up(message)
            return False
        if self._is_last(message, error):
            return self._set_aside(message, error)
        self._wait_for_try(message, error, now_ns)
        return True

    def _wait_for_try(self, message: Message, error: BaseException, now_ns: int) -> None:
        """Let a message that failed with `error` be tried again."""
        client: PullClient = message.delivery  # type: ignore[assignment]
        error = only_retry(error) or error
        failure = self._failing.failure(error, message.attempt)
        client.note_failed(message, failure)
        wait_ms = self._backoff.wait_ms(message.attempt, self._rng)
        reason = None
        if isinstance(error, Retry):
            reason = error.reason
            if error.wait_ms is not None:
                wait_ms = self._failing.asked_ms(error.wait_ms, message.attempt)
        line = self._handler_log.failed(
            *(message, type(error).__qualname__, now_ns // 1_000_000, wait_ms),
            text=failure.text,
            asked_for=reason,
            sealed=client_of(message).sealed,
        )
        self._log_line(line, error)
        due_ns = now_ns + wait_ms * 1_000_000
        self._retries.wait(message, due_ns)
        self._count_retrying(message, 1)
        self._wake_at(due_ns, now_ns)

    def _failed_message(self, message: Message) -> Message | None:
        """Return the message that alone has failed; None if it is one of several."""
        return message

    def _is_last(self, message: Message, error: BaseException) -> bool:
        """Return True if `message`, whose try failed with `error`, is not tried again."""
        failed = self._failed_message(message)
        return failed is not None and self._failing.is_last(failed, error)

    def _set_aside(self, message: Message, error: BaseException) -> bool:
        """Park a message that failed too often, or bury it, and return True if no message of its
        lane may run now.
        """
        failed = self._failed_message(message)
        assert failed is not None
        client: PullClient = failed.delivery  # type: ignore[assignment]
        failure = self._failing.failure(only_retry(error) or error, failed.attempt)
        parks = self._ordered and self._failing.parks(failed)
        asked = only_retry(error) or error
        asked_ms = asked.wait_ms if isinstance(asked, Retry) else None
        pause_ms = self._failing.pause_ms(failed, asked_ms)
        line = self._handler_log.set_aside(
            *(failed, failure.kind, self._now_ms()),
            with_key=parks,
            pause_ms=pause_ms,
            asked_for=isinstance(asked, Retry),
        )
        self._log_line(line, error)
        if pause_ms is not None:
            client.retry(failed, failure, pause_ms)
            return False
        if not parks:
            client.bury(failed, failure)
            return False
        waiting = self._lanes.collect(message, lambda other: are_parked_together(failed, other))
        client.park(failed, failure, waiting)
        if self._lanes.has_waiting:
            self._work.wake_all()
        return True

    def _count_retrying(self, message: Message, sign: int) -> None:
        """Note that a message begins (1) or ends (-1) to wait for its next try."""
        client_of(message).add_retrying(sign)

    def _give_up(self, message: Message) -> None:
        message.delivery.forget(1)  # type: ignore[union-attr]
        self._log_line(self._handler_log.given_up(message, self._now_ms()))

    # ── tries that are due ────────────────────────────────────────────────────────────────────────
    def _start_due(self) -> bool:
        """Put messages whose next try may run now into the lanes, and return True if there
        are any.
        """
        if not self._retries:
            return False
        now_ns = self._boot_ns()
        others_wait = self._lanes.has_waiting
        due = self._retries.take(now_ns, others_wait=others_wait)
        for message in due:
            message.attempt += 1
            self._count_retrying(message, -1)
        if due:
            self._watch_timeouts()
            self._lanes.put_first(due)
            self._work.wake_all()
        next_ns = self._retries.next_ns(now_ns, others_wait=others_wait)
        if next_ns is not None:
            self._wake_at(next_ns, now_ns)
        return bool(due)

    def _wake_at(self, due_ns: int, now_ns: int) -> None:
        """Let the timer start due tries at `due_ns` or earlier."""
        if self._closed or (self._timer is not None and self._timer_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = max(due_ns, now_ns + TIMER_MIN_NS)
        wait_s = (self._timer_ns - now_ns) / 1e9
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._start_due()

    # ── handlers that take too long ───────────────────────────────────────────────────────────────
    def _watch_timeouts(self) -> None:
        """Check for handlers that take too long, as long as there is anything to handle."""
        if self._timeout_ms and self._timeouts is None and not self._closed:
            look_s = min(TIMEOUT_LOOK_S, self._timeout_ms / 1000 / TIMEOUT_LOOKS)
            self._timeouts = asyncio.get_running_loop().call_later(look_s, self._look_for_timeouts)

    def _look_for_timeouts(self) -> None:
        self._timeouts = None
        self._lanes.note_alone()
        now_ms = self._now_ms()
        for worker in self._workers:
            if worker.has_run_ms(now_ms) >= self._timeout_ms and worker.timed_out is None:
                self._time_out(worker)
        if self._retries or self._lanes.has_waiting or any(each.message for each in self._workers):
            self._watch_timeouts()

    def _time_out(self, worker: WorkerTask) -> None:
        """Cancel a handler that takes too long; a handler that a hand-over has already cancelled,
        or in a thread, is not cancelled.
        """
        message = worker.message
        assert message is not None
        if worker.cancelled_message is not None:
            return
        if self._cancels:
            worker.cancel_handler()
        else:
            failure = self._failing.failure(self._timeout_error(), message.attempt)
            message.delivery.note_failed(message, failure)  # type: ignore[union-attr]
            log.warning(
                "%s has been in a thread for %d ms, which is its handler_timeout_ms; a thread "
                "cannot be cancelled, so its "
                "key and its thread wait until the handler returns",
                message_name(message),
                self._timeout_ms,
            )
        worker.timed_out = message

    def _timeout_error(self, cause: BaseException | None = None) -> HandlerTimeoutError:
        error = HandlerTimeoutError(
            f"the handler did not return within {self._timeout_ms} ms", timeout_ms=self._timeout_ms
        )
        error.__cause__ = None if isinstance(cause, asyncio.CancelledError) else cause
        return error

    def timed_out(self, task: asyncio.Task[Any] | None) -> HandlerTimeoutError | None:
        """Return, once, the error of the handler in `task`, which has ended, if it was cancelled
        because it took too long.
        """
        for worker in self._workers:
            late = worker.message is not None and worker.timed_out is worker.message
            if worker.task is task and late and self._cancels and not self._is_ending:
                worker.timed_out = None
                return self._timeout_error()
        return None

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    def look(self) -> None:
        """Log and report handlers that run for long, and log the summary of failing messages. Call
        it about every second.
        """
        now_ms = self._now_ms()
        self._lanes.note_alone()
        for worker in self._workers:
            if worker.message is not None or worker.seen is not None:
                self._log_line(look_at(worker, self._handler_log, self._failing, now_ms))
        self._log_line(self._handler_log.summary(now_ms))

    def _now_ms(self) -> int:
        return self._boot_ns() // 1_000_000

    @staticmethod
    def _log_line(line: LogLine | None, error: BaseException | None = None) -> None:
        if line is not None:
            log.warning("%s", line.text, exc_info=error if line.traceback else None)

    def ends(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is that of a worker that must itself end, not only its handler."""
        return self._is_ending and self.runs(task)

    def runs(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` is that of a worker, in which its handler runs."""
        return any(worker.task is task for worker in self._workers)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def quiesce(self, client: PullClient) -> None:
        """
        Forget the waiting messages of `client`'s partition, and wait for its running handlers to
        end.

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
        failed = self._retries.drop(client.is_of)
        self._retries.resume(client.partition_id)
        client.add_retrying(-len(failed))
        waiting = self._lanes.drop(client.partition_id, client.is_of)
        for message in failed:
            self._lanes.release(message)
            self._log_line(self._handler_log.given_up(message, now_ms))
        for message in waiting:
            if message.attempt != 1:
                self._retries.end(message, self._boot_ns())
                self._log_line(self._handler_log.given_up(message, now_ms))
        client.forget(len(failed) + len(waiting) + self._lanes.drop_batches(client))
        if self._lanes.has_waiting:
            self._work.wake_all()
        self._start_due()

    async def _cancel(self, client: PullClient, *, warn_ms: int) -> None:
        """
        Cancel the running handlers of `client`, and wait for them to end, however long that takes.

        The next owner may begin only then: a handler that still runs would be out of order.
        """
        late = [job for job in self._workers if job.message and client_of(job.message) is client]
        for worker in late:
            worker.cancel_handler()
        try:
            async with asyncio.timeout(warn_ms / 1000):
                await client.wait_handled()
        except TimeoutError:
            for message in (worker.message for worker in late if worker.message):
                log.warning(
                    "handler of %s was cancelled %d ms ago and still runs; the "
                    "hand-over waits for it",
                    message_name(message),
                    warn_ms,
                )
            await client.wait_handled()
        for worker in late:
            worker.take_back_cancel()

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._log_line(self._handler_log.summary(self._now_ms(), last=True))
        for timer in (self._timer, self._timeouts):
            if timer is not None:
                timer.cancel()
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        ending: list[asyncio.Task[Any]] = [*tasks, *self._acking, self._sentinel]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
