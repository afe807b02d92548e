"""
Runs batch handlers: workers take batches instead of messages, and retry failed batches whole or in
halves.

    batch fails ─▶ once more, whole ─▶ fails again ─▶ two halves, by key ─▶ … ─▶ one message
         │                                                failed too often: set aside ◀─╯
         ╰─ requests a retry (`Retry`, NACK): always whole; under RETRY each of its
             messages is set aside for that retry

Invariants
    The messages of a batch are acked together, when its handler has returned.
    Later messages of a failed batch's keys wait for it; all other keys proceed.
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
from .failing import FailureRules
from .handler_log import HandlerLog
from .handlers import BatchHandler
from .lanes import Lanes, UnopenedBatch
from .not_acked import Retry, only_retry
from .workers import MESSAGES_PER_TURN, Workers


class BatchWorkers(Workers):
    """
    A pool of `concurrency` workers that share one set of lanes and take one batch at a time.

    Args:
        max_records: the maximum number of messages in a batch.
        max_wait_ms: how long a message may wait for its batch to fill, in milliseconds.
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
        failure_rules: FailureRules | None = None,
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
            failure_rules=failure_rules,
        )
        self._messages_per_handler = max_records
        self._messages_per_turn = max(1, MESSAGES_PER_TURN // max_records)
        self._max_wait_s = max_wait_ms / 1000
        self._batch_lanes = BatchLanes(
            max_records=max_records,
            lingers=max_wait_ms > 0,
            ordered=ordered,
            wake=self._idle_workers.wake_all,
        )
        self._lanes = cast(Lanes, self._batch_lanes)  # workers treat its batches as messages
        self._handler_log = HandlerLog(runner="handler of batches", ordered=ordered)

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition, in offset order."""
        if messages:
            self._schedule_linger_end(messages[0].partition_id, self._batch_lanes.put(messages))
        self._watch_timeouts()
        self._idle_workers.wake_all()

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch of one partition, which is opened when its messages are next."""
        self._schedule_linger_end(batch.client.partition_id, self._batch_lanes.put_batch(batch))
        self._watch_timeouts()
        self._idle_workers.wake_all()

    def _schedule_linger_end(self, partition_id: int, linger_id: int) -> None:
        """Schedule the end of a wait for a full batch; does nothing if `linger_id` is 0."""
        if linger_id:
            loop = asyncio.get_running_loop()
            loop.call_later(self._max_wait_s, self._on_linger_end, partition_id, linger_id)

    def _on_linger_end(self, partition_id: int, linger_id: int) -> None:
        if not self._closed:
            self._schedule_linger_end(
                partition_id, self._batch_lanes.end_linger(partition_id, linger_id)
            )
            self._watch_timeouts()
        self._idle_workers.wake_all()

    def _schedule_retry(self, message: Message, error: BaseException, now_ns: int) -> None:
        batch = cast(Batch, message)
        is_requested = isinstance(only_retry(error) or error, Retry)
        other_half = None
        if batch.attempt >= WHOLE_TRIES and not is_requested:
            other_half = self._batch_lanes.split(batch)
        super()._schedule_retry(message, error, now_ns)
        self._batch_lanes.fail(batch)
        if other_half is not None:
            failure = self._failure_rules.build_failure(
                only_retry(error) or error, other_half.attempt
            )
            other_half.report_failure(cast(Message, other_half), failure)
            self._batch_lanes.fail(other_half)
            self._schedule_soon(other_half)

    def _failed_message(self, message: Message) -> Message | None:
        batch: Any = message
        if not isinstance(batch, Batch):
            return message  # from a batch that is set aside whole
        return batch.messages[0] if len(batch) == 1 else None

    def _is_last(self, message: Message, error: BaseException) -> bool:
        is_requested = isinstance(only_retry(error) or error, Retry)
        if (
            is_requested
            and self._failure_rules.policy is FailurePolicy.RETRY
            and not self._failure_rules.in_place
        ):
            return True
        return super()._is_last(message, error)

    def _set_aside(self, message: Message, error: BaseException) -> bool:
        batch = cast(Batch, message)
        if len(batch) == 1:
            return super()._set_aside(message, error)
        for each in batch.messages:  # under RETRY, each one separately: none blocks its key
            super()._set_aside(each, error)
        return False

    def _schedule_soon(self, batch: Batch) -> None:
        """Retry the other half of a failed batch after the shortest pause."""
        now_ns = self._boot_ns()
        due_ns = now_ns + self._backoff.wait_ms(1, self._rng) * 1_000_000
        message = cast(Message, batch)
        self._retries.add(message, due_ns)
        self._count_retrying(message, 1)
        self._set_retry_timer(due_ns, now_ns)

    def _messages_of(self, message: Message) -> list[Message]:
        return cast(Batch, message).messages

    def _count_retrying(self, message: Message, sign: int) -> None:
        batch = cast(Batch, message)
        cast(PullClient, batch.client).add_retrying(sign * len(batch))

    def _drop(self, client: PullClient) -> None:
        now_ms = self._now_ms()
        failed = self._retries.drop(lambda batch: cast(Batch, batch).client is client)
        self._retries.resume(client.partition_id)
        count, due_batches = self._batch_lanes.drop(client.partition_id, client.has_handed_out)
        for message in failed:
            self._count_retrying(message, -1)
            self._batch_lanes.release(cast(Batch, message))
        for batch in due_batches:
            self._retries.end(cast(Message, batch), self._boot_ns())
        batches = [*cast(list[Batch], failed), *due_batches]
        for batch in batches:
            self._log_line(self._handler_log.record_given_up(cast(Message, batch), now_ms))
        client.discard_in_flight(
            count + sum(map(len, batches)) + self._batch_lanes.drop_batches(client)
        )
        if self._lanes.has_waiting:
            self._idle_workers.wake_all()
        self._start_due_retries()
