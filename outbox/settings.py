"""Settings of an outbox, with the reasons for the defaults.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX, BATCHES_IN_FLIGHT_MAX
from ..protocol.settings import CALL_TIMEOUT_MS, kind_problems, range_problems, refuse, values_of

LEASE_MS_MAX = 600_000
_RANGES = {
    "rescan_ms": (10, 3_600_000),
    "lease_ms": (500, LEASE_MS_MAX),
    "batch_bytes": (1, BATCH_BYTES_MAX // 2),
    "batch_count": (1, BATCH_COUNT_MAX),
    "in_flight_max": (1, BATCHES_IN_FLIGHT_MAX),
    "read_rows": (1, 100_000),
    "read_bytes": (1, 1 << 30),
    "call_timeout_ms": CALL_TIMEOUT_MS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """
    Settings of an outbox; sizes in bytes, times in milliseconds.

    Raises:
        ConfigError: values out of their ranges; the text names all of them.
    """

    rescan_ms: int = 1_000
    """How often the table is looked at for rows of other processes, and of processes that have ended."""
    lease_ms: int = 10_000
    """A process that holds the lease and does not renew it for this long is taken for dead."""
    batch_bytes: int = 128 * 1024
    """Frames of 64 to 256 KiB are the fastest."""
    batch_count: int = 4_096
    in_flight_max: int = 5
    """Batches recorded and not settled per partition.  A broker recognizes repeats of no more than these."""
    read_rows: int = 10_000
    """Rows that one transaction reads and records."""
    read_bytes: int = 8 * 1024 * 1024
    """Bytes of keys, values and properties that one transaction reads; one row is read in any case."""
    call_timeout_ms: int = 5_000
    """For one call, of a broker or a metaserver."""
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        values = values_of(self)
        refuse(range_problems(values, _RANGES) + kind_problems(values, {"backoff": Backoff}))
