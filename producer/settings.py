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
    """Bytes queued and in flight before `send` raises QueueFullError."""
    call_timeout_ms: int = 5_000
    tries_max: int = 10
    """BEST_TRIED gives a batch up after so many. QMQ's number."""
    home_tries: int = 3
    """BEST_TRIED tries its own partition so often, where a repeat is recognised, before it goes elsewhere."""
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
                ("tries_max", 1, 1_000),
                ("home_tries", 1, 1_000),
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
