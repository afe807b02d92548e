"""Acks or nacks many messages that a program has in hand, and warns about messages that it does not
take or ack.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ...protocol.errors import InvalidRequestError, LeaseLostError
from ...protocol.message import Message, not_delivered_error
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted
from ...rpc.loop_binding import LoopBinding
from ..delivery.copied import CopiedDelivery
from ..delivery.user_acks import check_not_in_handler
from ..log_names import message_name
from ..pulling.pull_client import PullClient
from .arrow_batch import ArrowBatch
from .arrow_stream import ArrowStream
from .failing import FailureRules
from .handler_log import LogLine
from .in_hand import UnackedMessages
from .not_acked import is_signal

log = logging.getLogger("keylane.consumer")

NOT_ITERATED_MS = 10_000
"""How long messages may wait for a consumer without a handler that was never iterated before a
warning is logged, in milliseconds.
"""
NOT_ITERATED_REPEAT_MS = 600_000
NOT_ACKED_MS = 10_000
"""How long the user may wait for messages that are blocked by unacked ones before a warning is
logged, in milliseconds.
"""
CHECKED_MAX = 1_000
"""The maximum number of messages in hand that one check for long-held messages examines."""


class _MessageSource(Protocol):
    """The part of a stream that knows which messages the program has."""

    current: Message[Any] | None

    @property
    def unacked(self) -> int: ...

    def nack(
        self, message: Message[Any], after_s: float, error: BaseException | None
    ) -> list[Message[Any]]: ...


def count_failed_attempt(stream: _MessageSource, error: BaseException) -> None:
    """
    Count a failed attempt for the only message that a program has in hand, because `error` has
    escaped the consumer's `async with` block.

    With several messages in hand, none is counted, because only the program knows which one it was
    handling. An error that a signal raises is not counted either: a cancellation, a
    KeyboardInterrupt, or a SystemExit whose code means success or a signal.
    """
    message = stream.current
    if message is None or stream.unacked != 1:
        return
    if isinstance(error, asyncio.CancelledError) or is_signal(error):
        return
    delivery: Any = message.delivery
    if delivery.client.left_ms > 0 and delivery.is_delivered(message):
        for each in stream.nack(message, 0, error):
            each.delivery.record_nack(each.offset)  # type: ignore[union-attr]


def put_back(
    messages: Message[Any] | list[Message[Any]] | ArrowBatch,
    arrow: ArrowStream,
    unacked: UnackedMessages,
    now_ns: int,
) -> None:
    """Take back messages that never reached the program. They are delivered next, and the attempt
    does not count.
    """
    if isinstance(messages, ArrowBatch):
        arrow.put_back(messages)
        return
    for message in [messages] if isinstance(messages, Message) else messages:
        delivery: Any = message.delivery
        if delivery.client.left_ms > 0 and delivery.is_delivered(message):
            for each in unacked.requeue(message, now_ns):
                each.delivery.record_nack(each.offset)  # type: ignore[union-attr]


def warn(line: LogLine | None) -> None:
    """Log the line, if there is one."""
    if line is not None:
        log.log(logging.WARNING if line.warns else logging.INFO, "%s", line.text)


class IdleConsumerWarnings:
    """Warns about a program that takes no messages, or acks none, from a consumer without a
    handler.
    """

    def __init__(self) -> None:
        self._idle_since_ms: int | None = None
        """The boot time, in milliseconds, since which messages have been waiting while nobody
        iterates; None if none wait.
        """
        self._blocked_since_ms: int | None = None
        """The boot time, in milliseconds, since which the user has been waiting for messages that
        are blocked by unacked ones.
        """

    def warn_if_not_acked(
        self, blocking: Message[Any] | None, waiting: int, method: str, now_ms: int
    ) -> None:
        """
        Warn that the user is waiting in vain, in the method `method`, because unacked messages
        block others.

        Args:
            blocking: the one whose ack the largest number of others wait for; None: none waits, or
                the user does not.
            waiting: the number of messages that wait.
        """
        if blocking is None:
            self._blocked_since_ms = None
        elif self._blocked_since_ms is None:
            self._blocked_since_ms = now_ms
        elif now_ms - self._blocked_since_ms >= NOT_ACKED_MS:
            self._blocked_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s waits for acks: %s until earlier messages of their keys are acked or returned, "
                "such as %s; to get several messages of a key at once, use getmany()",
                method,
                counted(waiting, "message waits", "messages wait"),
                message_name(blocking),
            )

    def warn_if_not_iterated(self, name: str, waiting: int, now_ms: int) -> None:
        """Warn that messages are waiting for the consumer `name`, which was never iterated."""
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOT_ITERATED_MS:
            self._idle_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s has no handler and is not iterated: %s, and no other consumer gets its "
                "partitions; pass handler=, or use: async for message in consumer",
                name,
                counted(waiting, "message waits", "messages wait"),
            )


class _Observation(NamedTuple):
    message: Message
    attempt: int
    since_ms: int


class UnackedMessageTracker:
    """Tracks, per partition, the message that a program without a handler has held longest."""

    def __init__(self) -> None:
        self._observations: dict[int, _Observation] = {}

    def check_long_running(
        self,
        current: Message | None,
        unacked: UnackedMessages,
        failure_rules: FailureRules,
        now_ms: int,
    ) -> None:
        """
        Report messages that the program has held for a long time to their brokers.

        Args:
            current: the message whose loop body is running; it may already be acked.
        """
        oldest_by_partition: dict[int, Message] = {}
        if current is not None and current.delivery.is_delivered(current):  # type: ignore[union-attr]
            oldest_by_partition[current.partition_id] = current
        for message in islice(unacked.messages(), CHECKED_MAX):
            oldest_by_partition.setdefault(message.partition_id, message)
        previous = self._observations
        self._observations = {}
        for partition_id, message in oldest_by_partition.items():
            observation = previous.get(partition_id)
            if (
                observation is None
                or observation.message is not message
                or observation.attempt != message.attempt
            ):
                observation = _Observation(message, message.attempt, now_ms)
            self._observations[partition_id] = observation
            running_ms = now_ms - observation.since_ms
            if running_ms >= HANGS_MS:
                failure = failure_rules.build_hang_failure(
                    "the program has not acked it", message.attempt
                )
                message.delivery.report_hang(message, failure, running_ms)  # type: ignore[union-attr]


async def ack_all(messages: list[Message[Any]], loop_binding: LoopBinding) -> None:
    """
    Ack messages of the consumer to which `loop_binding` belongs.

    Raises:
        InvalidRequestError: a message belongs to another consumer, or was given back; nothing is
            acked.
        LeaseLostError: some are delivered to another consumer; the others are acked.
    """
    check_handed_out(messages, loop_binding)
    runs = [(delivery, list(run)) for delivery, run in groupby(messages, _delivery)]
    for delivery, run in runs:
        delivery.check_not_nacked(run)
    errors: list[BaseException | None] = []
    waits = []
    for delivery, run in runs:
        client: PullClient = delivery.client
        try:
            client.check_can_ack(run[0].offset)
            delivery.accept_acks(run)
        except LeaseLostError as error:
            errors.append(error)
        else:
            if client.acks_each:
                waits.append(delivery.wait_until_acks_durable(run))
    errors += await asyncio.gather(*waits, return_exceptions=True)
    for first in filter(None, errors):
        raise first


async def nack_all(messages: list[Message[Any]], loop_binding: LoopBinding, after_s: float) -> None:
    """
    Nack messages, skipping those already acked or nacked.

    Raises:
        InvalidRequestError: a message belongs to another consumer, or `after_s` is not a number
            from 0 to a day; nothing is nacked.
        LeaseLostError: some are delivered to another consumer; the others are nacked.
    """
    check_handed_out(messages, loop_binding)
    first_error: LeaseLostError | None = None
    for message in sorted(messages, key=lambda each: each.offset):
        try:
            if message.delivery.is_delivered(message):  # type: ignore[union-attr]
                await message.nack(after_s=after_s)
        except LeaseLostError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def to_list(messages: Iterable[Message[Any]]) -> list[Message[Any]]:
    """Return the argument of a consumer's `ack` or `nack` as a list. Raises InvalidRequestError if
    it is not an iterable of messages.
    """
    if isinstance(messages, Message):
        raise InvalidRequestError(
            "a consumer acks a list of messages: consumer.ack([message]); or message.ack()"
        )
    try:
        return list(messages)
    except TypeError:
        raise InvalidRequestError(
            f"a consumer acks a list of messages, not {messages!r:.60}"
        ) from None


def check_handed_out(messages: Iterable[Message[Any]], loop_binding: LoopBinding) -> None:
    """Raise InvalidRequestError or ClosedError unless the consumer of `loop_binding` handed the
    messages out to its program.
    """
    checked: object = None
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidRequestError(f"only messages can be acked, not {message!r:.60}")
        if message.delivery is not checked or checked is None:
            checked = message.delivery
            if isinstance(checked, CopiedDelivery):
                raise checked.refusal(message)
            client = getattr(checked, "client", None)
            binding = getattr(client, "loop_binding", None)
            if binding is None:
                raise not_delivered_error("this message")
            if binding is not loop_binding:
                raise InvalidRequestError(f"{message!r} was handed out by another consumer")
            check_not_in_handler(message)


_delivery = attrgetter("delivery")
