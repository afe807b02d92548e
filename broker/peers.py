"""The other brokers: finds by the metaserver's routes which of them has a partition, and calls
them.

HTTP requests may arrive at any broker. A request about a partition of this broker is answered from
its own store; for any other partition, the broker that has it is called.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..protocol.errors import NotSentError, SubjectDeletedError, SubjectUnknownError
from ..protocol.frames import Append, Read
from ..protocol.routing import Partition, Route
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.network import Network
from ..rpc.plane.prompt import Handled
from ..rpc.race import shared
from .service import BrokerService

ROUTES_MAX = 10_000
"""The number of routes that are kept; the most recently used ones stay. A message is stored in an
open partition, so an old route is refused there.
"""
PEERS_MAX = 1_000
"""The number of connections that are kept."""


class _KnownRoute(NamedTuple):
    route: Route
    question: int
    """The number of the question that the route answers. Later questions have higher numbers."""


class Peers:
    """Answers data calls about any partition of the cluster."""

    def __init__(
        self, service: BrokerService, broker_group: str, meta: Sequence[str], network: Network
    ) -> None:
        """Create the peers; `meta` has the addresses of the metaservers."""
        self._service = service
        self._broker_group = broker_group
        self._meta = MetaClient(network, meta)
        self._network = network
        self._routes: OrderedDict[str, _KnownRoute] = OrderedDict()
        self._questions = itertools.count()
        self._asked: dict[str, asyncio.Task[Route]] = {}
        """Subject → the first question for its route, which all requests share that arrive
        meanwhile.
        """
        self._newest: dict[str, asyncio.Task[Route]] = {}
        """Subject → a question for its newest route."""
        self._clients: dict[str, BrokerClient] = {}

    async def route(self, subject: str) -> Route:
        """
        Return the route of a subject, which may be out of date.

        Raises:
            SubjectUnknownError, InvalidRequestError
            UnreachableError: the route is not known here, and no metaserver answers.
        """
        kept = self._routes.get(subject)
        if kept is not None:
            return kept.route
        asked = self._asked.get(subject)
        if asked is None:
            asked = self._asked[subject] = asyncio.create_task(self.new_route(subject))
            asked.add_done_callback(lambda _: self._asked.pop(subject))
        return await shared(asked, "the broker has stopped")

    async def route_to_send(self, subject: str) -> Route:
        """Return the route for a sender: an unknown subject is created if the metaserver allows it,
        by one call for all senders.
        """
        try:
            return await self.route(subject)
        except SubjectUnknownError:
            return await self.newest_route(subject)

    async def newest_route(self, subject: str) -> Route:
        """
        Fetch the route from the metaserver, which creates the subject if auto-create allows it.
        Concurrent callers share one request.
        """
        asked = self._newest.get(subject)
        if asked is None:
            asked = self._newest[subject] = asyncio.create_task(self._ask_newest(subject))
            asked.add_done_callback(lambda _: self._newest.pop(subject))
        return await shared(asked, "the broker has stopped")

    async def _ask_newest(self, subject: str) -> Route:
        question = next(self._questions)
        return self._know(subject, await self._meta.route_to_send(subject), question)

    async def route_of(self, subject: str, subject_id: int) -> Route:
        """
        Return the route of one subject, not of a later one of its name. The route may be out of
        date, and no subject is created.

        Args:
            subject_id: its id; 0 if it is not known.

        Raises:
            SubjectDeletedError: it was deleted.
            SubjectUnknownError, UnreachableError
        """
        try:
            route = await self.route(subject)
        except SubjectUnknownError:
            if not subject_id:
                raise
            return await self.new_route(subject, subject_id=subject_id)
        if subject_id and route.subject_id != subject_id:
            return await self.new_route(subject, subject_id=subject_id)
        return route

    async def new_route(
        self, subject: str, *, known_version: int = -1, wait_ms: int = 0, subject_id: int = 0
    ) -> Route:
        """
        Ask for the route. The answer waits up to `wait_ms` for a version other than
        `known_version`.

        A later subject of the name counts its versions from the beginning, so the id of a subject
        whose route is kept is sent as well.

        Args:
            subject_id: see `route_of`.
        """
        ask = partial(self._meta.route, subject)
        kept = self._routes.get(subject)
        known = subject_id or (kept.route.subject_id if kept is not None else 0)
        question = next(self._questions)
        try:
            route = await ask(known_version=known_version, wait_ms=wait_ms, subject_id=known)
        except (SubjectDeletedError, SubjectUnknownError):
            if subject_id or kept is None:
                raise
            self._routes.pop(subject, None)
            question = next(self._questions)
            route = await ask()
        return self._know(subject, route, question)

    def _know(self, subject: str, route: Route, question: int) -> Route:
        """
        Keep the answer to a question, unless a newer route is kept. Return the newest known route
        of its subject.

        The versions of one subject rise. Those of two subjects of one name cannot be compared;
        there the later question counts.
        """
        kept = self._routes.get(subject)
        if kept is not None:
            same = kept.route.subject_id == route.subject_id
            if same and kept.route.version > route.version:
                return kept.route
            if not same and kept.question > question:
                return route
        self._routes[subject] = _KnownRoute(route, question)
        self._routes.move_to_end(subject)
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)
        return route

    def is_here(self, partition: Partition) -> bool:
        """Return True if the partition belongs to this broker."""
        return partition.broker_group == self._broker_group

    async def call(
        self, partition: Partition, request: Append | Read, payload: bytes = b""
    ) -> Handled:
        """
        Answer a request about a partition, here or at its broker.

        Raises:
            KeylaneError: the answer is an error, or there is none.
        """
        if self.is_here(partition):
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
        for asked in [*self._asked.values(), *self._newest.values()]:
            asked.cancel()
        for client in self._clients.values():
            await client.close()
