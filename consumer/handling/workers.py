"""Runs handlers: so many worker tasks, each taking the next message that may run.

A handler runs inside its worker task, so one that never waits costs no task and no turn of the event loop.

Invariants
    The lease's deadline is looked at before every try; a handler never starts after it.
    A message is done only when its handler returned, and what it returned was awaited.
    A message that failed waits for its next try in no worker.  Its key waits with it; all other keys go on.
    A worker ends only with its consumer, whatever a handler raises.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.errors import WorkerCancelledError
from ...protocol.message import Message
from ..pulling.pull_client import PullClient
from .handlers import Handler, is_async, settle
from .lanes import Lanes
from .log_throttle import LogThrottle, Telling, name_of
from .retries import Retries

log = logging.getLogger("keylane.consumer")

PATIENCE_MS = 5_000
"""A cancelled handler that takes longer than this to end, and than it had before, is worth a word."""
MESSAGES_PER_TURN = 256
"""After so many the worker lets the event loop turn: heartbeats and pulls must go on."""
CANCELLED_WAIT_S = 1.0
"""A program that ends cancels all its tasks; a worker that was cancelled and is in no ending program was lost."""
TIMER_MIN_NS = 1_000_000
_IGNORED = "coroutine ignored GeneratorExit"
"""Python's words for a coroutine that was closed and waited for something all the same."""


