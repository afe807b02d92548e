"""A network scripted by a test: one metaserver with one subject, and brokers that keep what they
are sent.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from keylane.broker.partition.appends import Duplicate, ProducerState, after_append, decide_append
from keylane.producer import Producer, ProducerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.batch import check_batch, columns, largest_message
from keylane.protocol.control import Health
from keylane.protocol.errors import (
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    SequenceReusedError,
    StaleRouteError,
)
from keylane.protocol.frames import Appended
from keylane.protocol.limits import MESSAGE_BYTES_MAX
from keylane.protocol.message import message_too_large
from keylane.protocol.operations import PartitionHistory, SubjectHistory
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from keylane.rpc.environment import Environment
from keylane.rpc.network import Call


def route_over(
    ranges: dict[int, tuple[int, int]],
    *,
    version: int,
    strategy: OrderStrategy,
    group: str = "",
    silent: tuple[int, ...] = (),
    static: bool = False,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> Route:
    """
    A route to open partitions (id → logical partitions): all of `group`, or each of a broker group
    of its own.

    The metaserver knows no address of the partitions that are `silent`.
    """
    partitions = tuple(
        Partition(
            partition_id=partition_id,
            name=f"p{partition_id}",
            queue=queue,
            range_start=start,
            range_end=end,
            broker_group=group or f"g{partition_id}",
            state=PartitionState.OPEN,
            address=None if partition_id in silent else f"broker-{partition_id}",
        )
        for queue, (partition_id, (start, end)) in enumerate(ranges.items())
    )
    return Route(
        subject="s",
        version=version,
        order_strategy=strategy,
        partitions=partitions,
        static=static,
        message_bytes_max=message_bytes_max,
    )


class ScriptedNetwork:
    """One subject; `route` is what the metaserver says, the other fields what brokers do next."""

    def __init__(self) -> None:
        self.stored: dict[int, list[bytes]] = {}
        self.history: list[tuple[int, int]] = []
        """Partition and offset of every message, in the order in which they were stored."""
        self.sealed: set[int] = set()
        self.unknown: set[int] = set()
        """Partitions that their brokers say they do not have."""
        self.lost: set[int] = set()
        """Partitions whose batches are lost on the way, without an answer."""
        self.mute: set[int] = set()
        """Partitions whose batches are stored, and whose answers are lost."""
        self.mute_offset: int | None = None
        """The batch that is stored at this offset never gets its answer."""
        self.producers: dict[tuple[int, int], ProducerState] = {}
        """What is known of (partition id, producer id), by which a batch sent again is stored
        once.
        """
        self.clashed_ids: set[tuple[int, int]] = set()
        """Those of them that met a batch of another producer."""
        self.limits: dict[int, int] = {}
        """Bytes of the largest message that a partition takes."""
        self.unreachable: set[str] = set()
        self.late: asyncio.Event | None = None
        """Refusals wait for it."""
        self.narrow = False
        """Of the batches that come at once it takes the first only."""
        self.busy = False
        self.refusal: KeylaneError | None = None
        """What brokers answer to every batch, while there is such an answer."""
        self.asked = 0
        """Batches that came to a sealed partition, or to an unknown one."""
        self.route_asks = 0
        self.route = self.route_to(1, version=1)
        self.past: list[Partition] = []
        """Partitions that the route has no more."""
        self.accepted_losses: set[int] = set()
        """Partitions of `past` whose loss an operator has accepted."""
        self.history_asks = 0
        self.history_silent = False
        """The metaserver answers no call for the history."""
        self.history_late: asyncio.Event | None = None
        """Answers with the history wait for it."""
        self.strangers: set[str] = set()
        """Addresses at which a broker of another group answers, which has no partition of the
        subject.
        """

    def route_to(self, partition_id: int, *, version: int, group: str = "g") -> Route:
        """A STRICT route to one partition of one broker group."""
        whole = {partition_id: (0, 1024)}
        return route_over(whole, version=version, strategy=OrderStrategy.STRICT, group=group)

    async def open_channel(self, address: str, *, timeout_ms: int):
        if address in self.unreachable:
            raise NotSentError
        return ScriptedChannel(self, address)

    async def control(
        self,
        method,
        address,
        path,
        answer,
        *,
        body=None,
        query=None,
        timeout_ms,
        new_connection=False,
    ):
        if answer is Health:
            return Health(program="metaserver", ready=True)
        self.route_asks += answer is Route
        if address in self.unreachable:
            raise NotSentError
        if answer is SubjectHistory:
            return await self._past()
        known = int(query["known_version"])
        for _ in range(int(query["wait_ms"]) // 5):
            if self.route.version != known:
                break
            await asyncio.sleep(0.005)
        return self.route

    async def _past(self) -> SubjectHistory:
        self.history_asks += 1
        if self.history_silent:
            raise NotSentError
        if self.history_late is not None:
            await self.history_late.wait()
        partitions = [
            PartitionHistory(
                partition=partition, lost=partition.partition_id in self.accepted_losses
            )
            for partition in self.past
        ]
        return SubjectHistory(subject="s", route_version=1, partitions=partitions)

    async def close(self) -> None:
        pass


class ScriptedChannel:
    def __init__(self, network: ScriptedNetwork, address: str) -> None:
        self.network = network
        self.address = address

    @property
    def closed(self) -> bool:
        return self.address in self.network.unreachable

    def begin(self, request, payload=b"", *, timeout_ms, on_answer=None, on_part=None):
        call = Call(
            asyncio.get_running_loop().create_future(),
            on_answer,
            type(request),
            timeout_ms,
            on_part,
        )

        async def answer():
            try:
                call.complete(await self.call(request, payload, timeout_ms=timeout_ms))
            except KeylaneError as error:
                call.fail(error)

        answering = asyncio.ensure_future(answer())
        call.future.add_done_callback(lambda done: done.cancelled() and answering.cancel())
        return call.future

    async def call(self, request, payload=b"", *, timeout_ms):
        if self.closed:
            raise NotSentError
        if self.network.narrow:
            if self.network.busy:
                raise OverloadedError
            self.network.busy = True
            await asyncio.sleep(0.001)
            self.network.busy = False
        if self.network.refusal is not None:
            raise self.network.refusal
        if request.partition_id in self.network.lost:
            raise OutcomeUnknownError
        if request.partition_id in self.network.unknown or self.address in self.network.strangers:
            self.network.asked += 1
            raise PartitionUnknownError(partition_id=request.partition_id)
        header = check_batch(payload)
        whose = (request.partition_id, header.producer_id)
        producer = self.network.producers.get(whose)
        try:
            duplicate = decide_append(
                producer, header, is_clashed=whose in self.network.clashed_ids
            )
        except SequenceReusedError:
            self.network.clashed_ids.add(whose)
            raise
        if isinstance(duplicate, Duplicate):
            return self._answer(request, duplicate.base_offset, duplicate=True)
        if request.partition_id in self.network.sealed:
            self.network.asked += 1
            if self.network.late is not None:
                await self.network.late.wait()
            raise StaleRouteError
        limit = self.network.limits.get(request.partition_id)
        if limit is not None and (size := largest_message(payload, header)) > limit:
            raise message_too_large(size, limit)
        cut = columns(payload, header)
        stored = self.network.stored.setdefault(request.partition_id, [])
        base = len(stored)
        self.network.clashed_ids.discard(whose)
        self.network.producers[whose] = after_append(producer, header, base_offset=base)
        edges = cut.value_edges
        for low, high in itertools.pairwise(edges):
            self.network.history.append((request.partition_id, len(stored)))
            stored.append(cut.blob[low:high])
        await asyncio.sleep(0)
        return self._answer(request, base, duplicate=False)

    def _answer(self, request, base: int, *, duplicate: bool):
        if request.partition_id in self.network.mute or base == self.network.mute_offset:
            raise OutcomeUnknownError
        return Appended(base, "fsync", duplicate), memoryview(b"")

    async def close(self) -> None:
        pass


QUICK = ProducerSettings(backoff=Backoff(first_ms=1, max_ms=5))


def producer_on(
    network: ScriptedNetwork, settings: ProducerSettings = QUICK, **more: Any
) -> Producer:
    """A producer, not yet open, that meets this network."""
    return Producer("meta:1", settings=settings, _environment=Environment(network=network), **more)
