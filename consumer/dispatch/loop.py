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
from dataclasses import replace
from operator import attrgetter
from typing import Any

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
from ...protocol.parked import HANGS_MS, Failure
from ...protocol.text import counted, format_seconds
from ...rpc.loop_binding import LoopBinding
from ...rpc.race import Race
from ..filter import MessageFilter
from ..handed_out import check_handed_out, shell_of
from ..log_names import consumer_name
from ..session.events import (
    AckedLate,
    ColumnsReturned,
    FailureOutcome,
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
from ..session.failure import Treatment
from ..settings import AckMode
from .arrow import ArrowBatch, take_arrow
from .failed_attempts import log_line
from .failing import FailureRecords
from .handler_log import HandlerLog
from .idle_warnings import IdleConsumerWarnings
from .not_acked import is_signal, parse_wait_ms

log = logging.getLogger("keylane.consumer")
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
GIVEN_BACK_MAX = 100_000
"""The number of messages given back and not handed out again, of each partition, for which a late
ack is refused; the ack of an older one does nothing.
"""


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
        self._check = check
        self._records = records
        self._filter = message_filter
        self.on_idle: Callable[[], None] | None = None
        """Called when the program waits for messages."""
        self.by_column = False
        """True once the program takes Arrow batches."""
        self._handover_ms = handover_ms
        self._boot_ms = clock.boot_ms
        self._readings = boot_seconds(clock)
        self._loop = asyncio.get_running_loop()
        self._used_method = ""
        """The name of the method by which messages are taken, for error messages and logs."""
        self._task: asyncio.Task[Any] | None = None
        """The iterating task: the last one that requested a message."""
        self._offers: dict[Any, None] = {}
        """The partitions that may have something; the one whose turn is next comes first."""
        self._given: deque[tuple[Any, Message]] = deque()
        """Messages that were handed out although nobody had asked."""
        self._shells: dict[Any, None] = {}
        """The partitions that have offered something, until they are handed over."""
        self._run: IterationRun | None = None
        """The run of an iteration."""
        self._many: list[tuple[Any, list[Message]]] = []
        """The runs that `getmany` has returned."""
        self._many_taken: list[Message] = []
        """All messages of these runs, in the order in which they were returned."""
        self._run_size = RUN_MIN
        self._singles = 0
        """How many messages are taken one by one before the next run."""
        self._work = asyncio.Event()
        self._requesting = asyncio.Event()
        """Set while the user waits for a message; otherwise the loop body is running with the
        messages it took.
        """
        self._turn_remaining = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = self._is_leaving = False
        self._due_back: dict[Any, None] = {}
        """Partitions whose messages go back once the next message is requested."""
        self.current: Message | None = None
        """The last message given to the loop body, while the body is running."""
        self._checked_message: Message | None = None
        """The value of `current` at the last check; `_checked_since_ms` is when it was first
        seen.
        """
        self._checked_since_ms = 0
        self._held_longest: dict[Any, tuple[Message, int, int]] = {}
        """The message of each partition that the program has had for longest at the last check, its
        attempt, and since when.
        """
        self._idle_warnings = IdleConsumerWarnings()
        runner, done = "body of the loop", "is left by the loop"
        self._handler_log = HandlerLog(runner=runner, done=done, ordered=ordered)
        self._outcomes: list[FailureOutcome] = []
        self._requested_count = 1
        """How many messages the program has asked for last."""
        self._in_use: list[tuple[Any, Message]] = []
        """What the program of a shared group has got last, until it asks for more."""

    def pause(self, partition_id: int) -> None:
        """End the runs: the session hands out nothing while its partition is paused."""
        self._settle()

    def resume(self, partition_id: int) -> None:
        """Nothing: the session offers its messages again."""

    # ── called by shells ──────────────────────────────────────────────────────────────────────────
    def hand_out(self, shell: Any, messages: list[Message]) -> None:
        """Accept messages that nobody has asked for."""
        self._shells[shell] = None
        self._given.extend([(shell, message) for message in messages])
        self._work.set()

    def offer(self, shell: Any) -> None:
        """Note that a program that asks this partition may get something."""
        if shell not in self._offers:
            self._offers[shell] = self._shells[shell] = None
            self._work.set()

    def count_spare(self, shell: Any) -> int:
        """Return how many more messages the program would take now; if negative, how many wait for
        it.
        """
        requested = self._requested_count if self._requesting.is_set() else 0
        waiting: int = sum(each.state.count_waiting for each in {shell: None} | self._shells)
        return requested - waiting

    def cancel(self, shell: Any) -> None:
        """Take messages back that are not acked, once the loop body has ended."""
        if self._requesting.is_set() or self._is_leaving:
            self._loop.call_soon(self._give_up, shell)  # the shell is in a step of its session
        else:
            self._due_back[shell] = None

    def _give_up(self, shell: Any) -> None:
        """Take back what the program has of a partition that is handed over."""
        self._settle()
        if shell.ended.is_set():
            return
        shell.program.has_given_up = True
        columns = shell.state.lanes.columns
        if columns is not None and columns.in_hand is not None:
            shell.feed(ColumnsReturned(columns.in_hand, is_try=False))
        in_hand = list(shell.state.lanes.in_hand.values())
        if in_hand:
            shell.feed(MessagesReturned(in_hand))

    def note_outcome(self, outcome: FailureOutcome) -> None:
        """Note what becomes of a message that was given back."""
        self._outcomes.append(outcome)

    def forget(self, shell: Any) -> None:
        """Note that a partition is being handed over: it offers nothing more."""
        self._settle()
        self._offers.pop(shell, None)
        self._return_given(shell)

    def _return_given(self, shell: Any) -> None:
        given = [message for each, message in self._given if each is shell]
        if given:
            self._given = deque(pair for pair in self._given if pair[0] is not shell)
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
        task = current_task(self._loop)
        if task is not self._task or self._requesting.is_set():
            self._claim_iteration(task)
        self._check()
        self._claim_method("iteration")
        try:
            while True:
                self._turn_remaining -= 1
                if not self._turn_remaining:
                    self._turn_remaining = MESSAGES_PER_TURN
                    await asyncio.sleep(0)
                self._check_open()
                message = self._take_one()
                if message is not None:
                    self.current = message
                    self._note_in_use([message])
                    return message
                await self._wait_for_work(None)
        finally:
            self._requesting.clear()

    def take_unregistered(self) -> Message | None:
        """Return the next message of the run if the same task calls again and the last message is
        acked, or None if `next` must be used.
        """
        run, remaining = self._run, self._turn_remaining - 1
        if run is None or run.unacked is not None or not remaining or self._closed:
            return None
        if current_task(self._loop) is not self._task or run.done >= len(run.messages):
            return None
        if next(self._readings) >= run.shell.begin_until_s:
            return None
        self._turn_remaining = remaining
        self.current = run.unacked = message = run.messages[run.done]
        return message

    def _take_one(self) -> Message | None:
        """Take a message that may be handed out now, or return None if there is none."""
        self._settle()
        while self._given or self._offers:
            if self._given:
                shell, message = self._given.popleft()
                if self._accepts_given(shell, message):
                    return message
                continue
            shell = next(iter(self._offers))
            del self._offers[shell]  # it offers again if it has more
            is_alone = self._filter is None and not self._singles
            run_size = self._run_size if is_alone else 0
            messages = self._ask(shell, WorkWanted(1, 1, run_size))
            if not messages:
                continue
            first: Message = messages[0]
            self._singles = max(0, self._singles - 1)
            _note_handed_out(shell, messages)
            if messages is shell.state.lanes.run:
                self._run = IterationRun(shell, messages)
                self._loop.call_soon(self._interrupt, self._run)
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
            self._offers[shell] = None
            raise
        return messages

    def _interrupt(self, run: IterationRun) -> None:
        """The loop body waits: the run ends at its message."""
        if run is self._run:
            self._run_size = RUN_MIN
            if run.unacked is not None and not run.done:
                self._singles = SINGLES
            self._settle()

    async def take_many(self, max_records: int, timeout_ms: int) -> list[Message[Any]]:
        """Return up to `max_records` messages, or an empty list if none arrived within
        `timeout_ms`. Raises the same errors as `next`.
        """
        self._check()
        if self._requesting.is_set():
            raise UsageError(Reason.OTHER_TASK, "another task waits for messages of this consumer")
        self._claim_method("getmany()")
        self._requested_count = max_records
        until_ms = self._boot_ms() + timeout_ms
        try:
            while True:
                self._check_open()
                await asyncio.sleep(0)  # for heartbeats and pulls
                self._check_open()
                messages = self._take_many(max_records)
                if messages or self._boot_ms() >= until_ms:
                    self.current = messages[0] if messages else None
                    self._note_in_use(messages)
                    return messages
                await self._wait_for_work(until_ms)
        finally:
            self._requesting.clear()

    def _take_many(self, count: int) -> list[Message]:
        self._settle()
        taken: list[Message] = []
        runs: list[tuple[Any, list[Message]]] = []
        is_whole = self._filter is None
        """True if all that is taken is in runs."""
        while self._given and len(taken) < count:
            shell, message = self._given.popleft()
            if self._accepts_given(shell, message):
                taken.append(message)
                is_whole = False
        run_count = count if is_whole else 0
        while self._offers and len(taken) < count:
            shell = next(iter(self._offers))
            del self._offers[shell]
            left = count - len(taken)
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
                self._offers.pop(shell, None)  # while the run lasts it has nothing else
                taken += messages
            else:
                is_whole = False
                taken += self._select(shell, messages)
        self._many = runs
        self._many_taken = taken if is_whole else []
        return taken.copy()

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
            failure = self._records.build_failure(error, message.attempt)
            self._fail(shell, message, failure, filter_error=error)
            return False
        self._handle(shell, [message])
        return False

    def claim_columns(self) -> None:
        """Let sessions that are opened from now on hand out columns; raises as `next` does."""
        self._check()
        self._check_open()
        self._check_method("batches()")
        if self._filter is not None:
            raise ConfigError(
                "batches() contain every row: filter their columns, or take messages instead of "
                "batches"
            )
        self.by_column = True
        self._offers.clear()  # other sessions take the place of these
        self._shells.clear()

    async def take_arrow(self) -> ArrowBatch:
        """Return the next batch as Arrow columns. Raises the same errors as `next`."""
        self._check()
        if self._requesting.is_set():
            raise UsageError(Reason.OTHER_TASK, "another task waits for messages of this consumer")
        self._claim_method("batches()")
        try:
            while True:
                await asyncio.sleep(0)  # before taking a batch, so that a cancellation loses none
                self._check_open()
                while self._offers:
                    shell = next(iter(self._offers))
                    del self._offers[shell]  # it offers again if it has more
                    if (batch := take_arrow(shell)) is not None:
                        return batch
                await self._wait_for_work(None)
        finally:
            self._requesting.clear()

    def _check_method(self, method: str) -> None:
        if self._used_method and self._used_method != method:
            self._check_open()
            raise UsageError(
                Reason.MIXED_USE,
                f"{method} on a consumer whose messages are already taken by {self._used_method}",
            )

    def _claim_method(self, method: str) -> None:
        self._check_method(method)
        self._used_method = method
        self._requesting.set()
        self.current = None
        if self._in_use:
            self._leave_used()
        for shell in list(self._due_back):
            del self._due_back[shell]
            self._give_up(shell)

    def _claim_iteration(self, task: asyncio.Task[Any] | None) -> None:
        """
        Make `task` the iterating task, in place of the previous one.

        A task that only runs `next`, such as `asyncio.wait_for` creates on Python 3.11, takes a
        message on behalf of the task that awaits it, which stays the iterating task.

        Raises:
            UsageError: the consumer was opened in another event loop; or another task waits for a
                message, or is still running and has not acked a message that it took.
        """
        self._check()
        if self._requesting.is_set():
            raise UsageError(
                Reason.OTHER_TASK, "another task waits for the next message of this consumer"
            )
        if self._task is not None and not self._task.done():
            if task is not None and getattr(task.get_coro(), "cr_code", None) in NEXT_CODES:
                return
            if unacked := self.unacked:
                raise UsageError(
                    Reason.OTHER_TASK,
                    f"another task iterates over this consumer: it took "
                    f"{counted(unacked, 'message')} that it has not acked",
                    unacked=unacked,
                )
        self._task = task

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StopAsyncIteration

    async def _wait_for_work(self, until_ms: int | None) -> None:
        """Wait until a message may be there, or until a time of the boot clock."""
        self._work.clear()
        if self._given or self._offers:
            return
        if self.on_idle is not None:
            self.on_idle()
        remaining_s = None if until_ms is None else max(0, until_ms - self._boot_ms()) / 1000
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining_s):
                await self._work.wait()

    @property
    def unacked(self) -> int:
        """The number of messages handed to the user and not yet acked."""
        self._settle()
        return sum(len(shell.state.lanes.in_hand) for shell in self._shells) - len(self._given)

    # ── messages of shared groups that the program goes on without ────────────────────────────────
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
                failure = self._records.build_unacked_failure(message.attempt)
                self._outcomes.clear()
                shell.feed(MessageExpired(message, failure))
                self._log_outcome(message, failure, reason=failure.text)
        if waiting:
            next_ms = min(flights.expiry_ms(message.offset) for message in waiting)
            self._loop.call_later((next_ms - now_ms) / 1000, self._expire, shell, waiting)

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────
    def _settle(self) -> None:
        """End the runs, so that sessions know what is handled and what is in hand."""
        run = self._run
        if run is not None:
            self._run = None
            if run.done == len(run.messages):
                self._run_size = min(2 * self._run_size, RUN_MAX)
            run.shell.feed(RunEnded(run.done, run.unacked is not None))
        if self._many:
            many, self._many, self._many_taken = self._many, [], []
            for shell, _ in many:
                shell.feed(RunSpread())

    # ── acks ──────────────────────────────────────────────────────────────────────────────────────
    async def ack(self, shell: Any, message: Message) -> None:
        """
        Ack a message for the user. A repeated ack only waits until the first one is durable, if the
        settings require that.

        Raises:
            InvalidRequestError: the message was nacked.
            LeaseLostError: the message is delivered to another consumer.
        """
        shell.check_can_ack(message.offset)
        run = self._run
        if run is not None and run.unacked is message:
            run.unacked = None
            run.done += 1
            return
        self._settle()
        if _is_in_hand(shell, message):
            self._handle(shell, [message])
        else:
            _check_not_given_back(shell, (message,))
            _ack_late(shell, (message,))
        if shell.state.settings.ack is AckMode.EACH:
            await self._wait_until_durable(shell, [message])

    def _handle(self, shell: Any, messages: Sequence[Message]) -> None:
        """Report handled messages."""
        if self._handler_log.has_open_failures:
            for message in messages:
                log_line(self._handler_log.record_handled(message, self._boot_ms()))
        shell.feed(MessagesHandled(messages))

    async def ack_all(self, messages: list[Message[Any]], loop_binding: LoopBinding) -> None:
        """
        Ack messages of this consumer.

        Raises:
            InvalidRequestError: a message belongs to another consumer, or was given back; nothing
                is acked.
            LeaseLostError: some are delivered to another consumer; the others are acked.
        """
        if self._many and messages == self._many_taken and self._ack_runs():
            return
        check_handed_out(messages, loop_binding)
        self._settle()
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

    def _ack_runs(self) -> bool:
        """Ack all that `getmany` has returned last. Return False if a lease has ended."""
        many = self._many
        try:
            for shell, run in many:
                shell.check_can_ack(run[0].offset)
        except LeaseLostError:
            return False
        self._many, self._many_taken = [], []
        for shell, run in many:
            shell.feed(RunEnded(len(run)))
        return True

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
        for shell in self._shells:
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
        self._settle()
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
        failure = self._records.build_nack_failure(message.attempt, error)
        self._fail(
            shell, message, failure, asked_ms=wait_ms, reason=None if error else failure.text
        )

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
        self._settle()
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
        message: Message,
        failure: Failure,
        *,
        asked_ms: int | None = None,
        reason: str | None = None,
        filter_error: FilterError | None = None,
    ) -> None:
        """Report a failed attempt, and log what becomes of the message."""
        self._outcomes.clear()
        shell.feed(MessageFailed(message, failure, asked_ms, holds_key=True))
        _note_given_back(shell, [message])
        self._log_outcome(message, failure, reason=reason, filter_error=filter_error)

    def _log_outcome(
        self,
        message: Message,
        failure: Failure,
        *,
        reason: str | None,
        filter_error: FilterError | None = None,
    ) -> None:
        """Log what becomes of a message whose attempt has failed."""
        shell, now_ms = shell_of(message), self._boot_ms()
        if not self._outcomes:
            log_line(self._handler_log.record_given_up(message, now_ms))
            return
        outcome = self._outcomes.pop()
        _note_given_back(shell, outcome.returned)
        pause_ms = outcome.pause_ms
        if outcome.treatment is Treatment.AGAIN:
            line = self._handler_log.record_failure(
                message,
                failure.kind,
                now_ms,
                pause_ms or 0,
                asked_for=reason,
                sealed=shell.state.offsets.end_offset is not None,
            )
        else:
            with_key = outcome.treatment is Treatment.PARKED
            line = self._handler_log.record_set_aside(
                message, failure.kind, now_ms, with_key=with_key, pause_ms=pause_ms
            )
        if line is not None and filter_error is not None:
            line = replace(line, text=f"{line.text}: {filter_error.message}")
        log_line(line)

    def put_back(self, messages: Message | list[Message] | ArrowBatch) -> None:
        """Take back messages that never reached the program. They are delivered next, and the
        attempt does not count.
        """
        self._settle()
        self.current = None
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
        message = self.current
        if message is None or self.unacked != 1:
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
        for line in self._handler_log.record_all_given_up(
            lambda message: shell_of(message) is shell, self._boot_ms()
        ):
            log_line(line)
        if self._is_leaving:
            self._give_up(shell)
        try:
            await self._wait_quiet(shell)
        finally:
            self._shells.pop(shell, None)
            self._due_back.pop(shell, None)
            self._held_longest.pop(shell, None)

    async def _wait_quiet(self, shell: Any) -> None:
        try:
            async with asyncio.timeout((self._handover_ms + HANDOVER_WARN_MS) / 1000):
                await shell.wait_quiet()
        except TimeoutError:
            log.warning(
                "%s moves to another consumer, but %d of its messages are not acked yet; it is "
                "handed over when they are acked or the next message is requested",
                shell.log_name,
                shell.state.intake.held,
            )
            await shell.wait_quiet()

    async def finish(self) -> None:
        """Hand out no more messages, and wait up to `handover_ms` for the loop body to request the
        next one.
        """
        self._closed = True
        self._work.set()
        if self._requesting.is_set():
            return
        async with Race() as race:
            race.start(self._requesting.wait())
            await race.first(self._handover_ms)

    def leave(self) -> None:
        """Stop hand-overs from waiting for taken messages, because the consumer is closing."""
        self._is_leaving = True
        for shell in list(self._shells):
            if not shell.state.tenure.is_live:
                self._give_up(shell)

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._error = error
        self._work.set()

    async def close(self) -> None:
        """End the iteration."""
        self._settle()
        self._closed = True
        self._given.clear()
        self._offers.clear()
        self._shells.clear()
        self._checked_message = None  # it refers to the consumer
        self._held_longest.clear()
        self._in_use.clear()
        self._work.set()

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    @property
    def running(self) -> list[tuple[Message, int]]:
        """The message in the loop body, with the milliseconds for which it is known to have been
        there.
        """
        if self.current is None or self.current is not self._checked_message:
            return []
        return [(self.current, self._boot_ms() - self._checked_since_ms)]

    @property
    def end_of_wait(self) -> str:
        """What ends the wait for the loop body when the consumer closes, as a clause."""
        return f"it waits {format_seconds(self._handover_ms)} at most"

    def check_long_running(self) -> None:
        """Log and report messages that the program has held for a long time, and warn about a
        consumer that is never iterated. Call this about once a second.
        """
        now_ms = self._boot_ms()
        self._settle()
        self._report_held(now_ms)
        if self.current is not None and self.current is self._checked_message:
            line = self._handler_log.record_running(
                self._checked_message, self._checked_since_ms, now_ms
            )
        else:
            previous = self._checked_message
            line = None if previous is None else self._handler_log.record_stopped(previous, now_ms)
            self._checked_message = self.current
            self._checked_since_ms = now_ms
        log_line(line)
        log_line(self._handler_log.build_summary(now_ms))
        if not self._used_method and self._offers:
            first = next(iter(self._offers))
            waiting = sum(shell.state.intake.held for shell in self._shells)
            name = consumer_name(first.delivery.subject, first.delivery.group)
            self._idle_warnings.warn_if_not_iterated(name, waiting, now_ms)
        waits = self._requesting.is_set() and not (self._given or self._offers)
        blocking, waiting = self._find_blocking() if waits else (None, 0)
        self._idle_warnings.warn_if_not_acked(blocking, waiting, self._used_method, now_ms)

    def _report_held(self, now_ms: int) -> None:
        """Report the message of each partition that the program has had for longest."""
        previous, self._held_longest = self._held_longest, {}
        given = {id(message) for _, message in self._given}
        for shell in self._shells:
            in_hand = shell.state.lanes.in_hand.values()
            message = next((each for each in in_hand if id(each) not in given), None)
            if message is None:
                continue
            held = previous.get(shell)
            if held is None or held[0] is not message or held[1] != message.attempt:
                held = message, message.attempt, now_ms
            self._held_longest[shell] = held
            if now_ms - held[2] >= HANGS_MS:
                failure = self._records.build_hang_failure(
                    "the program has not acked it", message.attempt
                )
                shell.feed(MessageHangs(message, failure, now_ms - held[2]))

    def _find_blocking(self) -> tuple[Message | None, int]:
        """Return the message in hand whose ack the largest number of others wait for, and the
        number of all that wait.
        """
        blocking, longest, waiting = None, 0, 0
        for shell in self._shells:
            lanes = shell.state.lanes
            queues = {key: len(queue) for key, queue in lanes.busy.items() if queue}
            for message in lanes.in_hand.values() if queues else ():
                count = queues.pop(message.key, 0)
                waiting += count
                if count > longest:
                    blocking, longest = message, count
        return blocking, waiting


class IterationRun:
    """A run from which `async for` takes: its first `done` messages are acked."""

    __slots__ = ("done", "messages", "shell", "unacked")

    def __init__(self, shell: Any, messages: list[Message]) -> None:
        self.shell = shell
        self.messages = messages
        self.done = 0
        self.unacked: Message | None = messages[0]
        """What the loop body has."""


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
