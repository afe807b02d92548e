"""Settings of a producer, with the reasons for the defaults.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.limits import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    BATCHES_IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
)
from ..protocol.record import Compression
from ..protocol.settings import CALL_TIMEOUT_MS, kind_problems, range_problems, refuse, values_of

COMPRESSIONS = tuple(compression.name.lower() for compression in Compression)
_RANGES = {
    "batch_bytes": (1, BATCH_BYTES_MAX // 2),
    "batch_count": (1, BATCH_COUNT_MAX),
    "linger_ms": (0, 10_000),
    "in_flight_max": (1, BATCHES_IN_FLIGHT_MAX),
    "queue_bytes": (MESSAGE_BYTES_MAX, 1 << 40),
    "call_timeout_ms": CALL_TIMEOUT_MS,
    "leave_after_ms": (0, 3_600_000),
    "give_up_after_ms": (0, 86_400_000),
    "tries_min": (1, 1_000),
    "delivery_timeout_ms": (0, 2**53),
    "close_timeout_ms": (0, 3_600_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """
    Settings of a producer; sizes in bytes, times in milliseconds.

    Raises:
        ConfigError: values out of their ranges; the text names all of them.
    """

    batch_bytes: int = 128 * 1024
    """A batch of this size is sent at once. Frames of 64 to 256 KiB are the fastest."""
    batch_count: int = 4_096
    linger_ms: int = 0
    """How long a batch that is not full waits while nothing is in flight. While a batch is in flight, the next one fills
    until the answer comes, so a longer wait costs latency and gains little."""
    in_flight_max: int = 5
    """Batches in flight per partition; the sequence keeps their order. A broker recognizes repeats of no more than these."""
    queue_bytes: int = 64 * 1024 * 1024
    """Bytes queued and in flight from which on the queue is full: `await send(…)` waits, and `send` without an `await`
    raises QueueFullError."""
    call_timeout_ms: int = 5_000
    """For one call, of a broker or a metaserver."""
    leave_after_ms: int = 5_000
    """How long messages of a BEST_TRIED subject stay with a partition that fails, from its first failure on. A broker
    that is restarted within this time reorders nothing. Then all messages that wait there go elsewhere, in order."""
    give_up_after_ms: int = 60_000
    """BEST_TRIED gives a batch up this long after its first failure, if it failed at least `tries_min` times."""
    tries_min: int = 10
    """The number of tries after which QMQ gives up."""
    delivery_timeout_ms: int = 0
    """A message that is not acked within this time is given up, unless `send` was passed a `timeout_ms`; 0: never."""
    close_timeout_ms: int = 30_000
    compression: str = "none"
    """How batches are packed: "none", "zstd" or "lz4". A batch that gets no shorter, or 64 times as short, is sent as it
    is. The sizes here and the limits of messages and batches are those before packing. Brokers, consumers and Spark jobs
    of versions without it cannot read packed batches: they come first."""
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        values = values_of(self)
        problems = range_problems(values, _RANGES) + kind_problems(values, {"backoff": Backoff})
        if self.compression not in COMPRESSIONS:
            problems.append(
                f"compression must be one of {', '.join(COMPRESSIONS)}, not {self.compression!r:.40}"
            )
        refuse(problems)

    @property
    def large_bytes(self) -> int:
        """A larger message begins a new batch, so that no batch exceeds the limit of a frame."""
        return self.batch_bytes // 2
