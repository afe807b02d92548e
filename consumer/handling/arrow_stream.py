"""
Chooses the next Arrow batch: one per partition at a time, in offset order.

    put ─▶ stored, by partition ─▶ take ─▶ in hand ─acked─▶ the partition's next batch
                                    ▲         │
                                    ╰─────────╯ requeue: handed out again when it is due

Invariant
    While a batch of a partition is in hand, no later message of the partition is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..delivery.pulled_batch import PulledBatch
from ..pulling.pull_client import PullClient
from .arrow_batch import ArrowBatch, build_arrow_batch


class _Partition:
    """The batches of one partition: waiting, in hand, and nacked."""

    __slots__ = ("due_ns", "requeued_batch", "unacked_batch", "stored")

    def __init__(self) -> None:
        self.stored: deque[PulledBatch] = deque()
        self.unacked_batch: ArrowBatch | None = None
        self.requeued_batch: ArrowBatch | None = None
        self.due_ns = 0
        """When `requeued_batch` may be handed out again, on the boot clock."""


class ArrowStream:
    """
    Hands out the Arrow batches of a consumer without a handler.

    Args:
        boot_ns: the boot clock.
        wake: called when a batch may be available.
    """

    def __init__(self, *, boot_ns: Callable[[], int], wake: Callable[[], None]) -> None:
        self._boot_ns = boot_ns
        self._wake = wake
        self._partitions: dict[PullClient, _Partition] = {}
        self._round_robin: deque[PullClient] = deque()

    @property
    def waiting(self) -> int:
        """The number of messages that are not in hand."""
        return sum(map(_waiting, self._partitions.values()))

    def put(self, batch: PulledBatch) -> None:
        """Add a batch; a partition's batches must be added in offset order. Rows of parked keys are
        parked.
        """
        client: PullClient = batch.client  # type: ignore[assignment]
        client.park_rows_of_parked_keys(batch)
        if not batch.count:
            return
        if client not in self._partitions:
            self._partitions[client] = _Partition()
            self._round_robin.append(client)
        self._partitions[client].stored.append(batch)

    def put_all(self, batches: deque[PulledBatch]) -> None:
        """Move all batches out of `batches`, in order. If the parked rows of a batch cannot be
        read, it stays there and the error is raised.
        """
        while batches:
            self.put(batches[0])
            batches.popleft()

    def take(self) -> ArrowBatch | None:
        """
        Return the next batch, which is then in hand; None if none is available.

        Raises:
            CorruptBatchError: a partition's next batch cannot be unpacked; it stays ahead of the
                later ones.
        """
        now_ns = self._boot_ns()
        for _ in range(len(self._round_robin)):
            client = self._round_robin[0]
            self._round_robin.rotate(-1)
            partition = self._partitions[client]
            if partition.unacked_batch is not None or client.paused:
                continue
            if now_ns >= client.deadline_ns:
                self._forget(client, partition)
                continue
            batch = self._next_batch(partition, now_ns)
            if batch is not None:
                partition.unacked_batch = batch
                return batch
        return None

    def _next_batch(self, partition: _Partition, now_ns: int) -> ArrowBatch | None:
        returned = partition.requeued_batch
        if returned is not None:
            if now_ns < partition.due_ns:
                return None
            partition.requeued_batch = None
            returned.attempt += 1
            return returned
        if not partition.stored:
            return None
        batch, consumed = build_arrow_batch(list(partition.stored), self)
        for _ in range(consumed):
            partition.stored.popleft()
        return batch

    def next_ns(self) -> int | None:
        """Return when a requeued batch is due; None if there is none in a partition that is not
        paused.
        """
        return min(
            (
                partition.due_ns
                for client, partition in self._partitions.items()
                if partition.requeued_batch is not None and not client.paused
            ),
            default=None,
        )

    def is_unacked(self, batch: ArrowBatch) -> bool:
        """Return True if the batch is in hand."""
        partition = self._partitions.get(batch._client)
        return partition is not None and partition.unacked_batch is batch

    def is_requeued(self, batch: ArrowBatch) -> bool:
        """Return True if the batch was nacked and has not been handed out again."""
        partition = self._partitions.get(batch._client)
        return partition is not None and partition.requeued_batch is batch

    def record_ack(self, batch: ArrowBatch) -> None:
        """Record that the batch in hand is acked."""
        self._partitions[batch._client].unacked_batch = None
        self._wake()

    def requeue(self, batch: ArrowBatch, wait_ms: int) -> None:
        """Take back the batch in hand, for at least `wait_ms`."""
        partition = self._partitions[batch._client]
        partition.unacked_batch = None
        partition.requeued_batch = batch
        partition.due_ns = self._boot_ns() + wait_ms * 1_000_000
        self._wake()

    def put_back(self, batch: ArrowBatch) -> None:
        """Take back a batch that never reached the program. It is handed out again at once, as the
        same attempt.
        """
        if self.is_unacked(batch):
            self.requeue(batch, 0)
            batch.attempt -= 1

    def drop(self, client: PullClient) -> None:
        """Drop the messages of a partition that are not in hand."""
        partition = self._partitions.pop(client, None)
        if partition is not None:
            self._round_robin.remove(client)
            self._forget(client, partition)

    @staticmethod
    def _forget(client: PullClient, partition: _Partition) -> None:
        count = _waiting(partition)
        partition.stored.clear()
        partition.requeued_batch = None
        if count:
            client.discard_in_flight(count)


def _waiting(partition: _Partition) -> int:
    returned = 0 if partition.requeued_batch is None else len(partition.requeued_batch)
    return returned + sum(batch.count for batch in partition.stored)
