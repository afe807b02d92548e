"""Delivers messages to `async for`, `getmany` and `batches`: one queue, no handlers, acks by the
user.

    pulled ─▶ stored, not opened ─▶ waiting ─▶ in hand ─▶ acked
                 │                     ▲          ╰─ given back, or later ones of a key: `InHand`
                 ╰─▶ Arrow batches     ╰──────────╯

The hand-over of a partition waits until the messages taken from it are acked: for `handover_ms` in
any case, and then while the loop body runs, because it may still be working on them. Messages
passed over without an ack by then are redelivered. When the consumer closes, unacked messages are
redelivered at once.

Invariants
    In an exclusive group a message is handed out only once all earlier ones of its key are acked,
    or with them (`getmany`). While a task that took messages runs and any of them is not acked, no
    other task gets a message: it might be the next one of the same key.
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
from ...protocol.text import counted
from ...rpc.race import Race
from ..delivery.pulled_batch import PulledBatch
from ..delivery.user_acks import are_parked_together
from ..pulling.pull_client import PullClient, client_of
from ..settings import ConsumerSettings
from .arrow_batch import ArrowBatch
from .arrow_stream import ArrowStream
from .failing import Failing
from .filtered import Filtering
from .handler_log import HandlerLog
from .in_hand import InHand
from .lanes import leased_id_of
from .not_acked import wait_ms_of
from .taken import LongUnacked, StreamWatch, put_back, warn

log = logging.getLogger("keylane.consumer")

MESSAGES_PER_TURN = 256
HANDOVER_WARN_MS = 5_000
"""The delay of a hand-over by the loop body, in milliseconds after `handover_ms`, beyond which a
warning is logged.
"""


class Stream:
    """
    Hands messages out in the order of their offsets within each partition, except those that wait
    for their key.

    Args:
        handover_ms: the time that acks of taken messages have in any case when their partition is
            handed over.
        check: raises an error if the caller runs in another event loop than the consumer.
        ordered: False: only messages that were given back make later ones of their key wait.
        failing: decides when a message that is given back is not delivered again.
        filtering: the filter: unwanted messages are acked in place of the user; None: all are
            wanted.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        handover_ms: int,
        check: Callable[[], None],
        ordered: bool = True,
        failing: Failing | None = None,
        filtering: Filtering | None = None,
    ) -> None:
        self._check = check
        self._failing = failing or Failing()
        self._filtering = filtering
        self._held_back: set[int] = set()
        """The `id` of messages collected in this call after an earlier one of their key whose
        filter failed: they wait for it.
        """
        self._ordered = ordered
        self._manner = ""
        """A description, for people, of how messages are taken."""
        self._begun = asyncio.Event()
        """The event that is set once that is known."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        """The task that iterates: the last one that asked for a message."""
        self._clients: set[PullClient] = set()
        """The clients whose messages arrived here, until they are handed over."""
        self._waiting: deque[Message] = deque()
        self._stored: deque[PulledBatch] = deque()
        """The batches that were pulled after the messages in `_waiting`."""
        self._paused: dict[int, list[Message]] = {}
        """The waiting messages that the user does not want now, by partition."""
        self._in_hand = InHand(ordered=ordered)
        self._sorted = True
        """True if the waiting messages arrived by offset within each partition, as batches do."""
        self._boot_ns = clock.boot_ns
        self._handover_ms = handover_ms
        self._work = asyncio.Event()
        self._arrow = ArrowStream(boot_ns=clock.boot_ns, wake=self._work.set)
        self._asked = asyncio.Event()
        """The event that is set while the user waits for a message; otherwise the loop body runs,
        with the messages taken.
        """
        self._quick = self._alone = False
        """`_quick` means that `next`, in the task that called it last, need not note that the user
        asks; `_alone`, that `take_alone` may also give messages, because all are wanted, from all
        partitions.
        """
        self._turn_left = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = False
        self.current: Message | None = None
        """The last message that the loop body was given, while the body runs."""
        self._seen: Message | None = None
        """The value of `current` at the last check; `_seen_ms` is the time since which it has
        it.
        """
        self._seen_ms = 0
        self._watch = StreamWatch()
        self._held = LongUnacked()
        self._iterated = False
        runner, done = "body of the loop", "is left by the loop"
        self._handler_log = HandlerLog(runner=runner, done=done, ordered=ordered)
        self._leaving = asyncio.Event()
        self.on_idle: Callable[[], None] | None = None
        """A callable that is called when the user waits for messages."""
        self._asks_for = 1
        """The number of messages that the user takes at once."""
        self._given: list[Message] = []
        """The messages that `getmany` gave last, until the user asks again."""

    def adopt(self, settings: ConsumerSettings) -> None:
        """Follow the failure policy of these settings from now on."""
        self._failing.adopt(settings)

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition."""
        if messages:
            self._clients.add(messages[0].delivery.client)  # type: ignore[union-attr]
            self._waiting.extend(messages)
            self._sorted = False
        self._work.set()

    def put_batch(self, batch: PulledBatch) -> None:
        """Add a batch of one partition."""
        if batch.count:
            self._clients.add(batch.client)  # type: ignore[arg-type]
            self._stored.append(batch)
        self._work.set()

    @property
    def _here(self) -> int:
        """Return the number of messages that are not with the user."""
        paused = sum(map(len, self._paused.values()))
        stored = sum(batch.count for batch in self._stored)
        return len(self._waiting) + stored + paused + self._in_hand.waiting + self._arrow.waiting

    @property
    def unacked(self) -> int:
        """Return the number of messages that are with the user."""
        return sum(client.outstanding for client in self._clients) - self._here

    # ── the ways to take messages ─────────────────────────────────────────────────────────────────
    async def next(self) -> Message:
        """
        Return the next message whose lease has not ended.

        Raises:
            StopAsyncIteration: the consumer is closed.
            UsageError: the consumer was opened in another event loop.
            UsageError: another task iterates.
            UsageError: messages were taken in another way.
        """
        task = current_task(self._loop)
        if self._quick and task is self._task:
            self._turn_left -= 1
            if self._turn_left and (message := self._take_one()) is not None:
                self.current = message
                return message
            self._turn_left += 1
        if task is not self._task or self._asked.is_set():
            self._take_over(task)
        if not self._waiting:
            self._check()
        self._begin("iteration")
        try:
            while True:
                self._turn_left -= 1
                if not self._turn_left:
                    self._turn_left = MESSAGES_PER_TURN
                    await asyncio.sleep(0)
                self._check_open()
                message = self._take_one()
                if message is not None:
                    self.current = message
                    self._quick = True
                    self._alone = self._filtering is None and not self._paused
                    return message
                if not self._waiting and not self._stored:
                    await self._wait_for_work(self._in_hand.next_ns())
        finally:
            self._asked.clear()

    async def take_many(self, max_records: int, timeout_ms: int) -> list[Message[Any]]:
        """Return up to `max_records` messages; none if none arrived within `timeout_ms`. Raises as
        `next` does.
        """
        self._begin_waiting("getmany()")
        self._asks_for = max_records
        until_ns = self._boot_ns() + timeout_ms * 1_000_000
        try:
            while True:
                self._check_open()
                await asyncio.sleep(0)  # for heartbeats and pulls
                taken = self._take(max_records)
                if taken or self._boot_ns() >= until_ns:
                    self._given = taken or []
                    self.current = taken[0] if taken else None
                    return taken or []
                if taken is None:
                    due_ns = self._in_hand.next_ns()
                    await self._wait_for_work(until_ns if due_ns is None else min(due_ns, until_ns))
        finally:
            self._asked.clear()

    @property
    def takes_batches(self) -> bool:
        """Return True while the user takes Arrow batches."""
        return self._manner == "batches()"

    async def takes_messages(self) -> bool:
        """Wait until the user takes something, and return False if it is Arrow data."""
        await self._begun.wait()
        return not self.takes_batches

    async def take_arrow(self) -> ArrowBatch:
        """Return the next batch as Arrow columns. Raises as `next` does."""
        if self._filtering is not None:
            raise ConfigError(
                "batches() have every row: filter their columns, or take messages "
                "in place of batches"
            )
        self._begin_waiting("batches()")
        try:
            while True:
                await asyncio.sleep(0)  # before a batch is taken: a cancellation here loses none
                self._check_open()
                self._arrow.put_all(self._stored)
                batch = self._arrow.take()
                if batch is not None:
                    return batch
                await self._wait_for_work(self._arrow.next_ns())
        finally:
            self._asked.clear()

    def _begin_waiting(self, manner: str) -> None:
        """Begin to wait for messages, in whichever task."""
        self._check()
        if self._asked.is_set():
            raise UsageError(Reason.OTHER_TASK, "another task waits for messages of this consumer")
        self._begin(manner)

    def _begin(self, manner: str) -> None:
        if self._manner and self._manner != manner:
            self._check_open()
            raise UsageError(
                Reason.MIXED_USE,
                f"{manner} of a consumer that gives its messages by {self._manner}",
            )
        if not self._manner:
            self._manner = manner
            self._begun.set()
        self._asked.set()
        self._iterated = True
        self.current = None
        self._given = []

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StopAsyncIteration

    def take_alone(self) -> Message | None:
        """Return the next message for the task that took the last one, if that is acked; None if
        `next` must decide.
        """
        left = self._turn_left - 1
        if not (left and self._alone) or current_task(self._loop) is not self._task:
            return None
        message = self._in_hand.take_alone(self._waiting, self._boot_ns)
        if message is not None:
            self._turn_left = left
            self.current = message
        return message

    def ack_hand(self, messages: list[Message]) -> bool:
        """Ack the messages of the hand; see `InHand`."""
        return self._in_hand.ack_hand(messages)

    def _take_one(self) -> Message | None:
        """Take a message that the user may have now, or return None if the messages that were
        checked must wait.
        """
        if not self._waiting and self._stored:
            self._open_stored()
        now_ns = self._boot_ns()
        while (
            message := self._in_hand.first(self._waiting, now_ns, ordered=self._ordered)
        ) is not None:
            client: PullClient = message.delivery  # type: ignore[assignment]
            if now_ns < client.deadline_ns and not self._paused and self._filtering is None:
                client.taken(message)
                return message
            if self._give([message], now_ns):
                return message
        return None

    def _open_stored(self) -> None:
        """Open the next batch, which stays if this raises; messages whose key was parked meanwhile
        are parked too.
        """
        batch = self._stored[0]
        messages = batch.messages()
        self._stored.popleft()
        self._sorted = self._sorted or not self._waiting
        client: PullClient = batch.client  # type: ignore[assignment]
        self._waiting.extend(client.divert(messages))

    def _take(self, count: int) -> list[Message] | None:
        """Take up to `count` messages that the user may have now, or return None if something must
        happen first.
        """
        while self._stored and len(self._waiting) < count:
            self._open_stored()
        now_ns = self._boot_ns()
        if self._sorted and not self._paused and self._filtering is None:
            together = self._in_hand.take_many_unregistered(self._waiting, count, now_ns)
            if together is not None:
                return together
        messages = self._in_hand.collect(self._waiting, count, now_ns, ordered=self._ordered)
        taken: list[Message] = []
        for _, run in groupby(messages, _delivery):
            taken += self._give(list(run), now_ns)
        self._held_back.clear()
        return taken if messages or self._waiting or self._stored else None

    def _give(self, messages: list[Message], now_ns: int) -> list[Message]:
        """
        Return the messages of one delivery that the user gets.

        They are none if the lease has ended or the partition is paused, and only those that the
        user wants.
        """
        if self._held_back:
            messages = [message for message in messages if id(message) not in self._held_back]
            if not messages:
                return []
        first = messages[0]
        client: PullClient = first.delivery  # type: ignore[assignment]
        if now_ns >= client.deadline_ns:
            client.forget(len(messages))
        elif self._paused and client.leased_id in self._paused:
            self._paused[client.leased_id] += messages
        else:
            if self._filtering is not None:
                messages = self._wanted(messages, client, self._filtering)
            client.taken_all(messages)
            return messages
        self.acked_again(messages)  # those that wait for them are next, and left out too
        return []

    def _wanted(
        self, messages: list[Message], client: PullClient, filtering: Filtering
    ) -> list[Message]:
        """Return the messages that the user wants; the others are acked, or given back if their
        filter failed.
        """
        return [
            message
            for message in messages
            if id(message) not in self._held_back and self._wants(message, client, filtering)
        ]

    def _wants(self, message: Message, client: PullClient, filtering: Filtering) -> bool:
        """Return True if the user wants the message; if not, it is acked, or given back if its
        filter failed.
        """
        try:
            if filtering.wanted.matches(message):
                return True
        except FilterError as error:
            self._filter_failed(message, client, error, filtering)
            return False
        client.done(message.offset)
        self.acked_again([message])
        return False

    def _filter_failed(
        self, message: Message, client: PullClient, error: FilterError, filtering: Filtering
    ) -> None:
        failure = self._failing.failure(error, message.attempt)
        if self._failing.is_last_try(message):
            _, *behind = self._set_aside(message, failure)
            self._held_back.update(map(id, behind))
            return
        client.note_failed(message, failure)
        wait_ms = filtering.backoff.wait_ms(message.attempt, filtering.rng)
        now_ns = self._boot_ns()
        kind = type(error).__name__
        line = self._handler_log.failed(message, kind, now_ns // 1_000_000, wait_ms)
        if line is not None:
            log.warning("%s: %s", line.text, error.message)
        _, *behind = self._in_hand.give_back(message, now_ns + wait_ms * 1_000_000)
        self._held_back.update(map(id, behind))
        message.attempt += 1

    async def _wait_for_work(self, due_ns: int | None) -> None:
        """Wait for a message to arrive, or to be due again, at `due_ns` of the boot clock."""
        self._work.clear()
        if self.on_idle is not None:
            self.on_idle()
        left_s = None if due_ns is None else max(0.0, (due_ns - self._boot_ns()) / 1e9)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._work.wait()

    # ── shared groups ─────────────────────────────────────────────────────────────────────────────
    @property
    def spare(self) -> int:
        """Return the number of further messages that the user would take now; if it is negative,
        that many wait until it asks.
        """
        return (self._asks_for if self._asked.is_set() else 0) - len(self._waiting)

    def held(self, client: PullClient) -> list[Message]:
        """Return the client's messages that the program was given last, if it has not acked
        them.
        """
        held = self._given or ([] if self.current is None else [self.current])
        return [
            each
            for each in held
            if client_of(each) is client and each.delivery.has_taken(each)  # type: ignore[union-attr]
        ]

    def passed_over(self, message: Message) -> None:
        """Count a failed try of a message that the program has not acked while it was in flight,
        and which is delivered again.
        """
        failure = self._failing.passed_over(message.attempt)
        if self._failing.is_last_try(message):
            self._set_aside(message, failure)
            return
        client: PullClient = message.delivery  # type: ignore[assignment]
        client.note_failed(message, failure)
        now_ms = self._boot_ns() // 1_000_000
        warn(self._handler_log.failed(message, failure.kind, now_ms, 0, asked_for=failure.text))
        client.forget(1)
        self.acked_again([message])

    # ── messages given back ───────────────────────────────────────────────────────────────────────
    def nack(
        self, message: Message, after_s: float, error: BaseException | None = None
    ) -> list[Message]:
        """
        Hand a message out again in `after_s`, and later ones of its key only once it is acked; or
        set it aside.

        Returns:
            The message, and those of its key that the user was given after it: they are delivered
            again, or are parked.
        """
        wait_ms = self._failing.asked_ms(wait_ms_of(after_s), message.attempt)
        failure = self._failing.given_back(message.attempt, error)
        if self._failing.is_last_try(message):
            return self._set_aside(message, failure, wait_ms)
        message.delivery.note_failed(message, failure)  # type: ignore[union-attr]
        now_ns, sealed = self._boot_ns(), client_of(message).sealed
        asked = None if error else failure.text
        named = (message, failure.kind, now_ns // 1_000_000, wait_ms)
        warn(self._handler_log.failed(*named, asked_for=asked, sealed=sealed))
        back = self._in_hand.give_back(message, now_ns + wait_ms * 1_000_000)
        for each in back:
            each.attempt += 1
        self._work.set()
        return back

    def put_back(self, taken: Message | list[Message] | ArrowBatch) -> None:
        """Take back messages that the program never saw; see `taken.put_back`."""
        self._quick = False
        self._alone = False
        self.current = None
        put_back(taken, self._arrow, self._in_hand, self._boot_ns())
        self._work.set()

    def _set_aside(self, message: Message, failure: Failure, asked_ms: int = 0) -> list[Message]:
        """Park a message that failed too often, or bury it, and return it and those that the user
        no longer has.
        """
        client: PullClient = message.delivery  # type: ignore[assignment]
        parks = self._ordered and self._failing.parks(message)
        named = (message, failure.kind, self._boot_ns() // 1_000_000)
        pause_ms = self._failing.pause_ms(message, asked_ms)
        warn(self._handler_log.set_aside(*named, with_key=parks, pause_ms=pause_ms))
        self._work.set()
        if not parks:
            if pause_ms is None:
                client.bury(message, failure)
            else:
                client.retry(message, failure, pause_ms)
            later = self._in_hand.give_back_behind(message)
            self.acked_again([message])
            return [message, *later]

        def behind(other: Message) -> bool:
            return other.key == message.key and are_parked_together(message, other)

        back, others, waiting = self._in_hand.take_out(message, behind)
        waiting += [each for each in self._waiting if behind(each)]
        self._waiting = deque(each for each in self._waiting if not behind(each))
        for partition_id, held in self._paused.items():
            waiting += [each for each in held if behind(each)]
            self._paused[partition_id] = [each for each in held if not behind(each)]
        client.park(message, failure, sorted([*back[1:], *waiting], key=_by_offset))
        return [*back, *others]

    def acked_again(self, messages: Sequence[Message]) -> None:
        """Let later messages of their keys be handed out."""
        if self._handler_log.in_trouble:
            now_ms = self._boot_ns() // 1_000_000
            for message in messages:
                warn(self._handler_log.handled(message, now_ms))
        if self._in_hand.acked_all(messages):
            self._work.set()

    @property
    def lying(self) -> Message | None:
        """Return the message that lies ready now; see `InHand`."""
        return self._in_hand.lying(self._boot_ns())

    # ── partitions that the user does not want now ────────────────────────────────────────────────
    def pause(self, partition_id: int) -> None:
        """Hand no message of a partition out until `resume`."""
        self._alone = False
        held = self._paused.setdefault(partition_id, [])
        held += [message for message in self._waiting if leased_id_of(message) == partition_id]
        self._waiting = deque(each for each in self._waiting if leased_id_of(each) != partition_id)

    def resume(self, partition_id: int) -> None:
        """Hand messages of a partition out again."""
        held = self._in_hand.hold(sorted(self._paused.pop(partition_id, ()), key=_by_offset))
        self._waiting.extendleft(reversed(held))
        self._sorted = False
        self._work.set()

    def _take_over(self, task: asyncio.Task[Any] | None) -> None:
        """
        Let `task` iterate in place of the earlier task.

        A task that runs only `next`, as `asyncio.wait_for` creates on Python 3.11, takes a message
        for the task that awaits it.

        Raises:
            UsageError: the consumer was opened in another event loop.
            UsageError: another task waits for a message, or it runs and has not acked a message
                that it took.
        """
        self._check()
        if self._asked.is_set():
            raise UsageError(
                Reason.OTHER_TASK, "another task waits for the next message of this consumer"
            )
        if self._task is not None and not self._task.done():
            if task is not None and getattr(task.get_coro(), "cr_code", None) in NEXTS:
                return
            if unacked := self.unacked:
                raise UsageError(
                    Reason.OTHER_TASK,
                    f"another task iterates over this consumer: it took "
                    f"{counted(unacked, 'message')} "
                    "that it has not acked",
                    unacked=unacked,
                )
        self._task = task

    async def quiesce(self, client: PullClient) -> None:
        """
        Forget the waiting messages of `client`'s partition, and wait until the user is done with
        the taken ones.

        The wait ends when all of them are acked, when the user asks for the next message after
        `handover_ms` or after the end of the lease, or after `leave`.
        """
        kept = deque(each for each in self._waiting if client_of(each) is not client)
        stored = deque(batch for batch in self._stored if batch.client is not client)
        opened = sum(batch.count for batch in self._stored if batch.client is client)
        given_back = self._in_hand.drop(client.is_of)
        paused = len(self._paused.pop(client.partition_id, ()))
        client.forget(len(self._waiting) - len(kept) + opened + given_back + paused)
        self._waiting = kept
        self._stored = stored
        self._arrow.drop(client)
        for line in self._handler_log.given_up_all(client.is_of, self._boot_ns() // 1_000_000):
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
                if await race.first(left_ms):  # the lease may have been renewed meanwhile
                    return
            if await race.first(0) or self._asked.is_set():
                return
            self._quick = self._alone = False
            race.start(self._asked.wait())
            if not await race.first(HANDOVER_WARN_MS):
                log.warning(
                    "%s moves to another consumer, but %d of its messages are not acked yet; it is "
                    "handed over once they are acked or the next message is requested",
                    client.log_name,
                    client.outstanding,
                )
                await race.first()

    async def finish(self) -> None:
        """Hand out nothing more, and wait up to `handover_ms` for the loop body to ask for the next
        message.
        """
        self._closed = True
        self._quick = self._alone = False
        self._work.set()
        if self._asked.is_set():
            return
        async with Race() as race:
            race.start(self._asked.wait())
            await race.first(self._handover_ms)

    def look(self) -> None:
        """Log and report messages that the program holds for long, and log a consumer that is never
        iterated. Call it about every second.
        """
        now_ms = self._boot_ns() // 1_000_000
        self._held.look(self.current, self._in_hand, self._failing, now_ms)
        if self.current is not None and self.current is self._seen:
            self._in_hand.unregistered.register()  # its ack is to be logged
            line = self._handler_log.running(self._seen, self._seen_ms, now_ms)
        else:
            line = None if self._seen is None else self._handler_log.stopped(self._seen, now_ms)
            self._seen = self.current
            self._seen_ms = now_ms
        warn(line)
        warn(self._handler_log.summary(now_ms))
        if not self._iterated and (self._waiting or self._stored):
            first = (self._waiting or self._stored[0].messages())[0]
            self._watch.not_iterated(first, self._here, now_ms)
        waits = self._asked.is_set() and not self._waiting
        self._watch.not_acked(self._in_hand if waits else None, self._manner, now_ms)

    def leave(self) -> None:
        """Note that the consumer closes: no hand-over waits for taken messages any more."""
        self._leaving.set()

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._error = error
        self._quick = self._alone = False
        self._work.set()

    async def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._quick = False
        self._alone = False
        self._waiting.clear()
        self._stored.clear()
        self._in_hand.close()
        self._work.set()


_by_offset = attrgetter("offset")
_delivery = attrgetter("delivery")
NEXTS = {Stream.next.__code__}
"""The code of coroutines that take a message for the task that awaits them."""
