"""Clients for metaservers and brokers: control calls by endpoint, and a data channel that reopens
automatically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import json
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
    WaitingProducer,
)
from ..protocol.errors import Reason, SubjectUnknownError, UnfinishedError, UnreachableError
from ..protocol.frames import (
    Answer,
    CancelScheduled,
    Follow,
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
from .liveness.control_calls import call_control
from .metaservers import CALL_TIMEOUT_MS, Metaservers, check_program
from .network import Channel, Network

T = TypeVar("T")
CREATION_PAUSE_S = 0.2
CREATION_STALLED_S = 60.0
"""The time in seconds after which the creation of a subject counts as stalled if no further
partition was hosted.
"""
REPEATABLE = frozenset({CancelScheduled, Follow, ListParked, Read, ReadEdited, ReadParked})
"""Idempotent frames that are retried here, because clients have no retry loop for them."""
PULL_TURN_MS = 500
"""The time in milliseconds that a pull waits at a broker while other pulls of this client wait for
their turn.
"""


async def _retry_until_created(call: Callable[[], Awaitable[T]]) -> T:
    """
    Repeat a call until the subject has been created, and return the answer.

    Raises:
        UnfinishedError: no further partition was hosted for CREATION_STALLED_S. The metaserver
            continues with the creation.
    """
    now_s = asyncio.get_running_loop().time
    hosted_count, progressed_at_s = -1, now_s()
    while True:
        try:
            return await call()
        except UnfinishedError as error:
            if error.reason is not Reason.CREATION_UNFINISHED:
                raise
            if (error.partitions_hosted or 0) > hosted_count:
                hosted_count, progressed_at_s = error.partitions_hosted or 0, now_s()
            elif now_s() >= progressed_at_s + CREATION_STALLED_S:
                raise
        await asyncio.sleep(CREATION_PAUSE_S)


class MetaClient(Metaservers):
    """
    Calls one of several metaservers; see `Metaservers`.

    Most calls look like `meta.call(endpoints.SUBJECT, subject=name)`; only calls that need more
    have their own method.
    """

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        """
        Send a broker's heartbeat.

        Args:
            within_ms: the time limit for trying all metaservers, even if each of them hangs.
        """
        timeout_ms = self._timeout_ms
        if within_ms is not None:
            timeout_ms = min(timeout_ms, max(1, within_ms // len(self._addresses)))
        return await self.call(endpoints.BROKER_HEARTBEAT, body, timeout_ms=timeout_ms)

    async def create_subject(self, body: CreateSubject) -> SubjectView:
        """Create a subject, and wait until its partitions are hosted. Repeating the call with the
        same settings has no effect.
        """
        return await _retry_until_created(partial(self.call, endpoints.CREATE_SUBJECT, body))

    async def hide_subject(self, subject: str, body: HideSubject) -> SubjectView:
        """Create a hidden subject in the same way as `create_subject`."""
        return await _retry_until_created(
            partial(self.call, endpoints.HIDE_SUBJECT, body, subject=subject)
        )

    async def route(
        self,
        subject: str,
        *,
        known_version: int = -1,
        wait_ms: int = 0,
        order_strategy: OrderStrategy | None = None,
        subject_id: int = 0,
        waiting: Sequence[WaitingProducer] = (),
    ) -> Route:
        """
        Return the route. Waits up to `wait_ms` for a version above `known_version`.

        Args:
            order_strategy: the expected order strategy; None skips the check.
            subject_id: the id from the known route, so that a later subject with the same name is
                refused; 0 accepts any.
            waiting: what the caller, a producer, waits for meanwhile, for operators.
        """
        query = {
            "known_version": known_version,
            "wait_ms": wait_ms,
            "order_strategy": order_strategy,
            "subject_id": subject_id or None,
            "waiting": json.encode(waiting).decode() if waiting else None,
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
        """Return the route for a producer. An unknown subject is created if the metaserver allows
        it, unless `subject_id` is given.
        """
        fetch = partial(self.route, subject, order_strategy=order_strategy, subject_id=subject_id)
        try:
            return await fetch(wait_ms=wait_ms)
        except SubjectUnknownError:
            if subject_id:
                raise
            body = AutoCreate(order_strategy=order_strategy or OrderStrategy.STRICT)
            await self.call(endpoints.AUTO_CREATE, body, subject=subject)
            return await fetch()

    async def health(self) -> Health:
        """
        Return whether a metaserver is ready.

        Raises:
            InvalidRequestError: another kind of program answered.
        """
        health = await self.call(endpoints.HEALTH)
        return check_program("metaserver", self._addresses[0], health)


class BrokerClient:
    """
    Calls one broker. The first data call opens the channel, which is reopened after it breaks.

    A control call is `broker.control(endpoints.PARTITION, id=partition_id)`, a data call
    `broker.call(Pull(…))`.

    Args:
        on_opening: called with this client before it opens a channel.
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
        self._channel: Channel | None = None
        self._open_lock = asyncio.Lock()
        self._opening_calls = 0
        """The number of calls that hold the lock or wait for it."""
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE_MAX)

    @property
    def is_idle(self) -> bool:
        """True if no channel is open and no call is waiting for one."""
        return not self._opening_calls and (self._channel is None or self._channel.closed)

    @property
    def live_channel(self) -> Channel | None:
        """The channel if it is open and no call is waiting for it, otherwise None; then use
        `channel()`.
        """
        channel = self._channel
        return None if channel is None or channel.closed or self._opening_calls else channel

    async def channel(self) -> Channel:
        """Return the open channel. Raises NotSentError."""
        if (live_channel := self.live_channel) is not None:
            return live_channel
        # While other calls wait, even an open channel is handed out in turn, so that no call
        # overtakes them.
        self._opening_calls += 1
        try:
            async with self._open_lock:
                if self._channel is None or self._channel.closed:
                    self._channel = None  # release the buffers of a closed connection
                    self._on_opening(self)
                    opening = self._network.open_channel(self.address, timeout_ms=self._timeout_ms)
                    self._channel = await opening
                return self._channel
        finally:
            self._opening_calls -= 1

    async def call(
        self, request: Request, payload: bytes = b"", *, wait_ms: int = 0
    ) -> tuple[Answer, memoryview]:
        """Make one data call. At most `PULLS_AT_ONCE_MAX` long polls are sent at a time; while
        others wait here, each of them waits at the broker for at most `PULL_TURN_MS`.
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
        reused_channel = self.live_channel
        channel = await self.channel()
        timeout_ms = self._timeout_ms + wait_ms
        try:
            return await channel.call(request, payload, timeout_ms=timeout_ms)
        except UnreachableError:
            # A reused connection may be dead without anyone having noticed, for example because the
            # broker's machine was restarted.
            if (
                channel is not reused_channel
                or not channel.closed
                or type(request) not in REPEATABLE
            ):
                raise
        return await (await self.channel()).call(request, payload, timeout_ms=timeout_ms)

    async def partitions(self, *, storing: bool = False) -> PartitionStatusList:
        """Return all partitions that the broker hosts, or only those that have stored something
        lately. They are fetched page by page.
        """
        query: dict[str, object] = {"storing": 1 if storing else None}
        all_pages = page = await self.control(endpoints.PARTITIONS, query=query)
        while page.more_after is not None:
            query["after"] = page.more_after
            page = await self.control(endpoints.PARTITIONS, query=query)
            all_pages.partitions.extend(page.partitions)
        return replace(all_pages, more_after=None)

    async def health(self) -> Health:
        """
        Return whether the broker is ready, and whether it accepts messages.

        Raises:
            InvalidRequestError: another kind of program answered.
        """
        health = await self.control(endpoints.HEALTH)
        return check_program("broker", self.address, health)

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
            query: query parameters; None values are omitted.
            names: values for the placeholders in the path.

        Raises:
            KeylaneError: the broker refused the call, or there was no answer.
        """
        return await call_control(
            self._network,
            endpoint,
            self.address,
            endpoint.path_of(**names),
            body,
            endpoint.query_of(query),
            timeout_ms=endpoint.timeout_ms or self._timeout_ms,
        )

    async def is_accepting(self, *, timeout_ms: int) -> bool:
        """Return True if something accepts connections at the address, whether or not it
        answers.
        """
        return await self._network.is_accepting(self.address, timeout_ms=timeout_ms)

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()
