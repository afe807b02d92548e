"""What a producer can be told, with the reasons for the defaults.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.errors import ConfigError
from ..protocol.limits import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    BATCHES_IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """
    Raises:
        ConfigError: values that cannot work together, all of them at once.
    """

    batch_bytes: int = 128 * 1024
    """A batch this large goes out at once. Frames of 64 to 256 KiB are the fast ones."""
    batch_count: int = 4_096
    linger_ms: int = 0
    """How long a batch that is not full may wait while nothing is in flight. While something is in flight a
    batch fills by itself until the answer comes, so waiting longer costs latency and gains little."""
    in_flight_max: int = 5
    """Batches under way per partition; their order is kept by the sequence. At most as many as a broker knows again."""
    queue_bytes: int = 64 * 1024 * 1024
    """Bytes queued and in flight from which on the queue is full: `await send(…)` waits, and `send` without an `await`
    raises QueueFullError."""
    call_timeout_ms: int = 5_000
    leave_after_ms: int = 5_000
    """Messages of a BEST_TRIED subject stay with a partition that fails for so long, from the first failure on; so a
    broker that is restarted within that time reorders nothing.  Then all that wait there go elsewhere, in order."""
    give_up_after_ms: int = 60_000
    """BEST_TRIED gives a batch up so long after its first failure, if it failed `tries_min` times as well."""
    tries_min: int = 10
    """QMQ's number, as the least."""
    delivery_timeout_ms: int = 0
    """A message that is not acked within this time is given up, unless `send` names another `timeout`; 0: never."""
    close_timeout_ms: int = 30_000
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be in [{low}, {high}], not {getattr(self, name)!r:.40}"
            for name, low, high in (
                ("batch_bytes", 1, BATCH_BYTES_MAX // 2),
                ("batch_count", 1, BATCH_COUNT_MAX),
                ("linger_ms", 0, 10_000),
                ("in_flight_max", 1, BATCHES_IN_FLIGHT_MAX),
                ("queue_bytes", MESSAGE_BYTES_MAX, 1 << 40),
                ("call_timeout_ms", 10, 600_000),
                ("leave_after_ms", 0, 3_600_000),
                ("give_up_after_ms", 0, 86_400_000),
                ("tries_min", 1, 1_000),
                ("delivery_timeout_ms", 0, 2**53),
                ("close_timeout_ms", 0, 3_600_000),
            )
            if not (isinstance(getattr(self, name), int) and low <= getattr(self, name) <= high)
        ]
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def large_bytes(self) -> int:
        """A message above this begins a batch of its own, so that no batch outgrows what a frame may carry."""
        return self.batch_bytes // 2
