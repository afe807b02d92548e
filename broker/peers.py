"""Forwards data calls to the broker that hosts the partition, according to the metaserver's routes.

HTTP requests may arrive at any broker. Requests for this broker's partitions are answered from its
own store; all others are sent to the broker that hosts the partition.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..protocol.errors import NotSentError, SubjectDeletedError, SubjectUnknownError
from ..protocol.frames import Append, Read
from ..protocol.routing import Partition, Route
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.network import Network
from ..rpc.plane.prompt import Handled
from ..rpc.race import wait_for_shared
from .service import BrokerService

ROUTES_MAX = 10_000
"""The maximum number of cached routes. The least recently changed ones are evicted. A stale route
is harmless: a broker refuses messages for a partition that is not open.
"""
PEERS_MAX = 1_000
"""The maximum number of open connections to other brokers."""


class _CachedRoute(NamedTuple):
    route: Route
    fetch_number: int
    """The number of the fetch that returned the route. Later fetches have higher numbers."""


class Peers:
    """Answers data calls about any partition of the cluster."""

    def __init__(
        self, service: BrokerService, broker_group: str, meta: Sequence[str], network: Network
    ) -> None:
        """
        Args:
            meta: the addresses of the metaservers.
        """
        self._service = service
        self._broker_group = broker_group
        self._meta = MetaClient(network, meta)
        self._network = network
        self._routes: OrderedDict[str, _CachedRoute] = OrderedDict()
        self._fetch_numbers = itertools.count()
        self._pending_fetches: dict[str, asyncio.Task[Route]] = {}
        """Maps each subject whose route is unknown to the fetch of that route, which all concurrent
        requests share.
        """
        self._pending_creations: dict[str, asyncio.Task[Route]] = {}
        """Maps each subject to the fetch of its newest route, which may create the subject."""
        self._clients: dict[str, BrokerClient] = {}

    async def route(self, subject: str) -> Route:
        """
        Return the cached route of a subject, which may be stale, or fetch it.

        Raises:
            SubjectUnknownError, InvalidRequestError
            UnreachableError: the route is not cached, and no metaserver answers.
        """
        cached = self._routes.get(subject)
        if cached is not None:
            return cached.route
        return await _fetch_once(self._pending_fetches, subject, self.fetch_route)

    async def route_to_send(self, subject: str) -> Route:
        """Return the route for sending, which may be stale. If the subject is unknown and
        auto-create allows it, the subject is created.
        """
        try:
            return await self.route(subject)
        except SubjectUnknownError:
            return await self.fetch_or_create_route(subject)

    async def fetch_or_create_route(self, subject: str) -> Route:
        """
        Fetch the route from the metaserver, which creates the subject if auto-create allows it.
        Concurrent callers share one request.
        """
        return await _fetch_once(self._pending_creations, subject, self._fetch_or_create)

    async def _fetch_or_create(self, subject: str) -> Route:
        fetch_number = next(self._fetch_numbers)
        return self._cache_route(subject, await self._meta.route_to_send(subject), fetch_number)

    async def route_by_id(self, subject: str, subject_id: int) -> Route:
        """
        Return the route of the subject with this id, rather than of a later one with the same name.
        The route may be stale; no subject is created.

        Args:
            subject_id: the id, or 0 if it is unknown.

        Raises:
            SubjectDeletedError: the subject was deleted.
            SubjectUnknownError, UnreachableError
        """
        try:
            route = await self.route(subject)
        except SubjectUnknownError:
            if not subject_id:
                raise
            return await self.fetch_route(subject, subject_id=subject_id)
        if subject_id and route.subject_id != subject_id:
            return await self.fetch_route(subject, subject_id=subject_id)
        return route

    async def fetch_route(
        self, subject: str, *, known_version: int = -1, wait_ms: int = 0, subject_id: int = 0
    ) -> Route:
        """
        Fetch the route from the metaserver, which waits up to `wait_ms` for a version other than
        `known_version`.

        Versions start again for a later subject with the same name, so the id of the cached
        subject is sent along with the version.

        Args:
            subject_id: see `route_by_id`.
        """
        fetch = partial(self._meta.route, subject)
        cached = self._routes.get(subject)
        known_id = subject_id or (cached.route.subject_id if cached is not None else 0)
        fetch_number = next(self._fetch_numbers)
        try:
            route = await fetch(known_version=known_version, wait_ms=wait_ms, subject_id=known_id)
        except (SubjectDeletedError, SubjectUnknownError):
            if subject_id or cached is None:
                raise
            self._routes.pop(subject, None)
            fetch_number = next(self._fetch_numbers)
            route = await fetch()
        return self._cache_route(subject, route, fetch_number)

    def _cache_route(self, subject: str, route: Route, fetch_number: int) -> Route:
        """
        Cache a fetched route unless the cached one is newer. Return the newest known route of that
        subject.

        Versions of one subject only rise. Versions of two subjects with the same name cannot be
        compared, so in that case the later fetch wins.
        """
        cached = self._routes.get(subject)
        if cached is not None:
            is_same_subject = cached.route.subject_id == route.subject_id
            if is_same_subject and cached.route.version > route.version:
                return cached.route
            if not is_same_subject and cached.fetch_number > fetch_number:
                return route
        self._routes[subject] = _CachedRoute(route, fetch_number)
        self._routes.move_to_end(subject)
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)
        return route

    def is_local(self, partition: Partition) -> bool:
        """Return True if this broker hosts the partition."""
        return partition.broker_group == self._broker_group

    async def call(
        self, partition: Partition, request: Append | Read, payload: bytes = b""
    ) -> Handled:
        """
        Answer a request for a partition from this broker's store, or send it to another broker.

        Raises:
            KeylaneError: the request was refused, or the broker did not answer.
        """
        if self.is_local(partition):
            return await self._service.handle(request, memoryview(payload))
        address = partition.address
        if address is None:
            raise NotSentError.of_group(partition.broker_group, int(partition.partition_id))
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= PEERS_MAX:
                await self._clients.pop(next(iter(self._clients))).close()
            client = self._clients.setdefault(address, BrokerClient(self._network, address))
        answer, data = await client.call(request, payload)
        return answer, bytes(data)

    async def close(self) -> None:
        """Close the connections to other brokers."""
        for fetch_task in [*self._pending_fetches.values(), *self._pending_creations.values()]:
            fetch_task.cancel()
        for client in self._clients.values():
            await client.close()


async def _fetch_once(
    pending: dict[str, asyncio.Task[Route]],
    subject: str,
    fetch: Callable[[str], Coroutine[Any, Any, Route]],
) -> Route:
    """Return the result of the pending fetch of a subject's route. If there is none, start a
    fetch.
    """
    fetch_task = pending.get(subject)
    if fetch_task is None:
        fetch_task = pending[subject] = asyncio.create_task(fetch(subject))
        fetch_task.add_done_callback(lambda _: pending.pop(subject))
    return await wait_for_shared(fetch_task, "the broker has stopped")
