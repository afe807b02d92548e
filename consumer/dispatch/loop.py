"""
Hands messages to a program that takes and acks them itself: `async for` and `getmany`.

    a partition offers ─▶ the program asks ─┬─ a run: acked one after another, or as a whole
                                            ╰─ in hand one by one ─▶ acked, or given back

While each message is acked before the next one is taken, `async for` takes from a run, and its
session learns of what is handled when the run ends: at the latest in the next iteration of the
event loop. What `getmany` returns is a run of each partition until it is acked as a whole; anything
else spreads it, so that its messages are in hand one by one.

The hand-over of a partition waits until the messages taken from it are acked: for up to
`handover_ms` in any case, and then for as long as the loop body runs, because it may still be
working on them. Messages skipped without an ack by then are redelivered. When the consumer closes,
unacked messages are redelivered at once.

Invariants
    A message is handed out only when all earlier ones of its key are acked, or together with them
    (`getmany`). While a task that took messages is running and any of them is unacked, no other
    task gets a message: it might be the next one of the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, TypeVar

from ...protocol.clock import Clock, boot_seconds
from ...protocol.errors import (
    ConfigError,
    CorruptBatchError,
    FilterError,
    InvalidRequestError,
    LeaseLostError,
    OverloadedError,
    Reason,
    UsageError,
)
from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted, format_seconds
from ...rpc.loop_binding import LoopBinding
from ...rpc.operating.client_counts import HANDLING_BOUNDS_S
from ...rpc.operating.histogram import Histogram
from ...rpc.race import Race
from ...rpc.tracing import current_tracing
from ..filter import MessageFilter
from ..handed_out import check_handed_out, shell_of
from ..log_names import consumer_name, message_name
from ..session.events import (
    AckedLate,
    ColumnsReturned,
    MessageExpired,
    MessageFailed,
    MessageHangs,
    MessagesHandled,
    MessagesLeft,
    MessagesReturned,
    RunEnded,
    RunSpread,
    WorkWanted,
)
from ..settings import AckMode
from .arrow import ArrowBatch, take_arrow
from .failures import FailedAttempts, FailureRecords, log_line
from .handler_log import HandlerLog
from .handlers import is_signal, parse_wait_ms

log = logging.getLogger("keylane.consumer")
Taken = TypeVar("Taken")
MESSAGES_PER_TURN = 256
HANDOVER_WARN_MS = 5_000
"""How long after `handover_ms` the loop body may delay a hand-over before a warning is logged, in
milliseconds.
"""
ACK_STALL_S = 30.0
"""How often, in seconds, a wait for a refused ack checks whether the program still takes messages.
It gives up if the same message is ready at two checks.
"""
RUN_MIN = 16
"""The number of messages in the first run of an iteration, and in the next one after its body has
waited.
"""
RUN_MAX = 256
SINGLES = 8
"""How many messages are taken one by one after a run that the loop body has interrupted."""
NOT_ITERATED_MS = 10_000
"""How long messages may wait for a consumer without a handler that was never iterated before a
warning is logged, in milliseconds.
"""
NOT_ITERATED_REPEAT_MS = 600_000
NOT_ACKED_MS = 10_000
"""How long the user may wait for messages that are blocked by unacked ones before a warning is
logged, in milliseconds.
"""
GIVEN_BACK_MAX = 100_000
"""The number of messages given back and not handed out again, of each partition, for which a late
ack is refused; the ack of an older one does nothing.
"""


class TakingTask:
    """
    Which task of the program takes messages, by which method, and whether it still may.

    Args:
        check: raises an error if called in a different event loop from the consumer's.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.thread = get_ident()
        """The thread of the consumer's event loop."""
        self.method = ""
        """The name of the method by which messages are taken, for error messages and logs."""
        self.task: asyncio.Task[Any] | None = None
        """The task that takes messages: the last one that requested any."""
        self.requesting = asyncio.Event()
        """Set while the user waits for a message; otherwise the loop body is running with the
        messages it took.
        """
        self.count = 1
        """How many messages the program has asked for last."""
        self.turn_remaining = MESSAGES_PER_TURN
        """How many messages an iteration takes before it yields to the event loop."""
        self.error: BaseException | None = None
        self.is_closed = False

    def check_open(self) -> None:
        """Raise what has ended the consumer, or StopAsyncIteration if it is closed."""
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise StopAsyncIteration

    def check_method(self, method: str) -> None:
        """Raise UsageError if another method takes the messages."""
        if self.method and self.method != method:
            self.check_open()
            raise UsageError(
                Reason.MIXED_USE,
                f"{method} on a consumer whose messages are already taken by {self.method}",
            )

    def claim(self, method: str, count: int) -> None:
        """Let the present task request so many messages. Raises UsageError if it is in another
        event loop, or another task waits.
        """
        self.check()
        if self.requesting.is_set():
            raise UsageError(Reason.OTHER_TASK, "another task waits for messages of this consumer")
        self.check_method(method)
        self.method = method
        self.count = count
        self.requesting.set()

    def claim_iteration(
        self, task: asyncio.Task[Any] | None, count_unacked: Callable[[], int]
    ) -> None:
        """
        Make `task` the iterating task, in place of the previous one.

        A task that only runs `next`, such as `asyncio.wait_for` creates on Python 3.11, takes a
        message on behalf of the task that awaits it, which stays the iterating task.

        Raises:
            UsageError: the consumer was opened in another event loop; or another task waits for a
                message, or is still running and has not acked a message that it took.
        """
        self.check()
        if self.requesting.is_set():
            raise UsageError(
                Reason.OTHER_TASK, "another task waits for the next message of this consumer"
            )
        if self.task is not None and not self.task.done():
            if task is not None and getattr(task.get_coro(), "cr_code", None) in NEXT_CODES:
                return
            if unacked := count_unacked():
                raise UsageError(
                    Reason.OTHER_TASK,
                    f"another task iterates over this consumer: it took "
                    f"{counted(unacked, 'message')} that it has not acked",
                    unacked=unacked,
                )
        self.task = task


