"""The settings of a producer, with the reasons for the defaults, and checks of its arguments.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.limits import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    BATCHES_IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
)
from ..protocol.record import Compression
from ..protocol.routing import OrderStrategy
from ..protocol.settings import (
    CALL_TIMEOUT_MS,
    advises_on_unknown_settings,
    check_no_problems,
    field_values,
    is_within,
    range_problem,
    range_problems,
    type_problems,
)
from .placing import Partitioner

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


_SUBJECT = "each message names its subject: producer.send(subject, value)"
ARGUMENT_HINTS = {
    "topic": _SUBJECT,
    "subject": _SUBJECT,
    "bootstrap_servers": "give the addresses of metaservers as the first argument",
    "servers": "give the addresses of metaservers as the first argument",
    "value_serializer": "give codec=",
    "acks": "leave it out: a receipt always means that the message is on the disk",
    "enable_idempotence": "leave it out: a batch sent again is stored once",
}
"""Argument names used by other systems, with their equivalents in keylane."""


@advises_on_unknown_settings("Producer", ARGUMENT_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """
    The settings of a producer.

    Attributes:
        batch_bytes: 1 to 559_104, default 131_072; the maximum size of a batch in bytes. A batch of
            this size is sent immediately; frames of 64 to 256 KiB are fastest.
        batch_count: 1 to 65_536, default 4_096; the maximum number of messages in a batch.
        linger_ms: 0 to 10_000, default 0; how many milliseconds a batch that is not full waits
            while nothing is in flight. While a batch is in flight, the next one fills until the
            reply arrives anyway, so lingering costs latency and gains little.
        in_flight_max: 1 to 8, default 5; the maximum number of batches in flight per partition;
            their sequences preserve the order. Brokers do not recognize repeats of more than 8
            batches.
        queue_bytes: 1_048_576 to 1_099_511_627_776, default 67_108_864; the number of bytes of
            memory for messages queued and in flight: key, value, and 160 bytes for each message. At
            this size the queue is full: `await send(…)` waits, and `send` without an `await` raises
            QueueFullError.
        call_timeout_ms: 10 to 600_000, default 5_000; the timeout of one call to a broker or
            metaserver, in milliseconds.
        leave_after_ms: 0 to 3_600_000, default 5_000; how many milliseconds, counted from the first
            failure, messages of a BEST_TRIED subject stay in a failing partition. A broker that
            restarts within this time causes no reordering. After that, all messages that wait for
            the partition go to another one, in order.
        give_up_after_ms: 0 to 86_400_000, default 60_000; milliseconds after its first failure at
            which a batch of a BEST_TRIED subject is given up, if it has failed at least `tries_min`
            times.
        tries_min: 1 to 1_000, default 10; the number of failed attempts before a batch of a
            BEST_TRIED subject may be given up.
        delivery_timeout_ms: 0 to 9_007_199_254_740_992, default 0; milliseconds after which a
            message that is not acked is given up, unless `send` was given a `timeout_ms`; 0: never.
        close_timeout_ms: 0 to 3_600_000, default 30_000; how many milliseconds `close` waits for
            messages to be stored before it gives up the rest.
        compression: default none; the compression of batches: "none", "zstd" or "lz4". A batch that
            does not become smaller, or that becomes 64 times smaller, is sent uncompressed. All
            sizes and limits apply before compression. Brokers, consumers and Spark jobs of versions
            that do not support compression cannot read compressed batches: upgrade them first.
        backoff: default Backoff(first_ms=50, max_ms=2_000); the pauses between attempts of a
            failing call.

    Raises:
        ConfigError: values are out of range or conflict with each other; the message lists all of
            them.
    """

    batch_bytes: int = 128 * 1024
    batch_count: int = 4_096
    linger_ms: int = 0
    in_flight_max: int = 5
    queue_bytes: int = 64 * 1024 * 1024
    call_timeout_ms: int = 5_000
    leave_after_ms: int = 5_000
    give_up_after_ms: int = 60_000
    tries_min: int = 10
    delivery_timeout_ms: int = 0
    close_timeout_ms: int = 30_000
    compression: str = "none"
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        values = field_values(self)
        problems = range_problems(values, _RANGES) + type_problems(values, {"backoff": Backoff})
        if self.compression not in COMPRESSIONS:
            problems.append(
                f"compression must be one of {', '.join(COMPRESSIONS)}, not "
                f"{self.compression!r:.40}"
            )
        check_no_problems(problems)

    @property
    def large_bytes(self) -> int:
        """The message size, in bytes, above which a message starts a new batch, so that no batch
        exceeds the frame limit.
        """
        return self.batch_bytes // 2


_LATER = (
    "give deliver_at=, as in datetime.now(UTC) + timedelta(seconds=10), and no key: only messages "
    "without one are delivered later"
)
SEND_HINTS = {
    "partition": "the key chooses it; queue= for a static subject",
    "topic": "give subject=",
    "headers": "give properties=",
    "delay": _LATER,
    "delay_s": _LATER,
    "countdown": _LATER,
}
"""Names of `send` arguments in other systems, with their equivalents in keylane."""
_SEND = "use send(subject, value, key=...)"
METHOD_HINTS = {
    "produce": _SEND,
    "publish": _SEND,
    "basic_publish": _SEND,
    "send_and_wait": "use await send(...)",
    "poll": "leave it out: receipts arrive by themselves, and flush() waits for them",
    "begin_transaction": "keylane.outbox sends messages with your database transaction",
}
"""Method names used by other systems, with their equivalents in keylane."""


TIMEOUT_MS_MAX = 1_000_000_000_000


def parse_strategy(strategy: OrderStrategy | str | None) -> OrderStrategy | None:
    """Parse an order strategy.

    Raises:
        ConfigError: the strategy is unknown.
    """
    try:
        return None if strategy is None else OrderStrategy(strategy)
    except ValueError:
        spelled = " or ".join(OrderStrategy)
        raise ConfigError(f"order_strategy is {spelled}, not {strategy!r:.40}") from None


def check_partitioner(partitioner: Partitioner | None) -> Partitioner | None:
    """Return the partitioner if it is valid.

    Raises:
        ConfigError: the partitioner is not callable.
    """
    if partitioner is not None and not callable(partitioner):
        raise ConfigError(f"partitioner must be callable, not {partitioner!r:.40}")
    return partitioner


def check_settings(settings: ProducerSettings | None) -> ProducerSettings:
    """Return the settings, or the defaults for None.

    Raises:
        ConfigError: the argument is not a ProducerSettings.
    """
    if settings is None:
        return ProducerSettings()
    if not isinstance(settings, ProducerSettings):
        raise ConfigError(f"settings must be ProducerSettings, not {settings!r:.40}")
    return settings


def check_timeout(timeout_ms: int) -> int:
    """Return the timeout if it is valid.

    Raises:
        InvalidRequestError: the timeout is out of range.
    """
    if not is_within(timeout_ms, 1, TIMEOUT_MS_MAX):
        raise InvalidRequestError(range_problem("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX))
    return timeout_ms
