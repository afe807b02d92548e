"""Settings of an outbox, with the reasons for the defaults. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX, BATCHES_IN_FLIGHT_MAX
from ..protocol.settings import (
    CALL_TIMEOUT_MS,
    check_no_problems,
    field_values,
    range_problems,
    type_problems,
)

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
    The settings of an outbox.

    Attributes:
        rescan_ms: 10 to 3_600_000, default 1_000; milliseconds between scans of the table for rows
            added by other processes.
        lease_ms: 500 to 600_000, default 10_000; milliseconds after which a process that holds the
            lease but does not renew it is considered dead.
        batch_bytes: 1 to 559_104, default 131_072; the size of a batch in bytes; frames of 64 to
            256 KiB are fastest.
        batch_count: 1 to 65_536, default 4_096; the maximum number of rows in a batch.
        in_flight_max: 1 to 8, default 5; the maximum number of recorded, unsettled batches per
            partition. Brokers do not recognize repeats of more than 8.
        read_rows: 1 to 100_000, default 10_000; the number of rows that one transaction reads and
            records.
        read_bytes: 1 to 1_073_741_824, default 8_388_608; the number of bytes of keys, values and
            properties that one transaction reads; it always reads at least one row.
        call_timeout_ms: 10 to 600_000, default 5_000; the timeout of one call to a broker or
            metaserver, in milliseconds.
        backoff: default Backoff(first_ms=50, max_ms=2_000); the pauses between attempts of a
            failing call. The pauses between requests for a subject that does not exist grow to 60
            s.

    Raises:
        ConfigError: values are out of range; the message lists all of them.
    """

    rescan_ms: int = 1_000
    lease_ms: int = 10_000
    batch_bytes: int = 128 * 1024
    batch_count: int = 4_096
    in_flight_max: int = 5
    read_rows: int = 10_000
    read_bytes: int = 8 * 1024 * 1024
    call_timeout_ms: int = 5_000
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        values = field_values(self)
        check_no_problems(
            range_problems(values, _RANGES) + type_problems(values, {"backoff": Backoff})
        )
