"""Counts what the producers and consumers of this process do, for `keylane.metrics`. Pure.

A client counts for each batch, not for each message. The counts of a closed client are kept as a
sum, so that no total ever falls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, Self, TypeVar
from weakref import ref

from .histogram import Histogram

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
HANDLING_BOUNDS_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Counts(Protocol):
    def add(self, other: Self) -> None: ...


class SendQueue(Protocol):
    """The messages of a producer that are queued or in flight."""

    messages: int
    bytes: int


class Share(Protocol):
    """A consumer's share of its group's work."""

    @property
    def load(self) -> tuple[int, int]:
        """The number of partitions that it has, and of their messages from their cursors on."""
        ...


class ProducerCounts:
    """What a producer counts from its opening on."""

    __slots__ = ("_queue", "acked", "failed", "latency", "retries")

    def __init__(self, queue: SendQueue | None = None) -> None:
        self._queue = None if queue is None else ref(queue)
        self.acked = 0
        """Messages that a broker has confirmed as stored."""
        self.failed = 0
        """Messages that were given up."""
        self.retries = 0
        """How often batches were sent again after a failed attempt."""
        self.latency = Histogram(LATENCY_BOUNDS_S)
        """For each batch, the time from the `send` of its first message to its ack."""

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of messages that are queued or in flight, and their bytes of memory."""
        queue = None if self._queue is None else self._queue()
        return (0, 0) if queue is None else (queue.messages, queue.bytes)

    def add(self, other: ProducerCounts) -> None:
        """Add what another producer has counted."""
        self.acked += other.acked
        self.failed += other.failed
        self.retries += other.retries
        self.latency.add(other.latency)


class ConsumerCounts:
    """What a consumer counts from its opening on."""

    __slots__ = ("_share", "bytes", "failed_tries", "handling", "lost_leases", "messages")

    def __init__(self, share: Share | None = None, handling: Histogram | None = None) -> None:
        self._share = None if share is None else ref(share)
        self.messages = 0
        """Messages that were pulled."""
        self.bytes = 0
        """Their bytes, as batches."""
        self.failed_tries = 0
        """Tries of messages that failed in the handler."""
        self.lost_leases = 0
        self.handling = Histogram(HANDLING_BOUNDS_S) if handling is None else handling
        """For each call of the handler, how long it took."""

    @property
    def load(self) -> tuple[int, int]:
        """See `Share.load`."""
        share = None if self._share is None else self._share()
        return (0, 0) if share is None else share.load

    def add_batch(self, messages: int, size_bytes: int) -> None:
        """Count a batch that was pulled."""
        self.messages += messages
        self.bytes += size_bytes

    def add(self, other: ConsumerCounts) -> None:
        """Add what another consumer has counted."""
        self.messages += other.messages
        self.bytes += other.bytes
        self.failed_tries += other.failed_tries
        self.lost_leases += other.lost_leases
        self.handling.add(other.handling)


C = TypeVar("C", bound=_Counts)
K = TypeVar("K", bound=Hashable)


class CountedClients(Generic[K, C]):
    """The counts of the clients of one kind, by a key. `new_counts` returns empty counts."""

    def __init__(self, new_counts: Callable[[], C]) -> None:
        self._new_counts = new_counts
        self._open: dict[C, K] = {}
        self._closed: dict[K, C] = {}

    def begin(self, key: K, counts: C) -> None:
        """Include the counts of a client that is opened."""
        self._open[counts] = key

    def end(self, counts: C) -> None:
        """Keep the counts of a client that is closed; a repeated call has no effect."""
        key = self._open.pop(counts, None)
        if key is not None:
            self._closed.setdefault(key, self._new_counts()).add(counts)

    def __iter__(self) -> Iterator[tuple[K, list[C]]]:
        """Yield each key, with the counts of its clients. May be called in another thread."""
        by_key: dict[K, list[C]] = {key: [counts] for key, counts in list(self._closed.items())}
        for counts, key in list(self._open.items()):
            by_key.setdefault(key, []).append(counts)
        yield from by_key.items()


PRODUCERS: CountedClients[tuple[()], ProducerCounts] = CountedClients(ProducerCounts)
CONSUMERS: CountedClients[tuple[str, str], ConsumerCounts] = CountedClients(ConsumerCounts)
"""By subject and group."""
