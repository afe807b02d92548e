"""What a consumer can be told, with the reasons for the defaults.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.backoff import Backoff
from ..protocol.errors import ConfigError
from ..protocol.limits import (
    ACK_RANGES_MAX,
    HOLD_MS_MAX,
    PULL_BYTES_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
)
from ..protocol.routing import ConsumeStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """
    Raises:
        ConfigError: values that cannot work together, all of them at once.
    """

    ttl_ms: int = TTL_MS_DEFAULT
    """A consumer that was silent for so long loses its partitions."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """How the group consumes, or its name; the group's first consumer decides it."""
    concurrency: int = 16
    """Handlers at once, each on another order key."""
    pull_bytes: int = 1 << 20
    pull_wait_ms: int = 5_000
    buffer_messages: int = 20_000
    """Per partition, pulled and not yet handled; above it pulling pauses.  It pauses as well while what is handled
    has more gaps than a cursor keeps (`ACK_RANGES_MAX`)."""
    in_flight_messages: int = 200
    """SHARED: per partition, handed out to this consumer and not yet handled.  The others do not see these meanwhile.
    Messages that failed and wait for their next try do not count, up to `buffer_messages` of them."""
    in_flight_ms: int = 60_000
    """SHARED: a message not acked for so long goes to another consumer too.  Longer than waiting and handling take.
    Those of a consumer that its broker has not heard for `ttl_ms` do so at once."""
    ack_linger_ms: int = 20
    """Acks gather so long before one request carries them."""
    handover_ms: int = 5_000
    """Running handlers may take so long to end when their partition goes to another consumer; then they are
    cancelled. Never longer than the lease.  One that goes on all the same keeps its partition here until it ends.
    Iteration: acks of what was passed over may take so long; the body of the loop is waited for."""
    call_timeout_ms: int = 5_000
    backoff: Backoff = field(default_factory=Backoff)
    handler_backoff: Backoff = field(default_factory=lambda: Backoff(first_ms=100, max_ms=30_000))
    """A failing message is tried again in place, ever more slowly; later ones of its key wait, and it holds no worker."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be in [{low}, {high}], not {getattr(self, name)!r:.40}"
            for name, low, high in (
                ("ttl_ms", TTL_MS_MIN, TTL_MS_MAX),
                ("concurrency", 1, 10_000),
                ("pull_bytes", 1, PULL_BYTES_MAX),
                ("pull_wait_ms", 0, 30_000),
                ("buffer_messages", 1, 1_000_000),
                ("in_flight_messages", 1, 100_000),
                ("in_flight_ms", 100, HOLD_MS_MAX),
                ("ack_linger_ms", 0, 10_000),
                ("handover_ms", 0, 600_000),
                ("call_timeout_ms", 10, 600_000),
            )
            if not (isinstance(getattr(self, name), int) and low <= getattr(self, name) <= high)
        ]
        if not problems and self.concurrency > ACK_RANGES_MAX:
            problems.append(
                f"concurrency above {ACK_RANGES_MAX} could leave more gaps than a cursor keeps"
            )
        try:
            object.__setattr__(self, "strategy", ConsumeStrategy(self.strategy))
        except ValueError:
            spelled = " or ".join(ConsumeStrategy)
            problems.append(f"strategy must be {spelled}, not {self.strategy!r:.40}")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def margin_ms(self) -> int:
        """How much earlier than the metaserver this side ends its lease."""
        return max(50, self.ttl_ms // 10)
