"""Acks, or returns, many messages that a program has in hand, and warns of those that it does not
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
from ...protocol.message import Message, not_handed_out
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted
from ...rpc.home import Home
from ..delivery.copied import CopiedDelivery
from ..delivery.user_acks import check_not_in_handler
from ..log_names import consumer_name, message_name
from ..pulling.pull_client import PullClient
from .arrow_batch import ArrowBatch
from .arrow_stream import ArrowStream
from .failing import Failing
from .handler_log import LogLine
from .in_hand import InHand
from .not_acked import is_a_signal

log = logging.getLogger("keylane.consumer")

NOT_ITERATED_MS = 10_000
"""The milliseconds for which messages wait, at a consumer without a handler that is never iterated,
before a warning is logged.
"""
NOT_ITERATED_REPEAT_MS = 600_000
NOT_ACKED_MS = 10_000
"""The milliseconds for which the user waits for messages in vain, because others are not acked,
before a warning is logged.
"""
LOOKED_AT_MAX = 1_000
"""The largest number of messages in hand that one check examines for those that are held for
long.
"""


class _Taker(Protocol):
    """The part of a stream that knows what the program has."""

    current: Message[Any] | None

    @property
    def unacked(self) -> int: ...

    def nack(
        self, message: Message[Any], after_s: float, error: BaseException | None
    ) -> list[Message[Any]]: ...


def count_try(stream: _Taker, error: BaseException) -> None:
    """
    Count the try of the only message that a program has in hand: `error` has left the block of its
    consumer.

    If there are several messages none is counted, because only the program knows which one was
    handled. None is counted either for an error that a signal raises: a cancellation, a
    KeyboardInterrupt, or a SystemExit with the code of success or of a signal.
    """
    message = stream.current
    if message is None or stream.unacked != 1:
        return
    if isinstance(error, asyncio.CancelledError) or is_a_signal(error):
        return
    delivery: Any = message.delivery
    if delivery.client.left_ms > 0 and delivery.has_taken(message):
        for each in stream.nack(message, 0, error):
            each.delivery.take_back(each.offset)  # type: ignore[union-attr]


def put_back(
    taken: Message[Any] | list[Message[Any]] | ArrowBatch,
    arrow: ArrowStream,
    in_hand: InHand,
    now_ns: int,
) -> None:
    """Take back messages that were given to a program that never saw them: they are delivered next,
    and no try of them counts.
    """
    if isinstance(taken, ArrowBatch):
        arrow.put_back(taken)
        return
    for message in [taken] if isinstance(taken, Message) else taken:
        delivery: Any = message.delivery
        if delivery.client.left_ms > 0 and delivery.has_taken(message):
            for each in in_hand.give_back(message, now_ns):
                each.delivery.take_back(each.offset)  # type: ignore[union-attr]


def warn(line: LogLine | None) -> None:
    """Log a line, if there is one."""
    if line is not None:
        log.warning("%s", line.text)


class StreamWatch:
    """Warns about a consumer without a handler whose program takes nothing, or acks nothing."""

    def __init__(self) -> None:
        self._idle_since_ms: int | None = None
        """The boot time, in milliseconds, since which messages wait and no iteration takes them;
        None while none wait.
        """
        self._stuck_since_ms: int | None = None
        """The boot time, in milliseconds, since which the user waits for messages that wait for
        acks.
        """

    def not_acked(self, in_hand: InHand | None, manner: str, now_ms: int) -> None:
        """Log that the user waits in vain by `manner`, because the waiting messages wait for some
        that are not acked.
        """
        stuck = None if in_hand is None else in_hand.in_the_way()
        if in_hand is None or stuck is None:
            self._stuck_since_ms = None
        elif self._stuck_since_ms is None:
            self._stuck_since_ms = now_ms
        elif now_ms - self._stuck_since_ms >= NOT_ACKED_MS:
            self._stuck_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s waits for acks: %s until earlier messages of their keys are acked or returned, "
                "such as %s; to get several messages of a key at once, use getmany()",
                manner,
                counted(in_hand.waiting, "message waits", "messages wait"),
                message_name(stuck),
            )

    def not_iterated(self, first: Message[Any], waiting: int, now_ms: int) -> None:
        """Log that messages wait, of which `first` is the first, and that the consumer was never
        iterated.
        """
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        elif now_ms - self._idle_since_ms >= NOT_ITERATED_MS:
            self._idle_since_ms = now_ms + NOT_ITERATED_REPEAT_MS
            log.warning(
                "%s has no handler and nobody iterates over it: %s, and no other consumer gets its "
                "partitions; give it handler=, or use: async for message in consumer",
                consumer_name(first.subject, getattr(first.delivery, "group", "")),
                counted(waiting, "message waits", "messages wait"),
            )


class _Seen(NamedTuple):
    message: Message
    attempt: int
    since_ms: int


class LongUnacked:
    """The message of each partition that a program without a handler has held for the longest
    time.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, current: Message | None, in_hand: InHand, failing: Failing, now_ms: int) -> None:
        """
        Report messages that are held for long to their brokers.

        Args:
            current: the message whose loop body runs, which may be acked already.
        """
        held: dict[int, Message] = {}
        if current is not None and current.delivery.has_taken(current):  # type: ignore[union-attr]
            held[current.partition_id] = current
        for message in islice(in_hand.out(), LOOKED_AT_MAX):
            held.setdefault(message.partition_id, message)
        known = self._seen
        self._seen = {}
        for partition_id, message in held.items():
            seen = known.get(partition_id)
            if seen is None or seen.message is not message or seen.attempt != message.attempt:
                seen = _Seen(message, message.attempt, now_ms)
            self._seen[partition_id] = seen
            running_ms = now_ms - seen.since_ms
            if running_ms >= HANGS_MS:
                why = failing.hanging("the program has not acked it", message.attempt)
                message.delivery.note_hangs(message, why, running_ms)  # type: ignore[union-attr]


