"""
Delivers messages to `async for`, `getmany` and `batches`: there is one queue and no handler, and
the user acks the messages.

    pulled ─▶ stored, not opened ─▶ waiting ─▶ in hand ─▶ acked
                 │                     ▲          ╰─ nacked, or later ones of a key:
                 `UnackedMessages` ╰─▶ Arrow batches     ╰──────────╯

The hand-over of a partition waits until the messages taken from it are acked: for up to
`handover_ms` in any case, and then for as long as the loop body runs, because it may still be
working on them. Messages skipped without an ack by then are redelivered. When the consumer closes,
unacked messages are redelivered at once.

Invariants
    In an exclusive group a message is handed out only when all earlier ones of its key are acked,
    or together with them (`getmany`). While a task that took messages is running and any of them is
    unacked, no other task gets a message: it might be the next one of the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from ...protocol.clock import Clock
from ...protocol.errors import ConfigError, FilterError, Reason, UsageError
from ...protocol.message import Message
from ...protocol.parked import Failure
from ...protocol.text import counted, format_seconds
from ...rpc.race import Race
from ..delivery.pulled_batch import PulledBatch
from ..delivery.user_acks import are_parked_together
from ..log_names import consumer_name
from ..pulling.pull_client import PullClient, client_of
from ..settings import ConsumerSettings
from .arrow_batch import ArrowBatch
from .arrow_stream import ArrowStream
from .failing import FailureRules
from .filtered import Filtering
from .handler_log import HandlerLog
from .in_hand import UnackedMessages
from .lanes import leased_id_of
from .not_acked import parse_wait_ms
from .taken import IdleConsumerWarnings, UnackedMessageTracker, put_back, warn

log = logging.getLogger("keylane.consumer")

MESSAGES_PER_TURN = 256
HANDOVER_WARN_MS = 5_000
"""How long after `handover_ms` the loop body may delay a hand-over before a warning is logged, in
milliseconds.
"""


class Stream:
    """
    Hands out messages in offset order within each partition, except those that wait for their key.

    Args:
        handover_ms: how long taken messages may still be acked when their partition is handed over,
            in milliseconds.
        check: raises an error if called in a different event loop from the consumer's.
        ordered: False: only nacked messages make later ones of their key wait.
        failure_rules: decides when a nacked message is no longer redelivered.
        filtering: the filter; rejected messages are acked on the user's behalf; None: no filter.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        handover_ms: int,
        check: Callable[[], None],
        ordered: bool = True,
        failure_rules: FailureRules | None = None,
        filtering: Filtering | None = None,
    ) -> None:
        self._check = check
        self._failure_rules = failure_rules or FailureRules()
        self._filtering = filtering
        self._blocked_ids: set[int] = set()
        """The `id` of each message collected by the current call that must wait for an earlier
        message of its key whose filter failed.
        """
        self._ordered = ordered
        self._used_method = ""
        """The name of the method by which messages are taken, for error messages and logs."""
        self._method_known = asyncio.Event()
        """Set when messages are first taken."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        """The iterating task: the last one that requested a message."""
        self._clients: set[PullClient] = set()
        """The clients whose messages have arrived, until they are handed over."""
        self._waiting: deque[Message] = deque()
        self._stored: deque[PulledBatch] = deque()
        """The batches pulled after the messages in `_waiting`."""
        self._paused: dict[int, list[Message]] = {}
        """The waiting messages of each paused partition."""
        self._unacked_messages = UnackedMessages(ordered=ordered)
        self._is_sorted = True
        """True if the waiting messages of each partition are in offset order, as the messages of
        batches are.
        """
        self._boot_ns = clock.boot_ns
        self._handover_ms = handover_ms
        self._work = asyncio.Event()
        self._arrow = ArrowStream(boot_ns=clock.boot_ns, wake=self._work.set)
        self._requesting = asyncio.Event()
        """Set while the user waits for a message; otherwise the loop body is running with the
        messages it took.
        """
        self._is_fast_path = self._may_take_unregistered = False
        """`_is_fast_path`: True if `next` need not set `_requesting` when the same task calls it
        again. `_may_take_unregistered`: True if, in addition, `take_unregistered` may return
        messages, because there is no filter and no partition is paused.
        """
        self._turn_remaining = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = False
        self.current: Message | None = None
        """The last message given to the loop body, while the body is running."""
        self._checked_message: Message | None = None
        """The value of `current` at the last check; `_checked_since_ms` is when it was first
        seen.
        """
        self._checked_since_ms = 0
        self._stream_watch = IdleConsumerWarnings()
        self._long_unacked = UnackedMessageTracker()
        self._is_used = False
        runner, done = "body of the loop", "is left by the loop"
        self._handler_log = HandlerLog(runner=runner, done=done, ordered=ordered)
        self._leaving = asyncio.Event()
        self.on_idle: Callable[[], None] | None = None
        """Called when the user waits for messages."""
        self._requested_count = 1
        """The number of messages that the user requests at once."""
        self._last_taken: list[Message] = []
        """The messages that `getmany` last returned, until the next request."""

    def apply_settings(self, settings: ConsumerSettings) -> None:
        """Apply the failure policy of new settings."""
        self._failure_rules.apply_settings(settings)

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition."""
        if messages:
            self._clients.add(messages[0].delivery.client)  # type: ignore[union-attr]
            self._waiting.extend(messages)
            self._is_sorted = False
        self._work.set()

    def put_batch(self, batch: PulledBatch) -> None:
        """Add a batch of one partition."""
        if batch.count:
            self._clients.add(batch.client)  # type: ignore[arg-type]
            self._stored.append(batch)
        self._work.set()

    @property
    def _waiting_count(self) -> int:
        """The number of messages that are not in the user's hands."""
        paused = sum(map(len, self._paused.values()))
        stored = sum(batch.count for batch in self._stored)
        return (
            len(self._waiting)
            + stored
            + paused
            + self._unacked_messages.waiting
            + self._arrow.waiting
        )

    @property
    def unacked(self) -> int:
        """The number of messages handed to the user and not yet acked."""
        return sum(client.outstanding for client in self._clients) - self._waiting_count

    # ── the ways to take messages ─────────────────────────────────────────────────────────────────
    async def next(self) -> Message:
        """
        Return the next message whose lease has not ended.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: the consumer was opened in another event loop, another task iterates, or
                messages were taken by another method before.
        """
        task = current_task(self._loop)
        if self._is_fast_path and task is self._task:
            self._turn_remaining -= 1
            if self._turn_remaining and (message := self._take_one()) is not None:
                self.current = message
                return message
            self._turn_remaining += 1
        if task is not self._task or self._requesting.is_set():
            self._claim_iteration(task)
        if not self._waiting:
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
                    self._is_fast_path = True
                    self._may_take_unregistered = self._filtering is None and not self._paused
                    return message
                if not self._waiting and not self._stored:
                    await self._wait_for_work(self._unacked_messages.next_ns())
        finally:
            self._requesting.clear()

    async def take_many(self, max_records: int, timeout_ms: int) -> list[Message[Any]]:
        """Return up to `max_records` messages, or an empty list if none arrived within
        `timeout_ms`. Raises the same errors as `next`.
        """
        self._begin_request("getmany()")
        self._requested_count = max_records
        deadline_ns = self._boot_ns() + timeout_ms * 1_000_000
        try:
            while True:
                self._check_open()
                await asyncio.sleep(0)  # for heartbeats and pulls
                messages = self._take_many(max_records)
                if messages or self._boot_ns() >= deadline_ns:
                    self._last_taken = messages or []
                    self.current = messages[0] if messages else None
                    return messages or []
                if messages is None:
                    due_ns = self._unacked_messages.next_ns()
                    await self._wait_for_work(
                        deadline_ns if due_ns is None else min(due_ns, deadline_ns)
                    )
        finally:
            self._requesting.clear()

    @property
    def takes_batches(self) -> bool:
        """True if the user takes Arrow batches."""
        return self._used_method == "batches()"

    async def takes_messages(self) -> bool:
        """Wait until the user takes something. Return False if it is Arrow data."""
        await self._method_known.wait()
        return not self.takes_batches

    async def take_arrow(self) -> ArrowBatch:
        """Return the next batch as Arrow columns. Raises the same errors as `next`."""
        if self._filtering is not None:
            raise ConfigError(
                "batches() contain every row: filter their columns, or take messages instead of "
                "batches"
            )
        self._begin_request("batches()")
        try:
            while True:
                await asyncio.sleep(0)  # before taking a batch, so that a cancellation loses none
                self._check_open()
                self._arrow.put_all(self._stored)
                batch = self._arrow.take()
                if batch is not None:
                    return batch
                await self._wait_for_work(self._arrow.next_ns())
        finally:
            self._requesting.clear()

    def _begin_request(self, method: str) -> None:
        """Start waiting for messages, in any task."""
        self._check()
        if self._requesting.is_set():
            raise UsageError(Reason.OTHER_TASK, "another task waits for messages of this consumer")
        self._claim_method(method)

    def _claim_method(self, method: str) -> None:
        if self._used_method and self._used_method != method:
            self._check_open()
            raise UsageError(
                Reason.MIXED_USE,
                f"{method} on a consumer whose messages are already taken by {self._used_method}",
            )
        if not self._used_method:
            self._used_method = method
            self._method_known.set()
        self._requesting.set()
        self._is_used = True
        self.current = None
        self._last_taken = []

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StopAsyncIteration

    def take_unregistered(self) -> Message | None:
        """Return the next message if the same task calls again and the last message is acked, or
        None if `next` must be used.
        """
        remaining = self._turn_remaining - 1
        if not remaining or not self._may_take_unregistered:
            return None
        if current_task(self._loop) is not self._task:
            return None
        message = self._unacked_messages.take_unregistered(self._waiting, self._boot_ns)
        if message is not None:
            self._turn_remaining = remaining
            self.current = message
        return message

    def ack_unregistered(self, messages: list[Message]) -> bool:
        """Ack the unregistered messages; see `UnackedMessages`."""
        return self._unacked_messages.ack_unregistered(messages)

    def _take_one(self) -> Message | None:
        """Take a message that may be handed out now, or return None if all examined messages must
        wait.
        """
        if not self._waiting and self._stored:
            self._open_stored()
        now_ns = self._boot_ns()
        while (
            message := self._unacked_messages.take_first(
                self._waiting, now_ns, ordered=self._ordered
            )
        ) is not None:
            client: PullClient = message.delivery  # type: ignore[assignment]
            if now_ns < client.deadline_ns and not self._paused and self._filtering is None:
                client.register_delivered(message)
                return message
            if self._hand_out([message], now_ns):
                return message
        return None

    def _open_stored(self) -> None:
        """Open the next batch, which is kept if this raises. Messages whose key has been parked
        since the batch was pulled are parked too.
        """
        batch = self._stored[0]
        messages = batch.messages()
        self._stored.popleft()
        self._is_sorted = self._is_sorted or not self._waiting
        client: PullClient = batch.client  # type: ignore[assignment]
        self._waiting.extend(client.park_later_messages(messages))

    def _take_many(self, count: int) -> list[Message] | None:
        """Take up to `count` messages that may be handed out now, or return None if the caller must
        wait for work.
        """
        while self._stored and len(self._waiting) < count:
            self._open_stored()
        now_ns = self._boot_ns()
        if self._is_sorted and not self._paused and self._filtering is None:
            unregistered = self._unacked_messages.take_many_unregistered(
                self._waiting, count, now_ns
            )
            if unregistered is not None:
                return unregistered
        messages = self._unacked_messages.collect(
            self._waiting, count, now_ns, ordered=self._ordered
        )
        taken: list[Message] = []
        for _, run in groupby(messages, _delivery):
            taken += self._hand_out(list(run), now_ns)
        self._blocked_ids.clear()
        return taken if messages or self._waiting or self._stored else None

    def _hand_out(self, messages: list[Message], now_ns: int) -> list[Message]:
        """
        Return those messages of one delivery that the user gets.

        The list is empty if the lease has ended or the partition is paused; rejected messages are
        left out.
        """
        if self._blocked_ids:
            messages = [message for message in messages if id(message) not in self._blocked_ids]
            if not messages:
                return []
        first = messages[0]
        client: PullClient = first.delivery  # type: ignore[assignment]
        if now_ns >= client.deadline_ns:
            client.discard_in_flight(len(messages))
        elif self._paused and client.leased_id in self._paused:
            self._paused[client.leased_id] += messages
        else:
            if self._filtering is not None:
                messages = self._filter(messages, client, self._filtering)
            client.register_all_delivered(messages)
            return messages
        self.release_acked_keys(messages)  # so that messages waiting for them are skipped next
        return []

    def _filter(
        self, messages: list[Message], client: PullClient, filtering: Filtering
    ) -> list[Message]:
        """Return the accepted messages; ack the others, or nack those whose filter failed."""
        return [
            message
            for message in messages
            if id(message) not in self._blocked_ids and self._accepts(message, client, filtering)
        ]

    def _accepts(self, message: Message, client: PullClient, filtering: Filtering) -> bool:
        """Return True if the filter accepts the message. Otherwise ack the message, or nack it if
        the filter failed.
        """
        try:
            if filtering.message_filter.matches(message):
                return True
        except FilterError as error:
            self._retry_filter(message, client, error, filtering)
            return False
        client.mark_handled(message.offset)
        self.release_acked_keys([message])
        return False

    def _retry_filter(
        self, message: Message, client: PullClient, error: FilterError, filtering: Filtering
    ) -> None:
        failure = self._failure_rules.build_failure(error, message.attempt)
        if self._failure_rules.is_last_try(message):
            _, *later = self._set_aside(message, failure)
            self._blocked_ids.update(map(id, later))
            return
        client.report_failure(message, failure)
        wait_ms = filtering.backoff.wait_ms(message.attempt, filtering.rng)
        now_ns = self._boot_ns()
        kind = type(error).__name__
        line = self._handler_log.record_failure(message, kind, now_ns // 1_000_000, wait_ms)
        if line is not None:
            log.warning("%s: %s", line.text, error.message)
        _, *later = self._unacked_messages.requeue(message, now_ns + wait_ms * 1_000_000)
        self._blocked_ids.update(map(id, later))
        message.attempt += 1

    async def _wait_for_work(self, due_ns: int | None) -> None:
        """Wait until a message arrives, or one is due again at `due_ns` on the boot clock."""
        self._work.clear()
        if self.on_idle is not None:
            self.on_idle()
        remaining_s = None if due_ns is None else max(0.0, (due_ns - self._boot_ns()) / 1e9)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining_s):
                await self._work.wait()

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def spare_capacity(self) -> int:
        """How many more messages the user would take now; if negative, the number of messages that
        wait for the next request.
        """
        return (self._requested_count if self._requesting.is_set() else 0) - len(self._waiting)

    def messages_in_use(self, client: PullClient) -> list[Message]:
        """Return the client's messages that were last given to the program and are not acked
        yet.
        """
        messages = self._last_taken or ([] if self.current is None else [self.current])
        return [
            each
            for each in messages
            if client_of(each) is client and each.delivery.is_delivered(each)  # type: ignore[union-attr]
        ]

    @property
    def running(self) -> list[tuple[Message, int]]:
        """The message in the loop body, with the milliseconds for which it is known to have been
        there.
        """
        if self.current is None or self.current is not self._checked_message:
            return []
        return [(self.current, self._boot_ns() // 1_000_000 - self._checked_since_ms)]

    @property
    def end_of_wait(self) -> str:
        """What ends the wait for the loop body when the consumer closes, as a clause."""
        return f"it waits {format_seconds(self._handover_ms)} at most"

    def count_unacked_delivery(self, message: Message) -> None:
        """Count a failed attempt of a message that the program did not ack while it was in flight,
        and that is redelivered.
        """
        failure = self._failure_rules.build_unacked_failure(message.attempt)
        if self._failure_rules.is_last_try(message):
            self._set_aside(message, failure)
            return
        client: PullClient = message.delivery  # type: ignore[assignment]
        client.report_failure(message, failure)
        now_ms = self._boot_ns() // 1_000_000
        warn(
            self._handler_log.record_failure(
                message, failure.kind, now_ms, 0, asked_for=failure.text
            )
        )
        client.discard_in_flight(1)
        self.release_acked_keys([message])

    # ── nacked messages ───────────────────────────────────────────────────────────────────────────
    def nack(
        self, message: Message, after_s: float, error: BaseException | None = None
    ) -> list[Message]:
        """
        Hand out a message again after `after_s`, and later ones of its key only when it is acked;
        or set it aside.

        Returns:
            The message, and those of its key that the user was given after it; they are redelivered
            or parked.
        """
        wait_ms = self._failure_rules.retry_wait_ms(parse_wait_ms(after_s), message.attempt)
        failure = self._failure_rules.build_nack_failure(message.attempt, error)
        if self._failure_rules.is_last_try(message):
            return self._set_aside(message, failure, wait_ms)
        message.delivery.report_failure(message, failure)  # type: ignore[union-attr]
        now_ns, sealed = self._boot_ns(), client_of(message).sealed
        reason = None if error else failure.text
        log_arguments = (message, failure.kind, now_ns // 1_000_000, wait_ms)
        warn(self._handler_log.record_failure(*log_arguments, asked_for=reason, sealed=sealed))
        requeued = self._unacked_messages.requeue(message, now_ns + wait_ms * 1_000_000)
        for each in requeued:
            each.attempt += 1
        self._work.set()
        return requeued

    def put_back(self, messages: Message | list[Message] | ArrowBatch) -> None:
        """Take back messages that never reached the program; see `taken.put_back`."""
        self._is_fast_path = False
        self._may_take_unregistered = False
        self.current = None
        put_back(messages, self._arrow, self._unacked_messages, self._boot_ns())
        self._work.set()

    def _set_aside(
        self, message: Message, failure: Failure, requested_ms: int = 0
    ) -> list[Message]:
        """Park a message that failed too often, make it a dead letter, or schedule its retry.
        Return it together with the other messages that are taken away from the user.
        """
        client: PullClient = message.delivery  # type: ignore[assignment]
        parks = self._ordered and self._failure_rules.parks(message)
        log_arguments = (message, failure.kind, self._boot_ns() // 1_000_000)
        pause_ms = self._failure_rules.pause_ms(message, requested_ms)
        warn(self._handler_log.record_set_aside(*log_arguments, with_key=parks, pause_ms=pause_ms))
        self._work.set()
        if not parks:
            if pause_ms is None:
                client.dead_letter(message, failure)
            else:
                client.retry(message, failure, pause_ms)
            later_messages = self._unacked_messages.requeue_after(message)
            self.release_acked_keys([message])
            return [message, *later_messages]

        def is_behind(other: Message) -> bool:
            return other.key == message.key and are_parked_together(message, other)

        returned, other_messages, waiting = self._unacked_messages.remove_failed(message, is_behind)
        waiting += [each for each in self._waiting if is_behind(each)]
        self._waiting = deque(each for each in self._waiting if not is_behind(each))
        for partition_id, paused_messages in self._paused.items():
            waiting += [each for each in paused_messages if is_behind(each)]
            self._paused[partition_id] = [each for each in paused_messages if not is_behind(each)]
        client.park(message, failure, sorted([*returned[1:], *waiting], key=_by_offset))
        return [*returned, *other_messages]

    def release_acked_keys(self, messages: Sequence[Message]) -> None:
        """Allow later messages of the same keys to be handed out."""
        if self._handler_log.has_open_failures:
            now_ms = self._boot_ns() // 1_000_000
            for message in messages:
                warn(self._handler_log.record_handled(message, now_ms))
        if self._unacked_messages.record_acks(messages):
            self._work.set()

    @property
    def ready_redelivery(self) -> Message | None:
        """The message that is ready to be taken again; see `UnackedMessages.ready_message`."""
        return self._unacked_messages.ready_message(self._boot_ns())

    # ── paused partitions ─────────────────────────────────────────────────────────────────────────
    def pause(self, partition_id: int) -> None:
        """Hand out no messages of a partition until `resume`."""
        self._may_take_unregistered = False
        paused_messages = self._paused.setdefault(partition_id, [])
        paused_messages += [
            message for message in self._waiting if leased_id_of(message) == partition_id
        ]
        self._waiting = deque(each for each in self._waiting if leased_id_of(each) != partition_id)

    def resume(self, partition_id: int) -> None:
        """Hand out messages of a partition again."""
        paused_messages = self._unacked_messages.add_resumed(
            sorted(self._paused.pop(partition_id, ()), key=_by_offset)
        )
        self._waiting.extendleft(reversed(paused_messages))
        self._is_sorted = False
        self._work.set()

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

    async def quiesce(self, client: PullClient) -> None:
        """
        Drop the waiting messages of `client`'s partition, and wait until the user has finished with
        the taken ones.

        The wait ends when all of them are acked, when the user requests the next message after
        `handover_ms` or after the end of the lease, or after `leave`.
        """
        kept_batches = deque(each for each in self._waiting if client_of(each) is not client)
        stored = deque(batch for batch in self._stored if batch.client is not client)
        opened = sum(batch.count for batch in self._stored if batch.client is client)
        given_back = self._unacked_messages.drop(client.has_handed_out)
        paused = len(self._paused.pop(client.partition_id, ()))
        client.discard_in_flight(
            len(self._waiting) - len(kept_batches) + opened + given_back + paused
        )
        self._waiting = kept_batches
        self._stored = stored
        self._arrow.drop(client)
        for line in self._handler_log.record_all_given_up(
            client.has_handed_out, self._boot_ns() // 1_000_000
        ):
            warn(line)
        try:
            await self._wait_for_acks(client)
        finally:
            self._clients.discard(client)

    async def _wait_for_acks(self, client: PullClient) -> None:
        async with Race() as race:
            race.start(client.wait_handled())
            race.start(self._leaving.wait())
            until_ms = self._boot_ns() // 1_000_000 + self._handover_ms
            while (left_ms := min(until_ms - self._boot_ns() // 1_000_000, client.left_ms)) > 0:
                if await race.first(left_ms):  # the lease may be renewed during the wait
                    return
            if await race.first(0) or self._requesting.is_set():
                return
            self._is_fast_path = self._may_take_unregistered = False
            race.start(self._requesting.wait())
            if not await race.first(HANDOVER_WARN_MS):
                log.warning(
                    "%s moves to another consumer, but %d of its messages are not acked yet; it is "
                    "handed over when they are acked or the next message is requested",
                    client.log_name,
                    client.outstanding,
                )
                await race.first()

    async def finish(self) -> None:
        """Hand out no more messages, and wait up to `handover_ms` for the loop body to request the
        next one.
        """
        self._closed = True
        self._is_fast_path = self._may_take_unregistered = False
        self._work.set()
        if self._requesting.is_set():
            return
        async with Race() as race:
            race.start(self._requesting.wait())
            await race.first(self._handover_ms)

    def check_long_running(self) -> None:
        """Log and report messages that the program has held for a long time, and warn about a
        consumer that is never iterated. Call this about once a second.
        """
        now_ms = self._boot_ns() // 1_000_000
        self._long_unacked.check_long_running(
            self.current, self._unacked_messages, self._failure_rules, now_ms
        )
        if self.current is not None and self.current is self._checked_message:
            self._unacked_messages.unregistered.register()  # so that its ack is logged
            line = self._handler_log.record_running(
                self._checked_message, self._checked_since_ms, now_ms
            )
        else:
            previous = self._checked_message
            line = None if previous is None else self._handler_log.record_stopped(previous, now_ms)
            self._checked_message = self.current
            self._checked_since_ms = now_ms
        warn(line)
        warn(self._handler_log.build_summary(now_ms))
        if not self._is_used and (self._waiting or self._stored):
            first = (self._waiting or self._stored[0].messages())[0]
            name = consumer_name(first.subject, getattr(first.delivery, "group", ""))
            self._stream_watch.warn_if_not_iterated(name, self._waiting_count, now_ms)
        waits = self._requesting.is_set() and not self._waiting
        unacked = self._unacked_messages
        blocking = unacked.blocking_message() if waits else None
        self._stream_watch.warn_if_not_acked(blocking, unacked.waiting, self._used_method, now_ms)

    def leave(self) -> None:
        """Stop hand-overs from waiting for taken messages, because the consumer is closing."""
        self._leaving.set()

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._error = error
        self._is_fast_path = self._may_take_unregistered = False
        self._work.set()

    async def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._is_fast_path = False
        self._may_take_unregistered = False
        self._waiting.clear()
        self._stored.clear()
        self._unacked_messages.close()
        self._checked_message = None  # it refers to the consumer
        self._work.set()


_by_offset = attrgetter("offset")
_delivery = attrgetter("delivery")
NEXT_CODES = {Stream.next.__code__}
"""The code objects of coroutines that take a message on behalf of the task that awaits them."""
