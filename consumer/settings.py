"""The settings of a consumer, with the reasons for the defaults. Pure."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..protocol.backoff import Backoff
from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.groups import TRIES_LIMIT, FailurePolicy, FullPolicy
from ..protocol.ids import check_name
from ..protocol.limits import (
    ACK_RANGES_MAX,
    IN_FLIGHT_MS_MAX,
    PULL_BYTES_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
)
from ..protocol.message import Message
from ..protocol.routing import ConsumeStrategy
from ..protocol.settings import (
    CALL_TIMEOUT_MS,
    advises_on_unknown_settings,
    check_no_problems,
    field_values,
    range_problems,
    type_problems,
)

__all__ = [
    "RECORDS_MAX",
    "AckMode",
    "ConsumerSettings",
    "FailurePolicy",
    "Filter",
    "FullPolicy",
    "PartitionsCallback",
]

PropertyFilter = Mapping[str, str | bytes]
Filter = PropertyFilter | Callable[[Message[Any]], object]
PartitionsCallback = Callable[[list[int]], Awaitable[None] | None]


class AckMode(enum.StrEnum):
    """When a handled message is acked at its broker."""

    LINGERING = "lingering"
    EACH = "each"
    BEFORE = "before"


CONCURRENCY = 16
RECORDS_MAX = 100_000
HANDLER_TIMEOUT_MS_MAX = 7 * 24 * 3_600_000

_RANGES = {
    "ttl_ms": (TTL_MS_MIN, TTL_MS_MAX),
    "concurrency": (1, 10_000),
    "threads": (0, 1_000),
    "max_records": (1, RECORDS_MAX),
    "max_wait_ms": (0, 60_000),
    "pull_bytes": (1, PULL_BYTES_MAX),
    "pull_wait_ms": (0, 30_000),
    "buffer_messages": (1, 1_000_000),
    "in_flight_messages": (1, 100_000),
    "in_flight_ms": (100, IN_FLIGHT_MS_MAX),
    "ack_linger_ms": (0, 10_000),
    "handler_timeout_ms": (0, HANDLER_TIMEOUT_MS_MAX),
    "handover_ms": (0, 600_000),
    "tries_max": (1, TRIES_LIMIT),
    "retry_tries_max": (1, TRIES_LIMIT),
    "call_timeout_ms": CALL_TIMEOUT_MS,
}


ARGUMENT_HINTS = {
    "topic": "give subject=",
    "topics": "give subject=, or leave it out and add functions with "
    "@consumer.on(subject, group=...)",
    "queue": "give subject=",
    "group_id": "give group=",
    "consumer_group": "give group=",
    "bootstrap_servers": "give the addresses of metaservers as the first argument",
    "servers": "give the addresses of metaservers as the first argument",
    "callback": "give handler=",
    "on_message": "give handler=",
    "auto_offset_reset": "give start=",
    "value_deserializer": "give codec=",
    "auto_ack": "give ack=",
    "enable_auto_commit": "give ack=",
    "prefetch": "give settings=ConsumerSettings(buffer_messages=...); in a shared group "
    "in_flight_messages=...",
    "prefetch_count": "give settings=ConsumerSettings(buffer_messages=...); in a shared group "
    "in_flight_messages=...",
    "max_retries": "give tries_max= with on_failure='park' or 'dead'",
}
"""Names of consumer arguments in other systems, with the equivalents here."""


@advises_on_unknown_settings("Consumer", ARGUMENT_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """
    The settings of a consumer.

    Attributes:
        ttl_ms: 1_000 to 600_000, default 30_000; milliseconds after which a silent consumer loses
            its partitions.
        consume_strategy: the strategy of the group, also accepted as a string: "exclusive", the
            default, or "shared". The group's first consumer decides.
        concurrency: 1 to 10_000, default 16; the number of handlers that run concurrently, each for
            a different order key.
        threads: 0 to 1_000, default 0; the number of threads that call the handler, which is then a
            `def` that may block. Replaces `concurrency`.
        max_records: 1 to 100_000, default 500; the maximum number of messages per call of a batch
            handler.
        max_wait_ms: 0 to 60_000, default 0; how many milliseconds a message may wait until its
            batch has `max_records` messages; 0: a free worker takes the messages that are
            available.
        pull_bytes: 1 to 2_097_152, default 1_048_576; the maximum number of bytes that one pull may
            return.
        pull_wait_ms: 0 to 30_000, default 30_000; how many milliseconds a broker without new
            messages may delay its answer to a pull.
        buffer_messages: 1 to 1_000_000, default 20_000; the maximum number of messages of one
            partition that are pulled but not handled yet. Pulling also pauses while acked messages
            leave more gaps than the broker can store.
        in_flight_messages: 1 to 100_000, default 200; shared groups: the maximum number of messages
            of one partition that are handed out to this consumer and not handled yet; other
            consumers do not get them. Up to `buffer_messages` messages that wait for a retry do not
            count. With slow handlers, fewer are pulled: one per free worker, plus as many as are
            handled in a second.
        in_flight_ms: 100 to 3_600_000, default 60_000; shared groups: milliseconds after which a
            message that waits here for a worker or a retry is handed out again, to any consumer.
            The same applies to a message that a loop has moved past without an ack, which counts as
            a failed attempt. A message is renewed while a handler or the loop body has it. When a
            broker has received nothing from a consumer for `ttl_ms`, the consumer's messages are
            handed out again at once.
        name: default "", which means host and process id; a display name of up to 512 characters.
        broadcast: default False; True, in place of a group: this consumer gets every message that
            is sent while it is open, and leaves no state behind.
        tags: default None; only messages with one of these tags are handled. Others count as
            handled, and brokers skip uncompressed batches without any of them.
        filter: default None; only messages with these properties, for example {"country": "DE"}, or
            those for which a synchronous function of a message returns True, are handled. An error
            in the function counts as a failed attempt. All members of a group need the same tags
            and filter; functions are compared by name, and lambdas by their code, which differs
            between minor versions of Python.
        on_assigned: default None; called with the ids of partitions that were granted, before
            anything is pulled from them.
        on_revoked: default None; called before partitions move to another consumer; without a
            handler, messages in hand may still be acked.
        on_lost: default None; called with the ids of partitions whose leases are lost, so that
            their messages can no longer be acked. The three callbacks may be `async def`, and have
            `handover_ms` to return.
        instance: default ""; a name for this consumer within its group that outlives its process. A
            process that is started under the same name takes over from its predecessor at once,
            with the same partitions and new tokens; a predecessor that is still running ends with
            FencedError. Only exclusive groups have instances.
        ack: when a handled message is acked, also accepted as a string. "lingering", the default: a
            few milliseconds later, together with others; messages that are not acked when a process
            is killed are handled again. "each": the ack is durable at the broker before the next
            message of the key starts, so that at most one message of each key is handled again;
            `await message.ack()` returns when it is durable. A worker then waits for each ack, so a
            larger `concurrency` may be needed. While unhandled older messages leave more gaps than
            a broker can store, it accepts no further acks: the key and `ack()` wait until these
            messages are handled or the lease ends. "before": the ack is durable before the handler
            starts, so that no message is handled twice; a message whose handler fails, or is
            interrupted by a crash or a hand-over, is lost.
        ack_linger_ms: 0 to 10_000, default 20; how many milliseconds acks are collected before they
            are sent in one request.
        handler_timeout_ms: 0 to 604_800_000, default 3_600_000; milliseconds after which a handler
            or batch handler is cancelled, at most a tenth later; this counts as a failed attempt,
            with HandlerTimeoutError. 0 or None: no timeout. With `threads`, the failed attempt is
            counted and logged, but the message stays with its thread until the handler returns,
            because a thread cannot be cancelled. A `def` without `threads` blocks the event loop,
            so it cannot time out. With ack="before" the message is lost, as with other errors.
        handover_ms: 0 to 600_000, default 5_000; how many milliseconds running handlers have to
            return, within the lease, when their partition is handed over; after that, they are
            cancelled. A handler that ignores the cancellation keeps the partition here until it
            returns. In an iteration, this is the time to ack messages that the loop has moved past;
            the running loop body is always awaited.
        on_failure: default None, which means "retry" or "block"; the treatment, also accepted as a
            string, of a message that has failed `tries_max` times, or has killed its process. A
            message fails if its handler raises (a batch handler: when called for this message
            alone), or if the program nacks it. "block", the default of strict subjects: it is
            retried until it succeeds, and later messages of its key wait. "park": its key is set
            aside at the broker with all its messages, in order, until an operator redrives or skips
            them; other keys continue. "dead": the message is set aside alone, and later ones of its
            key continue. Messages without a key are set aside alone, as are all messages of a
            shared group. "retry", the default of exclusive groups on best_tried subjects, and not
            allowed for other exclusive groups: the first failure sets the message aside alone, at
            the broker, for the pauses of `retry_backoff`; after `retry_tries_max` attempts it
            becomes a dead letter. In a shared group, the message waits in place for these pauses,
            but for at most `in_flight_ms`. A value that `keylane group set` has stored for the
            group takes precedence.
        on_full: for "park", also accepted as a string: the treatment of a key that cannot be
            parked, because the group has 10,000 parked keys or 1,000,000 parked messages on the
            partition. "block", the default: its message waits until the key can be parked. "dead":
            the key is set aside with all its later messages, in order, as dead letters, which have
            limits of the same size; messages without a key become dead letters. A value stored for
            the group takes precedence.
        tries_max: 1 to 1_000_000, default 10; the number of attempts of a message, counted durably,
            before `on_failure` applies; without effect under "block". A `Retry` and a returned
            `NACK` count as attempts, but never trigger `on_failure`. A value stored for the group
            takes precedence.
        retry_tries_max: 1 to 1_000_000, default 32; the number of attempts of a message under
            "retry". A value of `tries_max` stored for the group takes precedence.
        call_timeout_ms: 10 to 600_000, default 5_000; the timeout, in milliseconds, of a call to a
            metaserver or broker, in addition to the time that the server itself may wait.
        backoff: default Backoff(first_ms=50, max_ms=2_000); the pauses between attempts of a
            failing call.
        handler_backoff: default Backoff(first_ms=100, max_ms=30_000); the pauses between attempts
            of a failing message. Meanwhile, later messages of its key wait, but workers do not. A
            value stored for the group takes precedence.
        retry_backoff: default Backoff(first_ms=5_000, max_ms=600_000); the pauses under "retry". A
            value stored for the group takes precedence.

    Raises:
        ConfigError: values are out of range or conflict with each other; the message names all of
            them.
    """

    ttl_ms: int = TTL_MS_DEFAULT
    consume_strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    concurrency: int = CONCURRENCY
    threads: int = 0
    max_records: int = 500
    max_wait_ms: int = 0
    pull_bytes: int = 1 << 20
    pull_wait_ms: int = 30_000
    buffer_messages: int = 20_000
    in_flight_messages: int = 200
    in_flight_ms: int = 60_000
    name: str = ""
    broadcast: bool = False
    tags: Collection[str] | None = None
    filter: Filter | None = None
    on_assigned: PartitionsCallback | None = None
    on_revoked: PartitionsCallback | None = None
    on_lost: PartitionsCallback | None = None
    instance: str = ""
    ack: AckMode = AckMode.LINGERING
    ack_linger_ms: int = 20
    handler_timeout_ms: int | None = 3_600_000
    handover_ms: int = 5_000
    on_failure: FailurePolicy | None = None
    on_full: FullPolicy = FullPolicy.BLOCK
    tries_max: int = 10
    retry_tries_max: int = 32
    call_timeout_ms: int = 5_000
    backoff: Backoff = field(default_factory=Backoff)
    handler_backoff: Backoff = field(default_factory=lambda: Backoff(first_ms=100, max_ms=30_000))
    retry_backoff: Backoff = field(default_factory=lambda: Backoff(first_ms=5_000, max_ms=600_000))

    def __post_init__(self) -> None:
        if self.handler_timeout_ms is None:
            object.__setattr__(self, "handler_timeout_ms", 0)
        values = field_values(self)
        problems = range_problems(values, _RANGES)
        if not problems and self.concurrency > ACK_RANGES_MAX:
            problems.append(
                f"concurrency above {ACK_RANGES_MAX} could leave more gaps than a cursor keeps"
            )
        if not problems and self.threads and self.concurrency != CONCURRENCY:
            problems.append("threads replaces concurrency: set one of them")
        try:
            object.__setattr__(self, "consume_strategy", ConsumeStrategy(self.consume_strategy))
        except ValueError:
            names = " or ".join(ConsumeStrategy)
            problems.append(f"consume_strategy must be {names}, not {self.consume_strategy!r:.40}")
        kinds = (("ack", AckMode), ("on_failure", FailurePolicy), ("on_full", FullPolicy))
        for name, kind in kinds:
            if name == "on_failure" and values[name] is None:
                continue
            try:
                object.__setattr__(self, name, kind(str(values[name])))
            except ValueError:
                names = ", ".join(kind)
                problems.append(f"{name} must be one of {names}, not {values[name]!r:.40}")
        problems += _instance_problems(self.instance, self.consume_strategy)
        if self.ack is AckMode.BEFORE and self.failure_policy is not FailurePolicy.BLOCK:
            problems.append("ack='before' never retries a message, so on_failure does not apply")
        backoffs = ("backoff", "handler_backoff", "retry_backoff")
        problems += type_problems(values, dict.fromkeys(backoffs, Backoff))
        check_no_problems(problems)

    @property
    def failure_policy(self) -> FailurePolicy:
        """`on_failure`, or BLOCK if it is not set."""
        return self.on_failure or FailurePolicy.BLOCK

    @property
    def last_try(self) -> int:
        """The number of attempts after which a message is set aside for good, unless the policy is
        BLOCK.
        """
        retries = self.failure_policy is FailurePolicy.RETRY
        return self.retry_tries_max if retries else self.tries_max

    @property
    def try_backoff(self) -> Backoff:
        """The backoff of messages that are retried in place, which in a shared group includes those
        under RETRY.
        """
        shared = self.consume_strategy is ConsumeStrategy.SHARED
        retries = self.failure_policy is FailurePolicy.RETRY
        return self.retry_backoff if shared and retries else self.handler_backoff

    @property
    def margin_ms(self) -> int:
        """How much earlier a lease ends here than at the metaserver, in milliseconds."""
        return max(50, self.ttl_ms // 10)


def _instance_problems(instance: object, strategy: ConsumeStrategy) -> list[str]:
    if instance == "":
        return []
    try:
        check_name("instance", instance)
    except InvalidRequestError as error:
        return [error.message]
    if strategy is ConsumeStrategy.SHARED:
        return ["instance needs an exclusive group: members of a shared one own no partitions"]
    return []


def merge_settings(settings: ConsumerSettings | None, **overrides: Any) -> ConsumerSettings:
    """
    Return the settings, or the defaults, updated with the overrides that are not None. Raises
    ConfigError.

    An override of `tries_max` applies to every policy.
    """
    if settings is None:
        settings = ConsumerSettings()
    if not isinstance(settings, ConsumerSettings):
        raise ConfigError(f"settings must be ConsumerSettings, not {settings!r:.40}")
    merged = replace(
        settings, **{name: value for name, value in overrides.items() if value is not None}
    )
    tries_max = overrides.get("tries_max")
    return merged if tries_max is None else replace(merged, retry_tries_max=tries_max)


_INHERITED = ("name", "tags", "filter", "on_assigned", "on_revoked", "on_lost")


def inherit_settings(settings: ConsumerSettings, parent: ConsumerSettings) -> ConsumerSettings:
    """Return the settings with a missing name, filter or callback inherited from `parent`."""
    values = {name: getattr(settings, name) for name in _INHERITED}
    inherited = [name for name, value in values.items() if value is None or value == ""]
    return replace(settings, **{name: getattr(parent, name) for name in inherited})


_ACK = "each message is acked: message.ack() in a loop; a handler's message, when it returns"
_TAKE = "iterate over the consumer, or use getmany()"
METHOD_HINTS = {
    "commit": _ACK,
    "commit_sync": _ACK,
    "commit_async": _ACK,
    "basic_ack": _ACK,
    "poll": _TAKE,
    "getone": _TAKE,
    "receive": _TAKE,
    "fetch": _TAKE,
    "consume": _TAKE,
    "basic_consume": _TAKE,
    "subscribe": "give subject= and group=, or add functions with @consumer.on(subject, group=...)",
    "unsubscribe": "close() leaves the group",
    "assign": "the group assigns partitions; a keylane.Reader reads those that you name",
    "seek_to_beginning": "keylane group reset moves a group",
    "seek_to_end": "keylane group reset moves a group",
}
"""Names of consumer methods in other systems, with the equivalents here."""
