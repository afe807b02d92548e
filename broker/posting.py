"""Stores messages that arrive by HTTP, each in the open partition of its key, on this broker or
another.

    body ─▶ messages, all checked ─▶ route ─▶ a batch for each partition ─▶ its broker ─▶ receipts
                                        ▲            │ sealed or moved: wait for a newer route
                                        └────────────┘

Invariants
    All messages of a key are in one batch, in the order of the request. A batch is stored whole or
    not at all. With an idempotency key, every partition of the messages' ranges that is sealed by
    the
    route is queried first: it returns the receipts of an earlier request, and stores nothing, even
    if its broker has not sealed it yet. The queries are skipped if it is certain that there was no
    earlier request, as in the first attempt of a scheduled delivery.
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
"""How long a request waits for a newer route, for example while a partition is being split, in
milliseconds.
"""
ANYWHERE = -1
"""Stands for any logical partition: the message may go to any open partition."""


@dataclass(slots=True)
class _PostRequest:
    """The messages of a request, and the receipts of those that are already stored."""

    subject: str
    messages: list[PostedMessage]
    logical_partitions: list[int]
    """The logical partition of each message."""
    producer: KeyedProducer
    sent_at_ns: Sequence[int]
    """The time at which each message was sent, in nanoseconds since 1970."""
    subject_id: int | None = None
    """The id of the subject that must receive the messages, or 0 if it is unknown. None means the
    current subject with that name, which auto-create may create.
    """
    tried: bool = True
    """True if an earlier request with the same idempotency key may have stored some messages."""
    static: bool = False
    """True if the subject is static, according to the last route that was used."""
    receipts: list[PostReceipt | None] = field(init=False)

    def __post_init__(self) -> None:
        self.receipts = [None] * len(self.messages)

    @property
    def has_idempotency_key(self) -> bool:
        """True if the request has an idempotency key."""
        return self.producer.producer_id != NO_PRODUCER

    def pending(self) -> list[int]:
        """Return the indexes of the messages without a receipt."""
        return [index for index, receipt in enumerate(self.receipts) if receipt is None]

    def check_sizes(self, route: Route) -> None:
        """Raise MessageTooLargeError if a message without a receipt exceeds the subject's limit."""
        check_sizes(self.messages, route.message_bytes_max, only=self.pending())

    def in_range(self, partition: Partition) -> list[int]:
        """Return the indexes of all messages in the range of a partition."""
        start, end = partition.range_start, partition.range_end
        return [
            index
            for index, logical_partition in enumerate(self.logical_partitions)
            if start <= logical_partition < end
        ]


