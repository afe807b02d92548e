"""Clients of a metaserver and of a broker: control calls by endpoint, and a data channel that
reopens by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.control import (
    AutoCreate,
    BrokerHeartbeat,
    BrokerWelcome,
    CreateSubject,
    Health,
    PartitionStatusList,
    SubjectView,
)
from ..protocol.errors import Reason, SubjectUnknownError, UnfinishedError, UnreachableError
from ..protocol.frames import (
    Answer,
    CancelScheduled,
    ListParked,
    Read,
    ReadEdited,
    ReadParked,
    Request,
    is_long_poll,
)
from ..protocol.http.endpoint import Endpoint
from ..protocol.limits import PULLS_AT_ONCE_MAX
from ..protocol.operations import (
    HideSubject,
)
from ..protocol.routing import OrderStrategy, Route
from .liveness.asking_again import ControlCaller
from .metaservers import CALL_TIMEOUT_MS, Metaservers, of_program
from .network import Channel, Network

T = TypeVar("T")
CREATION_PAUSE_S = 0.2
CREATION_STALLED_S = 60.0
"""Seconds to wait for a creation in which no further partition gets its broker."""
REPEATABLE = frozenset({CancelScheduled, ListParked, Read, ReadEdited, ReadParked})
"""Frames that have the same effect when they arrive twice, and that no loop of a client repeats."""
PULL_TURN_MS = 500
"""Milliseconds that a pull waits at a broker while other pulls of this client wait for their turn.
"""


async def _created(ask: Callable[[], Awaitable[T]]) -> T:
    """
    Repeat a call until the subject is created, and return its answer.

    Raises:
        UnfinishedError: no broker has taken a partition of it for CREATION_STALLED_S; the
            metaserver continues.
    """
    clock = asyncio.get_running_loop().time
    hosted, since = -1, clock()
    while True:
        try:
            return await ask()
        except UnfinishedError as error:
            if error.reason is not Reason.CREATION_UNFINISHED:
                raise
            if (error.partitions_hosted or 0) > hosted:
                hosted, since = error.partitions_hosted or 0, clock()
            elif clock() >= since + CREATION_STALLED_S:
                raise
        await asyncio.sleep(CREATION_PAUSE_S)


class MetaClient(Metaservers):
    """
    Calls one of several metaservers; `Metaservers` describes which.

    A call is `meta.call(endpoints.SUBJECT, subject=name)`; there is a method only for calls that
    need more than that.
    """

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """
        Report a broker.

        Args:
            within_ms: time for all metaservers together, if each of them hangs.
        """
        timeout_ms = self._timeout_ms
        if within_ms is not None:
            timeout_ms = min(timeout_ms, max(1, within_ms // len(self._addresses)))
        return await self.call(endpoints.BROKER_HEARTBEAT, body, timeout_ms=timeout_ms)

    async def create_subject(self, body: CreateSubject) -> SubjectView:
        """Create a subject, and wait for its partitions; a repeat with the same settings changes
        nothing.
        """
        return await _created(partial(self.call, endpoints.CREATE_SUBJECT, body))

    async def hide_subject(self, subject: str, body: HideSubject) -> SubjectView:
        """Create a hidden subject in the same way as `create_subject`."""
        return await _created(partial(self.call, endpoints.HIDE_SUBJECT, body, subject=subject))

    async def route(
        self,
        subject: str,
        *,
        known_version: int = -1,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
    ) -> Route:
        """
        Return the route; wait up to `wait_ms` for a version above `known_version`.

        Args:
            order_strategy: checked if given.
            subject_id: id from the known route; if that subject was deleted, another one of this
                name is refused.
        """
        query = {
            "known_version": known_version,
            "wait_ms": wait_ms,
            "order_strategy": order_strategy,
            "subject_id": subject_id or None,
        }
        return await self.call(endpoints.ROUTE, query=query, wait_ms=wait_ms, subject=subject)

    async def route_to_send(
        self,
        subject: str,
        *,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
    ) -> Route:
        """Return the route for a sender: a subject that it has not known yet is created, where the
        metaserver allows it.
        """
        ask = partial(self.route, subject, order_strategy=order_strategy, subject_id=subject_id)
        try:
            return await ask(wait_ms=wait_ms)
        except SubjectUnknownError:
            if subject_id:
                raise
            body = AutoCreate(order_strategy=order_strategy or OrderStrategy.STRICT)
            await self.call(endpoints.AUTO_CREATE, body, subject=subject)
            return await ask()

    async def health(self) -> Health:
        """
        Ask whether a metaserver is ready.

        Raises:
            InvalidRequestError: the address belongs to another program.
        """
        health = await self.call(endpoints.HEALTH)
        return of_program("metaserver", self._addresses[0], health)


class BrokerClient:
    """
    Calls one broker; its channel opens with the first data call, and again after it broke.

    A control call is `broker.control(endpoints.PARTITION, id=partition_id)`, a data call
    `broker.call(Pull(…))`.

    Args:
        on_opening: called before a channel is opened.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        *,
        timeout_ms: int = CALL_TIMEOUT_MS,
        on_opening: Callable[[BrokerClient], object] = lambda _client: None,
    ) -> None:
        self.address = address
        self._network = network
        self._timeout_ms = timeout_ms
        self._on_opening = on_opening
        self._control = ControlCaller(network)
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._queued = 0
        """Number of calls that wait for the lock, or have it."""
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE_MAX)

    @property
    def is_idle(self) -> bool:
        """True if there is no open channel, and no call waits for one."""
        return not self._queued and (self._channel is None or self._channel.closed)

    @property
    def live_channel(self) -> Channel | None:
        """The channel if it is open and nobody is waiting for it, else None: use `channel()`."""
        channel = self._channel
        return None if channel is None or channel.closed or self._queued else channel

    async def channel(self) -> Channel:
        """Return the open channel. Raises NotSentError."""
        if (live := self.live_channel) is not None:
            return live
        # While others wait, the lock is taken for an open channel too, so that no call overtakes
        # theirs.
        self._queued += 1
        try:
            async with self._opening:
                if self._channel is None or self._channel.closed:
                    self._channel = None  # one that has ended keeps buffers of its connection
                    self._on_opening(self)
                    opening = self._network.open_channel(self.address, timeout_ms=self._timeout_ms)
                    self._channel = await opening
                return self._channel
        finally:
            self._queued -= 1

    async def call(
        self, request: Request, payload: bytes = b"", *, wait_ms: int = 0
    ) -> tuple[Answer, memoryview]:
        """Make one data call. Pulls, and reads that wait, beyond `PULLS_AT_ONCE_MAX` wait here,
        and then each has `PULL_TURN_MS` at the broker, in turn.
        """
        if not is_long_poll(request):
            return await self._call(request, payload, wait_ms)
        async with self._pulls:
            if self._pulls.locked() and wait_ms > PULL_TURN_MS:
                wait_ms = PULL_TURN_MS
                request = replace(request, wait_ms=wait_ms)
            return await self._call(request, payload, wait_ms)

    async def _call(
        self, request: Request, payload: bytes, wait_ms: int
    ) -> tuple[Answer, memoryview]:
        kept = self.live_channel
        channel = await self.channel()
        timeout_ms = self._timeout_ms + wait_ms
        try:
            return await channel.call(request, payload, timeout_ms=timeout_ms)
        except UnreachableError:
            # A connection that was kept may be dead without a word, as when the broker's machine
            # was restarted.
            if channel is not kept or not channel.closed or type(request) not in REPEATABLE:
                raise
        return await (await self.channel()).call(request, payload, timeout_ms=timeout_ms)

    async def partitions(self) -> PartitionStatusList:
        """Return all partitions that the broker hosts, read page by page."""
        all_pages = page = await self.control(endpoints.PARTITIONS)
        while page.more_after is not None:
            page = await self.control(endpoints.PARTITIONS, query={"after": page.more_after})
            all_pages.partitions.extend(page.partitions)
        return replace(all_pages, more_after=None)

    async def health(self) -> Health:
        """
        Ask whether the broker is ready, and whether it takes writes.

        Raises:
            InvalidRequestError: the address belongs to another program.
        """
        health = await self.control(endpoints.HEALTH)
        return of_program("broker", self.address, health)

    async def control(
        self,
        endpoint: Endpoint[T],
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        **names: object,
    ) -> T:
        """
        Make one control call.

        Args:
            query: query parameters; those that are None are omitted.
            names: values for the names in braces in the path.

        Raises:
            KeylaneError: the refusal of the broker, or the reason why it did not answer.
        """
        return await self._control.ask(
            endpoint,
            self.address,
            endpoint.path_of(**names),
            body,
            endpoint.query_of(query),
            timeout_ms=endpoint.timeout_ms or self._timeout_ms,
        )

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()