class OfferedMessages:
    """What the partitions of a consumer have for its program."""

    def __init__(self) -> None:
        self.offers: dict[Any, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self.given: deque[tuple[Any, Message]] = deque()
        """Messages that were handed out although nobody had asked."""
        self.shells: dict[Any, None] = {}
        """The partitions that have offered something, until they are handed over."""
        self.arrived = asyncio.Event()
        """Set when there is something new, or the program is to look for another reason."""

    def __bool__(self) -> bool:
        return bool(self.given or self.offers)

    def give(self, shell: Any, messages: list[Message]) -> None:
        """Accept messages that nobody has asked for."""
        self.shells[shell] = None
        self.given.extend([(shell, message) for message in messages])
        self.arrived.set()

    def offer(self, shell: Any) -> None:
        """Note that a program that asks this partition may get something."""
        if shell not in self.offers:
            self.offers[shell] = self.shells[shell] = None
            self.arrived.set()

    def take_offer(self) -> Any:
        """Return the partition whose turn it is. It offers again if it has more."""
        shell = next(iter(self.offers))
        del self.offers[shell]
        return shell

    def take_given(self, shell: Any) -> list[Message]:
        """Return what a partition has handed out and the program does not have."""
        given = [message for each, message in self.given if each is shell]
        if given:
            self.given = deque(pair for pair in self.given if pair[0] is not shell)
        return given

    def clear(self) -> None:
        """Forget all partitions."""
        self.given.clear()
        self.offers.clear()
        self.shells.clear()


class IterationRun:
    """A run from which `async for` takes: its first `done` messages are acked."""

    __slots__ = ("done", "messages", "shell", "unacked")

    def __init__(self, shell: Any, messages: list[Message]) -> None:
        self.shell = shell
        self.messages = messages
        self.done = 0
        self.unacked: Message | None = messages[0]
        """What the loop body has."""


class RunsInHand:
    """The runs of which the program acks one message after another, or all at once: their sessions
    do not know yet which ones are handled.
    """

    def __init__(self) -> None:
        self.iterated: IterationRun | None = None
        """The run of an iteration."""
        self.many: list[tuple[Any, list[Message]]] = []
        """The runs that `getmany` has returned."""
        self.many_taken: list[Message] = []
        """All messages of these runs, in the order in which they were returned; [] if others were
        returned with them.
        """
        self._size = RUN_MIN
        self._singles = 0
        """How many messages are taken one by one before the next run."""

    @property
    def next_size(self) -> int:
        """The number of messages in the next run of an iteration; 0: it takes one by one."""
        return 0 if self._singles else self._size

    def iterate(self, shell: Any, messages: list[Message]) -> None:
        """Begin a run of an iteration. It ends when the loop body waits."""
        self._singles = 0
        run = self.iterated = IterationRun(shell, messages)
        asyncio.get_running_loop().call_soon(self._interrupt, run)

    def note_single(self) -> None:
        """Note that an iteration has taken a message beside a run."""
        self._singles = max(0, self._singles - 1)

    def _interrupt(self, run: IterationRun) -> None:
        """The loop body waits: the run ends at its message."""
        if run is self.iterated:
            self._size = RUN_MIN
            if run.unacked is not None and not run.done:
                self._singles = SINGLES
            self.settle()

    def settle(self) -> None:
        """End the runs, so that sessions know what is handled and what is in hand."""
        run = self.iterated
        if run is not None:
            self.iterated = None
            if run.done == len(run.messages):
                self._size = min(2 * self._size, RUN_MAX)
            run.shell.feed(RunEnded(run.done, run.unacked is not None))
        if self.many:
            many, self.many, self.many_taken = self.many, [], []
            for shell, _ in many:
                shell.feed(RunSpread())

    def ack_many(self, messages: list[Message]) -> bool:
        """Ack all that `getmany` has returned last. Return False if these messages are others or
        none, or a lease has ended.
        """
        many = self.many
        if not messages or messages != self.many_taken:
            return False
        try:
            for shell, run in many:
                shell.check_can_ack(run[0].offset)
        except LeaseLostError:
            return False
        self.many, self.many_taken = [], []
        for shell, run in many:
            shell.feed(RunEnded(len(run)))
        return True


class LoopWatch:
    """
    Watches a program: how long it has had its messages, and whether it takes and acks any.

    Args:
        failures: logs and builds what is said of a message that hangs.
    """

    def __init__(self, failures: FailedAttempts) -> None:
        self._failures = failures
        self.current: Message | None = None
        """The last message given to the loop body, while the body is running."""
        self._seen: tuple[Message, int] | None = None
        """The value of `current` at the last check, and when it was first seen."""
        self._held_longest: dict[Any, tuple[Message, int, int]] = {}
        """The message of each partition that the program has had for longest at the last check, its
        attempt, and since when.
        """
        self._idle_since_ms: int | None = None
        """The boot time, in milliseconds, since which messages have been waiting while nobody
        iterates; None if none wait.
        """
        self._blocked_since_ms: int | None = None
        """The boot time, in milliseconds, since which the user has been waiting for messages that
        are blocked by unacked ones.
        """

    def list_running(self, now_ms: int) -> list[tuple[Message, int]]:
        """Return the message in the loop body, with the milliseconds for which it is known to have
        been there.
        """
        seen = self._seen
        if seen is None or seen[0] is not self.current:
            return []
        return [(seen[0], now_ms - seen[1])]

    def forget(self, shell: Any) -> None:
        """Forget a partition that was handed over."""
        self._held_longest.pop(shell, None)

    def clear(self) -> None:
        """Drop what refers to the consumer."""
        self._seen = None
        self._held_longest.clear()

    def check(self, waiting: OfferedMessages, taker: TakingTask, now_ms: int) -> None:
        """Log and report messages that the program has held for a long time, and warn about a
        program that takes no messages, or acks none.
        """
        self._report_held(waiting, now_ms)
        lines = self._failures.lines
        current, seen = self.current, self._seen
        if current is None or seen is None or seen[0] is not current:
            self._seen = None if current is None else (current, now_ms)
        else:
            log_line(lines.record_running(current, seen[1], now_ms))
        for line in lines.record_stopped([] if current is None else [current], now_ms):
            log_line(line)
        log_line(lines.build_summary(now_ms))
        if not taker.method and waiting.offers:
            self._warn_if_not_iterated(waiting, now_ms)
        if taker.requesting.is_set() and not waiting:
            self._warn_if_not_acked(waiting, taker.method, now_ms)
        else:
            self._blocked_since_ms = None

    def _report_held(self, waiting: OfferedMessages, now_ms: int) -> None:
        """Report the message of each partition that the program has had for longest."""
        previous, self._held_longest = self._held_longest, {}
        given = {id(message) for _, message in waiting.given}
        for shell in waiting.shells:
            in_hand = shell.state.lanes.in_hand.values()
            message = next((each for each in in_hand if id(each) not in given), None)
            if message is None:
                continue
            held = previous.get(shell)
            if held is None or held[0] is not message or held[1] != message.attempt:
                held = message, message.attempt, now_ms
            self._held_longest[shell] = held
            if now_ms - held[2] >= HANGS_MS:
                failure = self._failures.records.build_hang_failure(
                    "the program has not acked it", message.attempt
                )
                shell.feed(MessageHangs(message, failure, now_ms - held[2]))

    def _warn_if_not_iterated(self, waiting: OfferedMessages, now_ms: int) -> None:
        """Warn that messages are waiting for a consumer that was never iterated."""
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOT_ITERATED_MS:
            self._idle_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            first = next(iter(waiting.offers))
            count = sum(shell.state.intake.held for shell in waiting.shells)
            log.warning(
                "%s has no handler and is not iterated: %s, and no other consumer gets its "
                "partitions; pass handler=, or use: async for message in consumer",
                consumer_name(first.delivery.subject, first.delivery.group),
                counted(count, "message waits", "messages wait"),
            )

    def _warn_if_not_acked(self, waiting: OfferedMessages, method: str, now_ms: int) -> None:
        """Warn that the user is waiting in vain, in the method `method`, because unacked messages
        block others.
        """
        blocking, count = _find_blocking(waiting.shells)
        if blocking is None:
            self._blocked_since_ms = None
        elif self._blocked_since_ms is None:
            self._blocked_since_ms = now_ms
        elif now_ms - self._blocked_since_ms >= NOT_ACKED_MS:
            self._blocked_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s waits for acks: %s until earlier messages of their keys are acked or returned, "
                "such as %s; to get several messages of a key at once, use getmany()",
                method,
                counted(count, "message waits", "messages wait"),
                message_name(blocking),
            )