async def ack_all(messages: list[Message[Any]], home: Home) -> None:
    """
    Ack messages of the consumer to which this home belongs.

    Raises:
        InvalidRequestError: a message belongs to another consumer, or was given back; nothing is
            acked.
        LeaseLostError: some are delivered to another consumer; the others are acked.
    """
    check_handed_out(messages, home)
    runs = [(delivery, list(run)) for delivery, run in groupby(messages, _delivery)]
    for delivery, run in runs:
        delivery.check_not_given_back(run)
    lost: list[BaseException | None] = []
    waits = []
    for delivery, run in runs:
        client: PullClient = delivery.client
        try:
            client.check_takes_acks(run[0].offset)
            delivery.take_acks(run)
        except LeaseLostError as error:
            lost.append(error)
        else:
            if client.acks_each:
                waits.append(delivery.wait_durable(run))
    lost += await asyncio.gather(*waits, return_exceptions=True)
    for first in filter(None, lost):
        raise first


async def nack_all(messages: list[Message[Any]], home: Home, after_s: float) -> None:
    """
    Give messages back; messages that are already acked or given back stay so.

    Raises:
        InvalidRequestError: a message belongs to another consumer, or `after_s` is not such a
            number; nothing is given back.
        LeaseLostError: some are delivered to another consumer; the others are given back.
    """
    check_handed_out(messages, home)
    lost: LeaseLostError | None = None
    for message in sorted(messages, key=lambda each: each.offset):
        try:
            if message.delivery.has_taken(message):  # type: ignore[union-attr]
                await message.nack(after_s=after_s)
        except LeaseLostError as error:
            lost = lost or error
    if lost is not None:
        raise lost


def listed(messages: Iterable[Message[Any]]) -> list[Message[Any]]:
    """Return the messages that `ack` and `nack` of a consumer get. Raises InvalidRequestError if
    they are not an iterable of messages.
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


def check_handed_out(messages: Iterable[Message[Any]], home: Home) -> None:
    """Raise InvalidRequestError or ClosedError if another consumer, or none, handed a message out,
    or a handler has it.
    """
    checked: object = None
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidRequestError(f"acks are of messages, not of {message!r:.60}")
        if message.delivery is not checked or checked is None:
            checked = message.delivery
            if isinstance(checked, CopiedDelivery):
                raise checked.refusal(message)
            client = getattr(checked, "client", None)
            if not isinstance(client, PullClient):
                raise not_handed_out("this message")
            if client.home is not home:
                raise InvalidRequestError(f"{message!r} was handed out by another consumer")
            check_not_in_handler(message)


_delivery = attrgetter("delivery")
