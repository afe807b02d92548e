"""Stores messages that arrive by HTTP, each in the open partition of its key, on whichever broker
that is.

    body ─▶ messages, all checked ─▶ the route ─▶ a batch for each partition ─▶ here, or at its
        broker ─▶ receipts
                                        ▲            │ sealed, or not there: wait for a newer route
                                        └────────────┘

Invariants
    Messages of a key are in one batch, in the order of the request. A batch is stored whole or not
    at all. With an idempotency key, every sealed partition of the messages' ranges is asked first:
    it answers with what an earlier request stored there, and stores nothing, even if it was left
    behind and its broker has not sealed it. If there was certainly no earlier request, as for the
    first try of a scheduled delivery, no sealed partition is awaited.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..protocol.batch import encode_batch
from ..protocol.clock import Clock
from ..protocol.control import ErrorBody, PartlyPosted, Posted, PostReceipt
from ..protocol.endpoints import POST_MESSAGES
from ..protocol.errors import (
    DeliveryError,
    Fate,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    Reason,
    RetryRule,
    SequenceGapError,
    StaleRouteError,
    UnreachableError,
)
from ..protocol.frames import Append, Appended
from ..protocol.http.posted import (
    ASKED,
    IDEMPOTENCY_KEY,
    KeyedProducer,
    PostedMessage,
    check_sizes,
    keyed_producer,
    posted_messages,
)
from ..protocol.ids import NO_PRODUCER, check_name
from ..protocol.routing import Partition, PartitionState, Route, logical_partition
from ..protocol.text import counted
from ..rpc.server import ControlRoute, Params, Reply, check_params, status_of
from .peers import Peers

WAIT_MS = 10_000
"""The time in milliseconds that a request waits for a newer route, for example while a partition is
split.
"""
ANYWHERE = -1
"""A value in place of a logical partition: any open partition will do."""


@dataclass(slots=True)
class _Post:
    """The messages of a request, and what is stored of them."""

    subject: str
    messages: list[PostedMessage]
    logical: list[int]
    """The logical partition of each message."""
    producer: KeyedProducer
    sent_at_ns: Sequence[int]
    """The time at which each message was sent, in nanoseconds since 1970."""
    subject_id: int | None = None
    """The id of the only subject of the name that may receive the messages, or 0 if it is not
    known. None means the subject that has the name now, which is created if the metaserver allows
    it.
    """
    tried: bool = True
    """True if an earlier request with the idempotency key may have stored some of them."""
    static: bool = False
    """True if the subject is static, by the route that was followed last."""
    receipts: list[PostReceipt | None] = field(init=False)

    def __post_init__(self) -> None:
        self.receipts = [None] * len(self.messages)

    @property
    def keyed(self) -> bool:
        """True if the request has an idempotency key."""
        return self.producer.producer_id != NO_PRODUCER

    def pending(self) -> list[int]:
        """Return the messages without a receipt, by their index in the request."""
        return [index for index, receipt in enumerate(self.receipts) if receipt is None]

    def check_sizes(self, route: Route) -> None:
        """Raise MessageTooLargeError if a message without a receipt is over the limit of the
        subject.
        """
        check_sizes(self.messages, route.message_bytes_max, only=self.pending())

    def in_range(self, partition: Partition) -> list[int]:
        """Return all messages in the range of a partition."""
        start, end = partition.range_start, partition.range_end
        return [index for index, logical in enumerate(self.logical) if start <= logical < end]


class MessagePosting:
    """Answers `POST /v1/subjects/{subject}/messages`."""

    def __init__(self, peers: Peers, *, clock: Clock, rng: random.Random) -> None:
        self._peers = peers
        self._clock = clock
        self._rng = rng

    def route(self) -> ControlRoute:
        """Return the route of the call."""
        return ControlRoute(POST_MESSAGES, self.post)

    async def post(self, body: bytes, params: Params) -> Posted | Reply:
        """
        Store the messages of a request, durably.

        Returns:
            Their receipts, or a Reply with a PartlyPosted if only some are stored.

        Raises:
            KeylaneError: nothing is stored, or its fate is UNKNOWN.
        """
        check_params(POST_MESSAGES, params)
        subject = check_name("subject", params["subject"])
        messages = posted_messages(body, params)
        key = params.get(IDEMPOTENCY_KEY)
        producer = KeyedProducer(NO_PRODUCER, 0)
        keyless = ANYWHERE
        if key is not None:
            producer = keyed_producer(key, messages)
            keyless = logical_partition(key.encode())  # repeats go to the same partition
        post = _Post(
            subject,
            messages,
            [logical_partition(each.key) if each.key else keyless for each in messages],
            producer,
            [self._clock.wall_ns()] * len(messages),
        )
        try:
            await self._store(post)
        except KeylaneError as error:
            return _partly(post, error)
        return Posted(receipts=[receipt for receipt in post.receipts if receipt is not None])

    async def place(self, subject: str, subject_id: int) -> int:
        """Implement `Subjects.place` of scheduled messages; prefer a partition of this broker, if
        it has one.
        """
        route = await self._peers.route_of(subject, subject_id)
        partition = self._any(route.open_partitions())
        if partition is None or partition.address is None:
            route = await self._peers.new_route(subject, subject_id=subject_id)
            partition = self._any(route.open_partitions())
        if partition is None:
            raise StaleRouteError(
                Reason.NO_PARTITION, f"subject {subject!r} has no open partition now"
            )
        return self._rng.randrange(partition.range_start, partition.range_end)

    async def store(
        self,
        subject: str,
        messages: Sequence[PostedMessage],
        *,
        sent_at_ns: Sequence[int],
        key: str,
        logical: int,
        subject_id: int,
        tried: bool,
    ) -> None:
        """Implement `Subjects.store` of scheduled messages, in the partition of the logical
        partition.
        """
        producer = keyed_producer(key, messages)
        places = [logical] * len(messages)
        post = _Post(subject, list(messages), places, producer, sent_at_ns, subject_id, tried)
        await self._store(post)

    async def _store(self, post: _Post) -> None:
        """Store every message; use newer routes where the known one is out of date."""
        until_ms = self._clock.boot_ms() + WAIT_MS
        subject_id = post.subject_id or 0
        if post.subject_id is None:
            route = await self._peers.route_to_send(post.subject)
        else:
            route = await self._peers.route_of(post.subject, subject_id)
        confirmed = False
        while True:
            errors = await self._try(post, route)
            if not errors:
                return
            if not confirmed and all(isinstance(each, MessageTooLargeError) for each in errors):
                # The limit may have been changed since this route was read, and nothing of these
                # messages is stored.
                confirmed = True
                try:
                    route = await self._peers.new_route(post.subject, subject_id=subject_id)
                except UnreachableError:
                    raise errors[0] from None
                continue
            final = [error for error in errors if not _is_of_route(error)]
            left_ms = until_ms - self._clock.boot_ms()
            if final or left_ms <= 0:
                raise max(final or errors, key=lambda error: error.fate is Fate.UNKNOWN)
            # A broker that is not reached may have moved; only a sealed partition certainly has a
            # newer route.
            silent = all(isinstance(error, NotSentError) for error in errors)
            newer = await self._peers.new_route(
                post.subject,
                known_version=-1 if silent else route.version,
                wait_ms=0 if silent else left_ms,
                subject_id=subject_id,
            )
            if newer == route:
                raise errors[0]
            route = newer

    async def _try(self, post: _Post, route: Route) -> list[KeylaneError]:
        """Store the pending messages by this route, and return the errors of the partitions that
        did not store theirs.
        """
        post.static = route.static
        if post.keyed and post.tried:
            earlier = [
                (partition, indices)
                for partition in route.partitions
                if partition.state is PartitionState.SEALED
                and set(indices := post.in_range(partition)).intersection(post.pending())
            ]
            errors = [
                error
                for error in await self._append_all(post, earlier, sequence=ASKED)
                if not isinstance(error, SequenceGapError)  # it has nothing of this request
            ]
            if errors:
                return errors
        try:
            post.check_sizes(route)
            parts = self._parts(post, route).values()
        except (MessageTooLargeError, StaleRouteError) as error:
            return [error]
        return await self._append_all(post, parts)

    def _parts(self, post: _Post, route: Route) -> dict[int, tuple[Partition, list[int]]]:
        """Return partition id → the open partition and its pending messages."""
        parts: dict[int, tuple[Partition, list[int]]] = {}
        still_open = route.open_partitions()
        anywhere = self._any(still_open)
        by_logical = {
            logical: partition
            for partition in still_open
            for logical in range(partition.range_start, partition.range_end)
        }
        for index in post.pending():
            logical = post.logical[index]
            partition = anywhere if logical == ANYWHERE else by_logical.get(logical)
            if partition is None:
                raise StaleRouteError(
                    Reason.NO_PARTITION, f"subject {post.subject!r} has no open partition now"
                )
            parts.setdefault(partition.partition_id, (partition, []))[1].append(index)
        return parts

    def _any(self, still_open: Iterable[Partition]) -> Partition | None:
        """Return a partition for messages without a key: one of this broker or, if there is none,
        one of an available broker.
        """
        ranked: dict[int, list[Partition]] = defaultdict(list)
        for partition in still_open:
            rank = 0 if self._peers.is_here(partition) else 1 + (partition.address is None)
            ranked[rank].append(partition)
        return self._rng.choice(ranked[min(ranked)]) if ranked else None

    async def _append_all(
        self, post: _Post, parts: Iterable[tuple[Partition, list[int]]], *, sequence: int = 0
    ) -> list[KeylaneError]:
        answers = await asyncio.gather(
            *(self._append(post, partition, indices, sequence) for partition, indices in parts),
            return_exceptions=True,
        )
        errors: list[KeylaneError] = []
        for answer in answers:
            if isinstance(answer, KeylaneError):
                errors.append(answer)
            elif answer is not None:
                raise answer
        return errors

    async def _append(
        self, post: _Post, partition: Partition, indices: list[int], sequence: int
    ) -> None:
        """Store messages in a partition, and note their receipts."""
        messages = [post.messages[index] for index in indices]
        batch = encode_batch(
            partition_id=partition.partition_id,
            sent_at_ns=[post.sent_at_ns[index] for index in indices],
            keys=[message.key for message in messages],
            values=[message.value for message in messages],
            properties=[message.packed_properties for message in messages],
            producer_id=post.producer.producer_id,
            producer_epoch=post.producer.producer_epoch,
            sequence=sequence,
        )
        answer, _ = await self._peers.call(partition, Append(partition.partition_id), batch)
        assert isinstance(answer, Appended)
        for offset, index in enumerate(indices, answer.base_offset):
            post.receipts[index] = PostReceipt(
                partition_id=partition.partition_id,
                queue=partition.queue if post.static else None,
                offset=offset,
                logic_offset=partition.logic_start + offset if post.static else None,
                durable=answer.durable,
                duplicate=answer.duplicate,
            )


def _is_of_route(error: KeylaneError) -> bool:
    """Return True if the messages may be stored by a newer route: nothing was stored, and the
    partition is elsewhere.
    """
    return isinstance(error, NotSentError) or error.retry is RetryRule.AFTER_NEW_ROUTE


def _partly(post: _Post, error: KeylaneError) -> Reply:
    """Return the answer if some messages are stored, or raise `error` if none is."""
    stored = len(post.messages) - len(post.pending())
    if not stored:
        raise error
    partly = ErrorBody.of(
        DeliveryError(
            Reason.PARTLY_STORED,
            f"{stored} of {counted(len(post.messages), 'message')} are stored; then: "
            f"{error.message}",
            stored=stored,
            messages=len(post.messages),
        )
    )
    body = PartlyPosted(
        code=partly.code,
        name=partly.name,
        message=partly.message,
        hint=partly.hint,
        fate=partly.fate,
        details=partly.details,
        receipts=post.receipts,
    )
    return Reply(body, status_of(error))
