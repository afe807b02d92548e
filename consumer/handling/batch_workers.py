"""Runs batch handlers: workers take batches in place of messages, and try failed ones again, whole
or in halves.

    batch fails ─▶ once more, whole ─▶ fails again ─▶ two halves, by key ─▶ … ─▶ one message
         │                                                failed too often: set aside ◀─╯
         ╰─ asks for another try (`Retry`, NACK): always whole; under RETRY each of its
             messages is set aside for that try

Invariants
    Messages of a batch are acked together, when its handler has returned.
    Later messages of the keys of a failed batch wait for it; all other keys proceed.
    Halves of a failed batch have different keys, or the newer half waits for the older one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.message import Message
from ..pulling.pull_client import PullClient
from ..settings import FailurePolicy
from .batch import Batch
from .batch_lanes import WHOLE_TRIES, BatchLanes
from .failing import Failing
from .handler_log import HandlerLog
from .handlers import BatchHandler
from .lanes import Lanes, UnopenedBatch
from .not_acked import Retry, only_retry
from .workers import MESSAGES_PER_TURN, Workers


class BatchWorkers(Workers):
    """
    `concurrency` workers over one set of lanes, each with a batch at a time.

    Args:
        max_records: the most messages of a batch.
        max_wait_ms: the milliseconds that a message may wait for others of its batch.
        others: see `Workers`.
    """

    def __init__(
        self,
        handler: BatchHandler[Any],
        *,
        max_records: int,
        max_wait_ms: int,
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
        def handle(batch: Message) -> Any:
            return handler(cast(Batch, batch).messages.copy())

        super().__init__(
            handle,
            concurrency=concurrency,
            handover_ms=handover_ms,
            backoff=backoff,
            clock=clock,
            rng=rng,
            on_crash=on_crash,
            handler_timeout_ms=handler_timeout_ms,
            cancels=cancels,
            ordered=ordered,
            acks_each=acks_each,
            failing=failing,
        )
        self._per_handler = max_records
        self._per_turn = max(1, MESSAGES_PER_TURN // max_records)
        self._max_wait_s = max_wait_ms / 1000
        self._batch_lanes = BatchLanes(
            max_records=max_records,
            waits=max_wait_ms > 0,
            ordered=ordered,
            wake=self._work.wake_all,
        )
        self._lanes = cast(Lanes, self._batch_lanes)  # it takes and gives batches as messages
        self._handler_log = HandlerLog(runner="handler of batches", ordered=ordered)

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        if messages:
            self._wait(messages[0].partition_id, self._batch_lanes.put(messages))
        self._watch_timeouts()
        self._work.wake_all()

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch of one partition, which is opened when its messages are next."""
        self._wait(batch.client.partition_id, self._batch_lanes.put_batch(batch))
        self._watch_timeouts()
        self._work.wake_all()

    def _wait(self, partition_id: int, number: int) -> None:
        """Let a wait of the lanes end in time; 0: none has begun."""
        if number:
            loop = asyncio.get_running_loop()
            loop.call_later(self._max_wait_s, self._ripen, partition_id, number)

    def _ripen(self, partition_id: int, number: int) -> None:
        if not self._closed:
            self._wait(partition_id, self._batch_lanes.ripen(partition_id, number))
            self._watch_timeouts()
        self._work.wake_all()

    def _wait_for_try(self, message: Message, error: BaseException, now_ns: int) -> None:
        batch = cast(Batch, message)
        asked = isinstance(only_retry(error) or error, Retry)
        other = None
        if batch.attempt >= WHOLE_TRIES and not asked:
            other = self._batch_lanes.split(batch)
        super()._wait_for_try(message, error, now_ns)
        self._batch_lanes.fail(batch)
        if other is not None:
            failure = self._failing.failure(only_retry(error) or error, other.attempt)
            other.note_failed(cast(Message, other), failure)
            self._batch_lanes.fail(other)
            self._try_soon(other)

    def _failed_message(self, message: Message) -> Message | None:
        batch: Any = message
        if not isinstance(batch, Batch):
            return message  # one of a batch that is set aside whole
        return batch.messages[0] if len(batch) == 1 else None

    def _is_last(self, message: Message, error: BaseException) -> bool:
        asked = isinstance(only_retry(error) or error, Retry)
        if asked and self._failing.policy is FailurePolicy.RETRY and not self._failing.in_place:
            return True
        return super()._is_last(message, error)

    def _set_aside(self, message: Message, error: BaseException) -> bool:
        batch = cast(Batch, message)
        if len(batch) == 1:
            return super()._set_aside(message, error)
        for each in batch.messages:  # under RETRY each alone: none of them holds its key
            super()._set_aside(each, error)
        return False

    def _try_soon(self, batch: Batch) -> None:
        """Try the other half of a failed batch again after the shortest pause."""
        now_ns = self._boot_ns()
        due_ns = now_ns + self._backoff.wait_ms(1, self._rng) * 1_000_000
        tried = cast(Message, batch)
        self._retries.wait(tried, due_ns)
        self._count_retrying(tried, 1)
        self._wake_at(due_ns, now_ns)

    def _messages_of(self, message: Message) -> list[Message]:
        return cast(Batch, message).messages

    def _count_retrying(self, message: Message, sign: int) -> None:
        batch = cast(Batch, message)
        cast(PullClient, batch.client).add_retrying(sign * len(batch))

    def _drop(self, client: PullClient) -> None:
        now_ms = self._now_ms()
        failed = self._retries.drop(lambda batch: cast(Batch, batch).client is client)
        self._retries.resume(client.partition_id)
        count, due = self._batch_lanes.drop(client.partition_id, client.is_of)
        for message in failed:
            self._count_retrying(message, -1)
            self._batch_lanes.release(cast(Batch, message))
        for batch in due:
            self._retries.end(cast(Message, batch), self._boot_ns())
        batches = [*cast(list[Batch], failed), *due]
        for batch in batches:
            self._log_line(self._handler_log.given_up(cast(Message, batch), now_ms))
        client.forget(count + sum(map(len, batches)) + self._batch_lanes.drop_batches(client))
        if self._lanes.has_waiting:
            self._work.wake_all()
        self._start_due()