class MessagePosting:
    """Answers `POST /v1/subjects/{subject}/messages`."""

    def __init__(self, peers: Peers, *, clock: Clock, rng: random.Random) -> None:
        self._peers = peers
        self._clock = clock
        self._rng = rng

    def route(self) -> ControlRoute:
        """Return the route of the endpoint."""
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
        unkeyed_target = ANYWHERE
        if key is not None:
            producer = keyed_producer(key, messages)
            # A repeated request must go to the same partition.
            unkeyed_target = logical_partition(key.encode())
        post = _PostRequest(
            subject,
            messages,
            [logical_partition(each.key) if each.key else unkeyed_target for each in messages],
            producer,
            [self._clock.wall_ns()] * len(messages),
        )
        try:
            await self._store(post)
        except KeylaneError as error:
            return _partly_stored_reply(post, error)
        return Posted(receipts=[receipt for receipt in post.receipts if receipt is not None])

    async def choose_logical_partition(self, subject: str, subject_id: int) -> int:
        """Choose a logical partition for scheduled messages, preferably one on this broker; see
        `Subjects.choose_logical_partition`.
        """
        route = await self._peers.route_by_id(subject, subject_id)
        partition = self._choose_partition(route.open_partitions())
        if partition is None or partition.address is None:
            route = await self._peers.fetch_route(subject, subject_id=subject_id)
            partition = self._choose_partition(route.open_partitions())
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
        logical_partition: int,
        subject_id: int,
        tried: bool,
    ) -> None:
        """Store scheduled messages in a logical partition; see `Subjects.store`."""
        producer = keyed_producer(key, messages)
        targets = [logical_partition] * len(messages)
        post = _PostRequest(
            subject, list(messages), targets, producer, sent_at_ns, subject_id, tried
        )
        await self._store(post)

    async def _store(self, post: _PostRequest) -> None:
        """Store all messages, fetching newer routes while the cached one is stale."""
        deadline_ms = self._clock.boot_ms() + WAIT_MS
        subject_id = post.subject_id or 0
        if post.subject_id is None:
            route = await self._peers.route_to_send(post.subject)
        else:
            route = await self._peers.route_by_id(post.subject, subject_id)
        limit_confirmed = False
        while True:
            errors = await self._store_with_route(post, route)
            if not errors:
                return
            if not limit_confirmed and all(
                isinstance(each, MessageTooLargeError) for each in errors
            ):
                # The limit may have changed since the route was fetched, and none of these messages
                # is stored.
                limit_confirmed = True
                try:
                    route = await self._peers.fetch_route(post.subject, subject_id=subject_id)
                except UnreachableError:
                    raise errors[0] from None
                continue
            final = [error for error in errors if not _is_stale_route(error)]
            remaining_ms = deadline_ms - self._clock.boot_ms()
            if final or remaining_ms <= 0:
                raise max(final or errors, key=lambda error: error.fate is Fate.UNKNOWN)
            # An unreachable broker may have a new address; only a sealed partition certainly
            # has a newer route.
            unreachable = all(isinstance(error, NotSentError) for error in errors)
            newer_route = await self._peers.fetch_route(
                post.subject,
                known_version=-1 if unreachable else route.version,
                wait_ms=0 if unreachable else remaining_ms,
                subject_id=subject_id,
            )
            if newer_route == route:
                raise errors[0]
            route = newer_route

    async def _store_with_route(self, post: _PostRequest, route: Route) -> list[KeylaneError]:
        """Store the pending messages using this route, and return the errors of the partitions that
        failed.
        """
        post.static = route.static
        if post.has_idempotency_key and post.tried:
            sealed_parts = [
                (partition, indices)
                for partition in route.partitions
                if partition.state is PartitionState.SEALED
                and set(indices := post.in_range(partition)).intersection(post.pending())
            ]
            errors = [
                error
                for error in await self._append_all(post, sealed_parts, sequence=ASKED)
                if not isinstance(error, SequenceGapError)  # it stored nothing for this key
            ]
            if errors:
                return errors
        try:
            post.check_sizes(route)
            indices_by_partition = self._split_by_partition(post, route).values()
        except (MessageTooLargeError, StaleRouteError) as error:
            return [error]
        return await self._append_all(post, indices_by_partition)

    def _split_by_partition(
        self, post: _PostRequest, route: Route
    ) -> dict[int, tuple[Partition, list[int]]]:
        """Return a dict that maps each partition id to the open partition and the indexes of its
        pending messages.
        """
        indices_by_partition: dict[int, tuple[Partition, list[int]]] = {}
        open_partitions = route.open_partitions()
        any_partition = self._choose_partition(open_partitions)
        open_by_logical_partition = {
            logical_partition: partition
            for partition in open_partitions
            for logical_partition in range(partition.range_start, partition.range_end)
        }
        for index in post.pending():
            logical_partition = post.logical_partitions[index]
            partition = (
                any_partition
                if logical_partition == ANYWHERE
                else open_by_logical_partition.get(logical_partition)
            )
            if partition is None:
                raise StaleRouteError(
                    Reason.NO_PARTITION, f"subject {post.subject!r} has no open partition now"
                )
            indices_by_partition.setdefault(partition.partition_id, (partition, []))[1].append(
                index
            )
        return indices_by_partition

    def _choose_partition(self, open_partitions: Iterable[Partition]) -> Partition | None:
        """Choose a random partition for messages without a key. Prefer partitions of this broker,
        then those of a broker whose address is known.
        """
        ranked_partitions: dict[int, list[Partition]] = defaultdict(list)
        for partition in open_partitions:
            rank = 0 if self._peers.is_local(partition) else 1 + (partition.address is None)
            ranked_partitions[rank].append(partition)
        return (
            self._rng.choice(ranked_partitions[min(ranked_partitions)])
            if ranked_partitions
            else None
        )

    async def _append_all(
        self,
        post: _PostRequest,
        indices_by_partition: Iterable[tuple[Partition, list[int]]],
        *,
        sequence: int = 0,
    ) -> list[KeylaneError]:
        results = await asyncio.gather(
            *(
                self._append(post, partition, indices, sequence)
                for partition, indices in indices_by_partition
            ),
            return_exceptions=True,
        )
        errors: list[KeylaneError] = []
        for result in results:
            if isinstance(result, KeylaneError):
                errors.append(result)
            elif result is not None:
                raise result
        return errors

    async def _append(
        self, post: _PostRequest, partition: Partition, indices: list[int], sequence: int
    ) -> None:
        """Store messages in a partition, and record their receipts."""
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
                copies=answer.copies,
            )


def _is_stale_route(error: KeylaneError) -> bool:
    """Return True if retrying with a newer route may help, because nothing was stored."""
    return isinstance(error, NotSentError) or error.retry is RetryRule.AFTER_NEW_ROUTE


def _partly_stored_reply(post: _PostRequest, error: KeylaneError) -> Reply:
    """Return the reply for a partly stored request. If nothing is stored, raise `error`."""
    stored_count = len(post.messages) - len(post.pending())
    if not stored_count:
        raise error
    error_body = ErrorBody.of(
        DeliveryError(
            Reason.PARTLY_STORED,
            f"{stored_count} of {counted(len(post.messages), 'message')} are stored; then: "
            f"{error.message}",
            stored=stored_count,
            messages=len(post.messages),
        )
    )
    body = PartlyPosted(
        code=error_body.code,
        name=error_body.name,
        message=error_body.message,
        hint=error_body.hint,
        fate=error_body.fate,
        details=error_body.details,
        receipts=post.receipts,
    )
    return Reply(body, status_of(error))