class _Worker:
    __slots__ = ("cancelled", "message", "seen", "seen_attempt", "seen_ms", "task")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.cancelled: Message | None = None
        """The last one whose handler was cancelled here; None once that is over."""
        self.task: asyncio.Task[None] | None = None
        self.seen: Message | None = None
        """What its handler was at when it was last looked at, in which attempt, and since when."""
        self.seen_attempt = 0
        self.seen_ms = 0

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
        rng: random.Random,
        on_crash: Callable[[BaseException], None],
        ordered: bool = True,
    ) -> None:
        self._lanes = Lanes(ordered=ordered)
        self._handler = handler
        self._is_async = is_async(handler)
        self._handover_ms = handover_ms
        self._backoff = backoff
        self._boot_ns = clock.boot_ns
        self._rng = rng
        self._on_crash = on_crash
        self._log_throttle = LogThrottle()
        self._retries = Retries(concurrency)
        self._timer: asyncio.TimerHandle | None = None
        """Looks for messages whose next try is due."""
        self._timer_ns = 0
        self._closed = False
        self._work = asyncio.Event()
        self._workers = [_Worker() for _ in range(concurrency)]
        for index, worker in enumerate(self._workers):
            worker.task = asyncio.create_task(self._run(worker), name=f"handler {index}")

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        self._lanes.put(messages)
        self._work.set()

    async def _run(self, worker: _Worker) -> None:
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
                # Perhaps the whole program ends, and the event loop with it.  If not, somebody has to hear of it.
                self._forget_running(worker)
                loop = asyncio.get_running_loop()
                loop.call_later(CANCELLED_WAIT_S, self._on_cancelled)
            raise
        except BaseException as error:
            self._forget_running(worker)
            self._on_crash(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # those two would end the event loop before anything is handed over

    def _closed_with_its_task(self, worker: _Worker, error: BaseException) -> Message | None:
        """
        Go on after a task that a handler awaited ended with a GeneratorExit.

        The event loop then closes all coroutines that await it, up to the worker's outermost one, which may go on.

        Returns:
            What runs now of the message's lane, if the message is over.

        Raises:
            BaseException: `error`, if it is another one, or the worker's own coroutine is being closed.
        """
        message = worker.message
        ends = self._closed or message is None or _current_task() is not worker.task
        if ends or not _closes_coroutines(error):
            raise error
        assert message is not None
        if self._tried_again_later(message, error):
            return None
        return self._lanes.finish(message.key)

    @staticmethod
    def _forget_running(worker: _Worker) -> None:
        """No hand-over waits for a message whose worker ended."""
        if worker.message is not None:
            worker.message.delivery.forget(1)  # type: ignore[union-attr]
            worker.message = None

    def _on_cancelled(self) -> None:
        if not self._closed:
            self._on_crash(WorkerCancelledError())

    async def _take_turns(self, worker: _Worker, message: Message | None) -> None:
        # One loop without calls of our own in between: this is where a consumer's time goes.
        take, finish = self._lanes.take, self._lanes.finish
        boot_ns, handler, awaited = self._boot_ns, self._handler, self._is_async
        while True:
            for _ in range(MESSAGES_PER_TURN):
                if message is None:
                    message = take()
                    if message is None:
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
                            await settle(result)
                    except BaseException as error:  # noqa: BLE001 - looked at there
                        if self._failed(worker, message, error):
                            message = None
                            continue
                    else:
                        client.done(message.offset)
                else:
                    client.forget(1)
                message = finish(message.key)
            worker.message = None
            self._forget_cancel(worker)
            if message is None and not self._lanes.arrived and not self._start_due():
                self._work.clear()
                await self._work.wait()
            else:
                await asyncio.sleep(0)

    async def _try_again(self, worker: _Worker, message: Message) -> Message | None:
        """The next try of a message that failed; returns what runs now of its lane, if the message is over."""
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
                        await settle(result)
                except BaseException as error:  # noqa: BLE001 - looked at there
                    if self._failed(worker, message, error):
                        return None
                else:
                    client.done(message.offset)
                    self._tell(self._log_throttle.handled(message, self._now_ms()))
        finally:
            self._retries.end(message, self._boot_ns())
            self._start_due()
        return self._lanes.finish(message.key)

    def _failed(self, worker: _Worker, message: Message, error: BaseException) -> bool:
        """
        A handler raised `error`: True if its message now waits for another try, False if it was given up.

        Raises:
            BaseException: `error`, if it ends the worker, or the consumer.
        """
        if isinstance(error, asyncio.CancelledError) and worker.is_to_end(message):
            assert worker.task is not None
            if worker.cancelled is not message or worker.task.cancelling() > 1:
                raise error
            self._forget_cancel(worker)
            self._give_up(message)
            return False
        if _closes_coroutines(error) or not isinstance(error, Exception | asyncio.CancelledError):
            raise error  # what a worker goes on after, its outermost coroutine looks at
        return self._tried_again_later(message, error)

    def _tried_again_later(self, message: Message, error: BaseException) -> bool:
        """True if `message`, which failed with `error`, now waits for another try, False if it was given up."""
        now_ns = self._boot_ns()
        client: PullClient = message.delivery  # type: ignore[assignment]
        if now_ns >= client.deadline_ns:
            self._give_up(message)
            return False
        wait_ms = self._backoff.wait_ms(message.attempt, self._rng)
        kind = type(error).__qualname__
        telling = self._log_throttle.failed(message, kind, now_ns // 1_000_000, wait_ms)
        self._tell(telling, error)
        due_ns = now_ns + wait_ms * 1_000_000
        self._retries.wait(message, due_ns)
        _client_of(message).add_retrying(1)
        self._wake_at(due_ns, now_ns)
        return True

    def _give_up(self, message: Message) -> None:
        message.delivery.forget(1)  # type: ignore[union-attr]
        self._tell(self._log_throttle.given_up(message, self._now_ms()))

    # ── tries that are due ───────────────────────────────────────────────────────────────────────────
    def _start_due(self) -> bool:
        """Have workers take what may be tried again now; True if there is something."""
        if not self._retries:
            return False
        now_ns = self._boot_ns()
        others_wait = bool(self._lanes.arrived)
        due = self._retries.take(now_ns, others_wait=others_wait)
        for message in due:
            message.attempt += 1
            _client_of(message).add_retrying(-1)
        if due:
            self._lanes.put_first(due)
            self._work.set()
        next_ns = self._retries.next_ns(now_ns, others_wait=others_wait)
        if next_ns is not None:
            self._wake_at(next_ns, now_ns)
        return bool(due)

    def _wake_at(self, due_ns: int, now_ns: int) -> None:
        """Look at `due_ns` at the latest for what is due."""
        if self._closed or (self._timer is not None and self._timer_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = max(due_ns, now_ns + TIMER_MIN_NS)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later((self._timer_ns - now_ns) / 1e9, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._start_due()

    # ── telling ──────────────────────────────────────────────────────────────────────────────────────
    def look(self) -> None:
        """Call it every second or so: tells of handlers that run for long, and of messages not told apart."""
        now_ms = self._now_ms()
        for worker in self._workers:
            message, seen = worker.message, worker.seen
            if message is not None and message is seen and message.attempt == worker.seen_attempt:
                self._tell(self._log_throttle.running(message, worker.seen_ms, now_ms))
                continue
            if seen is not None:
                self._tell(self._log_throttle.stopped(seen, now_ms))
            worker.seen, worker.seen_ms = message, now_ms
            worker.seen_attempt = 0 if message is None else message.attempt
        self._tell(self._log_throttle.sum(now_ms))

    def _now_ms(self) -> int:
        return self._boot_ns() // 1_000_000

    @staticmethod
    def _tell(telling: Telling | None, error: BaseException | None = None) -> None:
        if telling is not None:
            log.warning("%s", telling.text, exc_info=error if telling.traceback else None)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────
    @staticmethod
    def _forget_cancel(worker: _Worker) -> None:
        """The cancellation of a handler ends with it, whether it was taken or swallowed."""
        if worker.cancelled is not None:
            worker.cancelled = None
            assert worker.task is not None
            while worker.task.uncancel():
                pass

    async def quiesce(self, client: PullClient) -> None:
        """
        Forget what waits of `client`'s partition, for a try or for its next one; let its running handlers end or be
        cancelled: after `handover_ms`, or as soon as the lease ends.
        """
        timeout_ms = min(self._handover_ms, client.left_ms)
        self._drop(client)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await client.settled()
        except TimeoutError:
            await self._cancel(client, patience_ms=max(timeout_ms, PATIENCE_MS))

    def _drop(self, client: PullClient) -> None:
        """Forget what waits of `client`'s partition."""
        now_ms = self._now_ms()
        failed = self._retries.drop(client.partition_id)
        client.add_retrying(-len(failed))
        waiting = self._lanes.drop(client.partition_id)
        for message in failed:
            self._lanes.release(message)
            self._tell(self._log_throttle.given_up(message, now_ms))
        for message in waiting:
            if message.attempt != 1:
                self._retries.end(message, self._boot_ns())
                self._tell(self._log_throttle.given_up(message, now_ms))
        client.forget(len(failed) + len(waiting))
        if self._lanes.arrived:
            self._work.set()
        self._start_due()

    async def _cancel(self, client: PullClient, *, patience_ms: int) -> None:
        """
        Cancel the running handlers of `client`, and wait for them to end, however long that takes.

        Only then may somebody else go on: as long as one runs, what it does would be out of order.
        """
        late = [one for one in self._workers if one.message and _client_of(one.message) is client]
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
                    "handler of %s was cancelled %d ms ago and goes on; "
                    "the partition is not handed over before it ends",
                    name_of(message), patience_ms,
                )  # fmt: skip
            await client.settled()
        for worker in late:
            self._forget_cancel(worker)

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        self._tell(self._log_throttle.sum(self._now_ms(), last=True))
        if self._timer is not None:
            self._timer.cancel()
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for worker in self._workers:
            worker.cancelled = None  # this one is for the worker, not for its handler
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _client_of(message: Message) -> PullClient:
    """The pull client that `message` came from."""
    client: PullClient = message.delivery.client  # type: ignore[union-attr]
    return client


def _closes_coroutines(error: BaseException) -> bool:
    """True for what ends a coroutine that is closed: it may not wait for anything any more, nor may its callers."""
    ignored = isinstance(error, RuntimeError) and error.args == (_IGNORED,)
    return ignored or isinstance(error, GeneratorExit)


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