class LoopDispatch:
    """
    The messages of one consumer without a handler.

    Args:
        handover_ms: how long taken messages may still be acked when their partition is handed over,
            in milliseconds.
        check: raises an error if called in a different event loop from the consumer's.
        records: builds what is recorded of a failure.
        ordered: False: in a shared group no message waits for another one of its key.
        message_filter: rejected messages are acked on the user's behalf; None: no filter.
    """

    in_batches = False

    def __init__(
        self,
        *,
        clock: Clock,
        handover_ms: int,
        check: Callable[[], None],
        records: FailureRecords,
        ordered: bool = True,
        message_filter: MessageFilter | None = None,
    ) -> None:
        self._filter = message_filter
        self._tracing = current_tracing()
        self.on_idle: Callable[[], None] | None = None
        """Called when the program waits for messages."""
        self.by_column = False
        """True once the program takes Arrow batches."""
        self._handover_ms = handover_ms
        self._boot_ms = clock.boot_ms
        self._readings = boot_seconds(clock)
        self._loop = asyncio.get_running_loop()
        self._taker = TakingTask(check)
        self.waiting = OfferedMessages()
        self._runs = RunsInHand()
        lines = HandlerLog(runner="body of the loop", done="is left by the loop", ordered=ordered)
        self.failures = FailedAttempts(records, lines, boot_ms=clock.boot_ms)
        self._watch = LoopWatch(self.failures)
        self.handling = Histogram(HANDLING_BOUNDS_S)
        """Empty: the body of a loop is no call."""
        self._is_leaving = False
        self._due_back: dict[Any, None] = {}
        """Partitions whose messages go back once the next message is requested."""
        self._in_use: list[tuple[Any, Message]] = []
        """What the program of a shared group has got last, until it asks for more."""

    def pause(self) -> None:
        """End the runs: the session of a paused partition hands out nothing."""
        self._runs.settle()

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    def hand_out(self, shell: Any, messages: list[Message]) -> None:
        """Accept messages that nobody has asked for."""
        self.waiting.give(shell, messages)

    def offer(self, shell: Any) -> None:
        """Note that a program that asks this partition may get something."""
        self.waiting.offer(shell)

    def count_spare(self, shell: Any) -> int:
        """Return how many more messages the program would take now; if negative, how many wait for
        it.
        """
        requested = self._taker.count if self._taker.requesting.is_set() else 0
        waiting: int = sum(each.state.count_waiting for each in {shell: None} | self.waiting.shells)
        return requested - waiting

    def cancel(self, shell: Any) -> None:
        """Take messages back that are not acked, once the loop body has ended."""
        if self._taker.requesting.is_set() or self._is_leaving:
            self._loop.call_soon(self._give_up, shell)  # the shell is in a step of its session
        else:
            self._due_back[shell] = None

    def _give_up(self, shell: Any) -> None:
        """Take back what the program has of a partition that is handed over."""
        self._runs.settle()
        if shell.ended.is_set():
            return
        shell.program.has_given_up = True
        columns = shell.state.lanes.columns
        if columns is not None and columns.in_hand is not None:
            shell.feed(ColumnsReturned(columns.in_hand, is_try=False))
        in_hand = list(shell.state.lanes.in_hand.values())
        if in_hand:
            shell.feed(MessagesReturned(in_hand))

    def forget(self, shell: Any) -> None:
        """Note that a partition is being handed over: it offers nothing more."""
        self._runs.settle()
        self.waiting.offers.pop(shell, None)
        if given := self.waiting.take_given(shell):
            shell.feed(MessagesReturned(given))

    # ── the ways to take messages ─────────────────────────────────────────────────────────────────
    async def next(self) -> Message:
        """
        Return the next message whose lease has not ended.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: the consumer was opened in another event loop, another task iterates, or
                messages were taken by another method before.
        """
        message = self.take_unregistered()
        if message is not None:
            return message
        task, taker = current_task(self._loop), self._taker
        if task is not taker.task or taker.requesting.is_set():
            taker.claim_iteration(task, self._count_unacked)
        self._claim("iteration")
        try:
            while True:
                taker.turn_remaining -= 1
                if not taker.turn_remaining:
                    taker.turn_remaining = MESSAGES_PER_TURN
                    self._runs.settle()  # it is not the loop body that waits
                    await asyncio.sleep(0)
                taker.check_open()
                message = self._take_one()
                if message is not None:
                    self._watch.current = message
                    self._note_received([message])
                    return message
                await self._wait_for_work(None)
        finally:
            taker.requesting.clear()

    def take_unregistered(self) -> Message | None:
        """Return the next message of the run if the same task calls again and the last message is
        acked, or None if `next` must be used.
        """
        run, taker = self._runs.iterated, self._taker
        if run is None or run.unacked is not None or taker.is_closed:
            return None
        remaining = taker.turn_remaining - 1
        if not remaining or current_task(self._loop) is not taker.task:
            return None
        if run.done >= len(run.messages) or next(self._readings) >= run.shell.begin_until_s:
            return None
        taker.turn_remaining = remaining
        self._watch.current = run.unacked = message = run.messages[run.done]
        return message

    def _take_one(self) -> Message | None:
        """Take a message that may be handed out now, or return None if there is none."""
        runs, waiting = self._runs, self.waiting
        runs.settle()
        while waiting:
            if waiting.given:
                shell, message = waiting.given.popleft()
                if self._accepts_given(shell, message):
                    return message
                continue
            shell = waiting.take_offer()
            # A run is handed out at once, but each of its messages is received by itself.
            is_single = self._filter is not None or self._tracing is not None
            run_size = 0 if is_single else min(runs.next_size, self._taker.turn_remaining)
            messages = self._ask(shell, WorkWanted(1, 1, run_size))
            if not messages:
                continue
            first: Message = messages[0]
            runs.note_single()
            _note_handed_out(shell, messages)
            if messages is shell.state.lanes.run:
                runs.iterate(shell, messages)
                return first
            if self._accepts(shell, first):
                return first
        return None

    def _ask(self, shell: Any, wanted: WorkWanted) -> list[Message]:
        """Ask a partition for messages. Raises CorruptBatchError each time that the program comes
        to a batch that cannot be unpacked.
        """
        try:
            messages: list[Message] = shell.ask(wanted)
        except CorruptBatchError:
            self.waiting.offers[shell] = None
            raise
        return messages

    async def take_many(self, max_records: int, timeout_ms: int) -> list[Message[Any]]:
        """Return up to `max_records` messages, or an empty list if none arrived within
        `timeout_ms`. Raises the same errors as `next`.
        """
        until_ms = self._boot_ms() + timeout_ms
        take = partial(self._take_many, max_records)
        messages = await self._take_when_ready("getmany()", take, max_records, until_ms)
        self._watch.current = messages[0] if messages else None
        self._note_received(messages)
        return messages

    async def take_arrow(self) -> ArrowBatch:
        """Return the next batch as Arrow columns. Raises the same errors as `next`."""
        batch = await self._take_when_ready("batches()", self._take_arrow)
        assert batch is not None
        return batch

    async def _take_when_ready(
        self, method: str, take: Callable[[], Taken], count: int = 1, until_ms: int | None = None
    ) -> Taken:
        """Return what `take` returns once that is something, or at a time of the boot clock."""
        self._claim(method, count)
        self._taker.task = current_task(self._loop)
        try:
            while True:
                self._taker.check_open()
                # Heartbeats and pulls have a turn, and a cancellation loses nothing.
                await asyncio.sleep(0)
                self._taker.check_open()
                taken = take()
                if taken or (until_ms is not None and self._boot_ms() >= until_ms):
                    return taken
                await self._wait_for_work(until_ms)
        finally:
            self._taker.requesting.clear()

    def _take_many(self, count: int) -> list[Message]:
        self._runs.settle()
        waiting = self.waiting
        taken: list[Message] = []
        runs: list[tuple[Any, list[Message]]] = []
        is_whole = self._filter is None
        """True if all that is taken is in runs."""
        while waiting.given and len(taken) < count:
            shell, message = waiting.given.popleft()
            if self._accepts_given(shell, message):
                taken.append(message)
                is_whole = False
        run_count = count if is_whole else 0
        while waiting.offers and len(taken) < count:
            shell, left = waiting.take_offer(), count - len(taken)
            wanted = WorkWanted(left, left, min(left, run_count), together=True)
            try:
                messages = self._ask(shell, wanted)
            except CorruptBatchError:
                if taken:
                    break
                raise
            if not messages:
                continue
            _note_handed_out(shell, messages)
            if messages is shell.state.lanes.run:
                runs.append((shell, messages))
                waiting.offers.pop(shell, None)  # while the run lasts it has nothing else
                taken += messages
            else:
                is_whole = False
                taken += self._select(shell, messages)
        self._runs.many = runs
        self._runs.many_taken = taken if is_whole else []
        return taken.copy()

    def _take_arrow(self) -> ArrowBatch | None:
        while self.waiting.offers:
            if (batch := take_arrow(self.waiting.take_offer())) is not None:
                return batch
        return None

    def _accepts_given(self, shell: Any, message: Message) -> bool:
        if next(self._readings) >= shell.begin_until_s:
            shell.feed(MessagesReturned([message]))
            return False
        _note_handed_out(shell, [message])
        return self._accepts(shell, message)

    def _select(self, shell: Any, messages: list[Message]) -> list[Message]:
        """Return the accepted messages that are still in hand: when the filter fails for one, later
        ones of its key are taken back.
        """
        if self._filter is None:
            return messages
        accepted = [
            message
            for message in messages
            if _is_in_hand(shell, message) and self._accepts(shell, message)
        ]
        return [message for message in accepted if _is_in_hand(shell, message)]

    def _accepts(self, shell: Any, message: Message) -> bool:
        """Return True if the filter accepts the message. Otherwise ack the message, or give it back
        if the filter failed.
        """
        if self._filter is None:
            return True
        try:
            if self._filter.matches(message):
                return True
        except FilterError as error:
            failure = self.failures.records.build_failure(error, message.attempt)
            event = MessageFailed(message, failure, holds_key=True)
            self._fail(shell, event, suffix=f": {error.message}")
            return False
        self._handle(shell, [message])
        return False

    def claim_columns(self) -> None:
        """Let sessions that are opened from now on hand out columns; raises as `next` does."""
        self._taker.check()
        self._taker.check_open()
        self._taker.check_method("batches()")
        if self._filter is not None:
            raise ConfigError(
                "batches() contain every row: filter their columns, or take messages instead of "
                "batches"
            )
        self.by_column = True
        self.waiting.clear()  # other sessions take the place of these

    def _claim(self, method: str, count: int = 1) -> None:
        """Let the present task request messages: it is done with what it has."""
        self._taker.claim(method, count)
        self._watch.current = None
        if self._in_use:
            self._leave_used()
        for shell in list(self._due_back):
            del self._due_back[shell]
            self._give_up(shell)

    async def _wait_for_work(self, until_ms: int | None) -> None:
        """Wait until a message may be there, or until a time of the boot clock."""
        self.waiting.arrived.clear()
        if self.waiting.given or self.waiting.offers:
            return
        if self.on_idle is not None:
            self.on_idle()
        remaining_s = None if until_ms is None else max(0, until_ms - self._boot_ms()) / 1000
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining_s):
                await self.waiting.arrived.wait()

    def has_messages(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if `task` has taken messages and not acked all of them."""
        return task is self._taker.task and self._count_unacked() > 0

    def _count_unacked(self) -> int:
        """Return the number of messages handed to the user and not yet acked."""
        self._runs.settle()
        waiting = self.waiting
        in_hand = sum(len(shell.state.lanes.in_hand) for shell in waiting.shells)
        return in_hand - len(waiting.given)

    def _note_received(self, messages: list[Message]) -> None:
        self._note_in_use(messages)
        if self._tracing is not None and messages:
            self._tracing.note_received(messages)

    # ── messages of shared groups that the program leaves without an ack ──────────────────────────
    def _note_in_use(self, messages: list[Message]) -> None:
        """Note what the program of a shared group works on: it is renewed."""
        if messages and shell_of(messages[0]).state.flights.is_shared:
            self._in_use = [(shell_of(message), message) for message in messages]

    def _leave_used(self) -> None:
        """The program asks for more: what it has not acked is renewed no longer."""
        used, self._in_use = self._in_use, []
        by_shell: dict[Any, list[Message]] = {}
        for shell, message in used:
            if _is_in_hand(shell, message):
                by_shell.setdefault(shell, []).append(message)
        for shell, messages in by_shell.items():
            shell.feed(MessagesLeft(messages))
            self._expire(shell, messages)

    def _expire(self, shell: Any, messages: list[Message]) -> None:
        """Count a failed try for each message whose time in flight is over, and look again when
        that of the next one is.
        """
        flights, now_ms = shell.state.flights, self._boot_ms()
        waiting = []
        for message in messages:
            is_left = _is_in_hand(shell, message) and message.offset in flights.left
            if not is_left or shell.ended.is_set() or not shell.left_ms:
                continue
            if now_ms < flights.expiry_ms(message.offset):
                waiting.append(message)
            else:
                failure = self.failures.records.build_unacked_failure(message.attempt)
                self._fail(shell, MessageExpired(message, failure), reason=failure.text)
        if waiting:
            next_ms = min(flights.expiry_ms(message.offset) for message in waiting)
            self._loop.call_later((next_ms - now_ms) / 1000, self._expire, shell, waiting)

    # ── acks ──────────────────────────────────────────────────────────────────────────────────────
    async def ack(self, shell: Any, message: Message) -> None:
        """
        Ack a message for the user. A repeated ack only waits until the first one is durable, if the
        settings require that.

        Raises:
            InvalidRequestError: the message was nacked.
            LeaseLostError: the message is delivered to another consumer.
        """
        run = self._runs.iterated
        if (
            run is not None
            and run.unacked is message
            and next(self._readings) < shell.begin_until_s
            and get_ident() == self._taker.thread
        ):
            run.unacked = None
            run.done += 1
            return
        shell.check_can_ack(message.offset)
        self._runs.settle()
        if _is_in_hand(shell, message):
            self._handle(shell, [message])
        else:
            _check_not_given_back(shell, (message,))
            _ack_late(shell, (message,))
        if shell.state.settings.ack is AckMode.EACH:
            await self._wait_until_durable(shell, [message])

    def _handle(self, shell: Any, messages: Sequence[Message]) -> None:
        """Report handled messages."""
        lines = self.failures.lines
        if lines.has_open_failures:
            for message in messages:
                log_line(lines.record_handled(message, self._boot_ms()))
        shell.feed(MessagesHandled(messages))

    async def ack_all(self, messages: list[Message[Any]], loop_binding: LoopBinding) -> None:
        """
        Ack messages of this consumer.

        Raises:
            InvalidRequestError: a message belongs to another consumer, or was given back; nothing
                is acked.
            LeaseLostError: some are delivered to another consumer; the others are acked.
        """
        if self._runs.ack_many(messages):
            return
        check_handed_out(messages, loop_binding)
        self._runs.settle()
        by_shell: dict[Any, list[Message]] = {}
        for message in messages:
            by_shell.setdefault(shell_of(message), []).append(message)
        for shell, own in by_shell.items():
            _check_not_given_back(shell, own)
        first_error: BaseException | None = None
        waits = []
        for shell, own in by_shell.items():
            try:
                shell.check_can_ack(own[0].offset)
            except LeaseLostError as error:
                first_error = first_error or error
                continue
            in_hand = {id(each): each for each in own if _is_in_hand(shell, each)}
            if in_hand:
                self._handle(shell, sorted(in_hand.values(), key=_by_offset))
            if len(in_hand) < len(own):
                _ack_late(shell, own)
            if shell.state.settings.ack is AckMode.EACH:
                waits.append(self._wait_until_durable(shell, own))
        for result in await asyncio.gather(*waits, return_exceptions=True):
            first_error = first_error or result
        if first_error is not None:
            raise first_error

    async def _wait_until_durable(self, shell: Any, messages: list[Message]) -> None:
        """
        Wait until the acks of handled messages are durable.

        Raises:
            LeaseLostError: the messages are delivered to another consumer.
            OverloadedError: the broker cannot store more acked ranges, and the program does not
                take the messages whose acks would free some.
        """
        ready: Message | None = None
        check_s = self._loop.time() + ACK_STALL_S
        offset = messages[0].offset
        while not shell.has_stored(messages):
            if shell.ended.is_set():
                raise LeaseLostError(partition_id=shell.partition_id, offset=offset)
            await shell.calls.wait_for_answer(check_s - self._loop.time())
            if self._loop.time() < check_s:
                continue
            check_s = self._loop.time() + ACK_STALL_S
            previous, ready = ready, self._ready_again()
            if ready is not None and ready is previous and shell.state.acks.handled.is_refused:
                raise _range_limit_error(shell.partition_id, offset)

    def _ready_again(self) -> Message | None:
        """Return a message that the program may take now after it has given it back."""
        now_ms = self._boot_ms()
        for shell in self.waiting.shells:
            lanes = shell.state.lanes
            if lanes.again:
                return lanes.again[0]  # type: ignore[no-any-return]
            if lanes.retries and lanes.retries[0].due_ms <= now_ms:
                return lanes.retries[0].message  # type: ignore[no-any-return]
        return None

    # ── messages that are given back ──────────────────────────────────────────────────────────────
    async def nack(self, shell: Any, message: Message, after_s: float) -> None:
        """
        Nack a message, so that it is handed out again after `after_s`, and later ones of its key
        only when it is acked; or set it aside.

        Raises:
            InvalidRequestError: it is already acked or nacked.
            LeaseLostError: it is delivered to another consumer.
        """
        shell.check_can_ack(message.offset)
        self._runs.settle()
        if not _is_in_hand(shell, message):
            if message.offset in shell.state.flights.expired:
                return  # its broker hands it out again anyway
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} is already acked or "
                "given back"
            )
        self._nack(shell, message, parse_wait_ms(after_s))

    def _nack(
        self, shell: Any, message: Message, wait_ms: int, error: BaseException | None = None
    ) -> None:
        failure = self.failures.records.build_nack_failure(message.attempt, error)
        reason = failure.text if error is None else None
        self._fail(shell, MessageFailed(message, failure, wait_ms, holds_key=True), reason=reason)

    async def nack_all(
        self, messages: list[Message[Any]], loop_binding: LoopBinding, after_s: float
    ) -> None:
        """
        Nack messages, skipping those already acked or nacked.

        Raises:
            InvalidRequestError: a message belongs to another consumer, or `after_s` is not a number
                from 0 to a day; nothing is nacked.
            LeaseLostError: some are delivered to another consumer; the others are nacked.
        """
        check_handed_out(messages, loop_binding)
        self._runs.settle()
        wait_ms = parse_wait_ms(after_s)
        first_error: LeaseLostError | None = None
        for message in sorted(messages, key=_by_offset):
            shell = shell_of(message)
            if not _is_in_hand(shell, message):
                continue
            try:
                shell.check_can_ack(message.offset)
            except LeaseLostError as error:
                first_error = first_error or error
            else:
                self._nack(shell, message, wait_ms)
        if first_error is not None:
            raise first_error

    def _fail(
        self,
        shell: Any,
        event: MessageFailed | MessageExpired,
        *,
        reason: str | None = None,
        suffix: str = "",
    ) -> None:
        """Report a failed attempt, and log what becomes of the message."""
        given_back = self.failures.report(shell, event, reason=reason, suffix=suffix)
        if isinstance(event, MessageFailed):
            _note_given_back(shell, [event.message])
        _note_given_back(shell, given_back)

    def put_back(self, messages: Message | list[Message] | ArrowBatch) -> None:
        """Take back messages that never reached the program. They are delivered next, and the
        attempt does not count.
        """
        self._runs.settle()
        self._watch.current = None
        if isinstance(messages, ArrowBatch):
            messages.put_back()
            return
        by_shell: dict[Any, list[Message]] = {}
        for message in [messages] if isinstance(messages, Message) else messages:
            shell = shell_of(message)
            if shell.left_ms > 0 and _is_in_hand(shell, message):
                by_shell.setdefault(shell, []).append(message)
        for shell, own in by_shell.items():
            _note_given_back(shell, own)
            shell.feed(MessagesReturned(own))

    def count_failed_attempt(self, error: BaseException) -> None:
        """
        Count a failed attempt for the only message that a program has in hand, because `error` has
        escaped the consumer's `async with` block.

        With several messages in hand, none is counted, because only the program knows which one it
        was handling. An error that a signal raises is not counted either: a cancellation, a
        KeyboardInterrupt, or a SystemExit whose code means success or a signal.
        """
        message = self._watch.current
        if message is None or self._count_unacked() != 1:
            return
        if isinstance(error, asyncio.CancelledError) or is_signal(error):
            return
        shell = shell_of(message)
        if shell.left_ms > 0 and _is_in_hand(shell, message):
            self._nack(shell, message, 0, error)

    # ── hand-over ─────────────────────────────────────────────────────────────────────────────────
    async def quiesce(self, shell: Any) -> None:
        """
        Wait until the user has finished with the messages taken from a partition that is being
        handed over.

        The wait ends when all of them are acked, when the user requests the next message after
        `handover_ms` or after the end of the lease, or after `leave`.
        """
        self.forget(shell)
        for line in self.failures.lines.record_all_given_up(
            lambda message: shell_of(message) is shell, self._boot_ms()
        ):
            log_line(line)
        if self._is_leaving:
            self._give_up(shell)
        try:
            await self._wait_quiet(shell)
        finally:
            self.waiting.shells.pop(shell, None)
            self._due_back.pop(shell, None)
            self._watch.forget(shell)

    async def _wait_quiet(self, shell: Any) -> None:
        try:
            async with asyncio.timeout((self._handover_ms + HANDOVER_WARN_MS) / 1000):
                await shell.wait_quiet()
        except TimeoutError:
            log.warning(
                "%s is to be handed over, but %d of its messages are not acked yet; it is handed "
                "over when they are acked or the next message is requested",
                shell.log_name,
                shell.state.intake.held,
            )
            await shell.wait_quiet()

    async def finish(self) -> None:
        """Hand out no more messages, and wait up to `handover_ms` for the loop body to request the
        next one.
        """
        self._taker.is_closed = True
        self.waiting.arrived.set()
        if self._taker.requesting.is_set():
            return
        async with Race() as race:
            race.start(self._taker.requesting.wait())
            await race.first(self._handover_ms)

    def leave(self) -> None:
        """Stop hand-overs from waiting for taken messages, because the consumer is closing."""
        self._is_leaving = True
        for shell in list(self.waiting.shells):
            if not shell.state.tenure.is_live:
                self._give_up(shell)

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._taker.error = error
        self.waiting.arrived.set()

    async def close(self) -> None:
        """End the iteration."""
        self._runs.settle()
        self._taker.is_closed = True
        self.waiting.clear()
        self._watch.clear()
        self._in_use.clear()
        self.waiting.arrived.set()

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    @property
    def running(self) -> list[tuple[Message, int]]:
        """The message in the loop body, with the milliseconds for which it is known to have been
        there.
        """
        return self._watch.list_running(self._boot_ms())

    @property
    def end_of_wait(self) -> str:
        """What ends the wait for the loop body when the consumer closes, as a clause."""
        return f"it waits {format_seconds(self._handover_ms)} at most"

    def check_long_running(self) -> None:
        """Log and report messages that the program has held for a long time, and warn about a
        consumer that is never iterated. Call this about once a second.
        """
        self._runs.settle()
        self._watch.check(self.waiting, self._taker, self._boot_ms())


def _find_blocking(shells: Iterable[Any]) -> tuple[Message | None, int]:
    """Return the message in hand whose ack the largest number of others wait for, and the number
    of all that wait.
    """
    blocking, longest, waiting = None, 0, 0
    for shell in shells:
        lanes = shell.state.lanes
        queues = {key: len(queue) for key, queue in lanes.busy.items() if queue}
        for message in lanes.in_hand.values() if queues else ():
            count = queues.pop(message.key, 0)
            waiting += count
            if count > longest:
                blocking, longest = message, count
    return blocking, waiting


def _range_limit_error(partition_id: int, offset: int) -> OverloadedError:
    """Return the error for an ack that waits for room which only the program can make."""
    error = OverloadedError(
        f"the ack of message {offset} of partition {partition_id} is not durable: the broker "
        "stores no more acks above the oldest unacked message, and the program does not take "
        "the messages that are ready for it again"
    )
    error.hint = (
        "Keep taking and acking messages, which makes room. This ack is retried automatically; "
        "later messages of its key wait until it is durable."
    )
    return error


def _is_in_hand(shell: Any, message: Message) -> bool:
    """Return True if the program has the message and has neither acked nor nacked it."""
    in_hand: bool = shell.state.lanes.in_hand.get((message.partition_id, message.offset)) is message
    return in_hand


def _ack_late(shell: Any, messages: Iterable[Message]) -> None:
    """Ack messages of a shared group that their broker hands out again."""
    expired = shell.state.flights.expired
    offsets = [each.offset for each in messages if each.offset in expired] if expired else []
    if offsets:
        shell.feed(AckedLate(offsets))


def _note_handed_out(shell: Any, messages: Iterable[Message]) -> None:
    if shell.program.given_back:
        for message in messages:
            shell.program.given_back.pop((message.partition_id, message.offset), None)


def _note_given_back(shell: Any, messages: Iterable[Message]) -> None:
    given_back = shell.program.given_back
    for message in messages:
        given_back[message.partition_id, message.offset] = None
        if len(given_back) > GIVEN_BACK_MAX:
            del given_back[next(iter(given_back))]


def _check_not_given_back(shell: Any, messages: Iterable[Message]) -> None:
    """Raise InvalidRequestError if the user nacked one of the messages, because it will be
    redelivered.
    """
    if not shell.program.given_back:
        return
    for message in messages:
        if (message.partition_id, message.offset) in shell.program.given_back:
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} was given back; "
                "ack it when it is delivered again"
            )


_by_offset = attrgetter("offset")
NEXT_CODES = {LoopDispatch.next.__code__}
"""The code objects of coroutines that take a message on behalf of the task that awaits them."""
