"""Lists the keys that have messages waiting in a producer: how many, for how long, why, and what to
do about it. Also builds the producer's statistics.

Each key has one entry, at the partition that its oldest message is waiting for. Messages without a
key have one entry per partition; scheduled messages have separate entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import nsmallest

from ..protocol.routing import Partition, logical_partition
from .executor import Executor
from .outgoing_batch import OutgoingBatch
from .send_budget import ProducerStats, SendBudget
from .sender import SubjectSender
from .waiting import NO_ANSWER, NOT_SENT, WaitCause


@dataclass(frozen=True, slots=True)
class WaitingKey:
    """The messages of one key that are neither stored nor given up."""

    subject: str
    key: bytes
    """The key; b"" for messages without a key."""
    messages: int
    size_bytes: int
    """The size of keys, values and properties together, in bytes."""
    sent_at_ns: int
    """When the oldest message was sent, in nanoseconds since 1970, by this machine's wall clock."""
    partition: str | None
    """The name of the partition that the oldest message is waiting for; None for scheduled
    messages, and while the route has no partition for it.
    """
    broker_group: str | None
    """The partition's broker group; for scheduled messages, the broker group that may already keep
    them.
    """
    reason: str
    """Why the oldest message is waiting, as a text for users."""
    advice: str
    """What to do about it, as a text for users; empty while no attempt has failed."""


@dataclass(frozen=True, slots=True)
class WaitingMessages:
    """All messages of a producer that are neither stored nor given up."""

    messages: int
    size_bytes: int
    keys: tuple[WaitingKey, ...]
    """The keys whose oldest messages have waited longest, in that order."""
    more_keys: int
    """The number of keys not listed; `messages` and `size_bytes` include their messages."""


class _KeyEntry:
    """Accumulates the messages of one key."""

    __slots__ = ("batch", "executor", "key", "messages", "sender", "sent_at_ns", "size_bytes")

    def __init__(
        self,
        sender: SubjectSender,
        key: bytes,
        sent_at_ns: int,
        executor: Executor | None,
        batch: OutgoingBatch,
    ) -> None:
        self.sender = sender
        self.key = key
        self.messages = 0
        self.size_bytes = 0
        self.sent_at_ns = sent_at_ns
        self.executor = executor
        self.batch = batch

    def build(self) -> WaitingKey:
        """Return the public entry, with the reason for the oldest message's wait."""
        executor, cause = self.executor, self.sender.held_messages.cause
        if executor is None and self.key:
            executor = _blocking_executor(self.sender.executors, self.key)
        partition: Partition | None = None
        if executor is not None:
            partition = executor.partition
            text = NO_ANSWER if executor is not self.executor or self.batch.send_count else NOT_SENT
            cause = executor.cause if executor.wait_reason else WaitCause(text)
        return WaitingKey(
            self.sender.subject,
            self.key,
            self.messages,
            self.size_bytes,
            self.sent_at_ns,
            None if partition is None else partition.name,
            None if partition is None else partition.broker_group,
            cause.reason,
            cause.advice,
        )


def _blocking_executor(executors: Iterable[Executor], key: bytes) -> Executor | None:
    """Return the executor whose messages must settle before held messages of this key can be sent,
    or None.
    """
    logical_id = logical_partition(key)
    for executor in executors:
        partition = executor.partition
        closed = executor.state.closed or executor.state.refuses
        if closed and partition.range_start <= logical_id < partition.range_end:
            return executor
    return None


def list_waiting_messages(
    senders: Iterable[SubjectSender], limit: int, *, scheduled: Iterable[WaitingKey] = ()
) -> WaitingMessages:
    """
    Count the messages of all `senders` by key, and list the `limit` keys that have waited longest.

    Args:
        scheduled: the entries of scheduled messages, which have no sender.
    """
    entries: list[_KeyEntry | WaitingKey] = [*scheduled]
    for sender in senders:
        keyed_entries: dict[bytes, _KeyEntry] = {}
        keyless_entries: dict[Executor | None, _KeyEntry] = {}
        queued_batches: list[tuple[Executor | None, OutgoingBatch]] = [
            (executor, batch) for executor in sender.executors for batch in executor.batches
        ]
        for executor, batch in [
            *queued_batches,
            *((None, batch) for batch in sender.held_messages.batches),
        ]:
            for key, size, sent_at_ns in batch.iter_unsettled():
                entry = keyed_entries.get(key) if key else keyless_entries.get(executor)
                if entry is None:
                    entry = _KeyEntry(sender, key, sent_at_ns, executor, batch)
                    entries.append(entry)
                    if key:
                        keyed_entries[key] = entry
                    else:
                        keyless_entries[executor] = entry
                entry.messages += 1
                entry.size_bytes += size
                if sent_at_ns < entry.sent_at_ns:
                    entry.sent_at_ns = sent_at_ns
                    entry.executor = executor
                    entry.batch = batch
    oldest = nsmallest(limit, entries, key=lambda entry: entry.sent_at_ns)
    return WaitingMessages(
        messages=sum(entry.messages for entry in entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        keys=tuple(entry.build() if isinstance(entry, _KeyEntry) else entry for entry in oldest),
        more_keys=len(entries) - len(oldest),
    )


def build_stats(
    budget: SendBudget, senders: Collection[SubjectSender], *, throttled_ms: int = 0
) -> ProducerStats:
    """Return the statistics of a producer."""
    executors = [executor for sender in senders for executor in sender.executors]
    open_messages = sum(len(executor.open) for executor in executors)
    counts = budget.counts
    return ProducerStats(
        sent=counts.acked + counts.failed + budget.messages + open_messages,
        acked=counts.acked,
        failed=counts.failed,
        retries=counts.retries,
        waiting={
            name: reason for sender in senders for name, reason in _wait_reasons(sender).items()
        },
        throttled_ms=throttled_ms,
    )


def _wait_reasons(sender: SubjectSender) -> dict[str, str]:
    """Return the reasons for waits, by partition name, or by subject name for held messages."""
    reasons = {
        executor.group.partition_name: executor.wait_reason
        for executor in sender.executors
        if executor.wait_reason
    }
    if sender.held_messages:
        reasons[sender.subject] = sender.held_messages.cause.reason
    return reasons
