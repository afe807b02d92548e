"""The pull clients of one subject and consumer group: made and destroyed by comparing grants.

`PullRegister` has one composite for each (subject, group).  A grant that went is handed over in its own task, so that a
slow handler of one partition delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...protocol.control import Grant
from .pull_client import PullClient


class CompositePullClient:
    """
    Pull clients by partition, each with a token of its own.

    `make(grant, deadline_ms)` makes one, or none if the deadline has passed; `hand_over(client)` ends one, to the
    last report; `give_back(grant)` reports once more what was let go of.
    """

    def __init__(
        self,
        make: Callable[[Grant, int], PullClient | None],
        hand_over: Callable[[PullClient], Awaitable[None]],
        give_back: Callable[[Grant], None],
    ) -> None:
        self._make = make
        self._hand_over = hand_over
        self._give_back = give_back
        self._clients: dict[int, PullClient] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}
        self._parting: dict[int, PullClient] = {}
        self._let_go: dict[int, int] = {}
        """The highest token of each partition that was ended here: never taken up again, so that under one token no
        message is handled again that was handled before."""
        self._grants: tuple[Grant, ...] = ()
        self._deadline_ms = 0
        self._closing = False

    @property
    def clients(self) -> list[PullClient]:
        """Those that are not ending, by partition id."""
        return [self._clients[key] for key in sorted(self._clients)]

    @property
    def ending(self) -> list[PullClient]:
        """Those that are being handed over, by partition id."""
        return [self._parting[key] for key in sorted(self._parting)]

    def holding(self, session: str) -> tuple[tuple[int, int], ...]:
        """(partition id, token) of all that `session` has here or is still handing over."""
        found = sorted((self._clients | self._parting).items())
        return tuple((key, client.token) for key, client in found if client.session == session)

    def apply(self, grants: tuple[Grant, ...], deadline_ms: int) -> None:
        """Renew what stays, make what is new, hand over what went, lapsed or came back with another token."""
        if self._closing:
            return
        self._grants = grants
        self._deadline_ms = deadline_ms
        wanted = {int(grant.partition.partition_id): grant for grant in grants}
        for partition_id, client in list(self._clients.items()):
            grant = wanted.get(partition_id)
            if grant is None or grant.token != client.token or client.lapsed:
                self.end(client)
            else:
                client.renew(deadline_ms, grant.partition.address)
        for partition_id, grant in wanted.items():
            if partition_id in self._clients or partition_id in self._ending:
                continue
            if grant.token <= self._let_go.get(partition_id, 0):
                self._give_back(grant)  # the metaserver has not heard it yet
            elif grant.partition.address is not None:
                made = self._make(grant, deadline_ms)
                if made is not None:
                    self._clients[partition_id] = made

    def end(self, client: PullClient) -> None:
        """Hand a partition over, in a task of its own."""
        if self._clients.get(client.partition_id) is not client:
            return
        del self._clients[client.partition_id]
        client.stop_starting()
        if client.once or client.fenced:
            self._let_go[client.partition_id] = client.token
        self._parting[client.partition_id] = client
        self._ending[client.partition_id] = asyncio.create_task(
            self._ended(client), name=f"hand over {client.partition_id}"
        )

    async def _ended(self, client: PullClient) -> None:
        try:
            await self._hand_over(client)
        finally:
            del self._ending[client.partition_id]
            del self._parting[client.partition_id]
        if client.partition_id in {int(one.partition.partition_id) for one in self._grants}:
            # Granted again while it was being handed over.
            self.apply(self._grants, self._deadline_ms)

    def lose_all(self) -> list[asyncio.Task[None]]:
        """Nothing is granted any more: end everything; the tasks that do."""
        self._grants = ()
        for client in self.clients:
            self.end(client)
        return list(self._ending.values())

    def end_all(self) -> list[asyncio.Task[None]]:
        """Begin to hand over everything, and take no more; the tasks that do."""
        self._closing = True
        return self.lose_all()


class PullRegister:
    """Composites by (subject, consumer group)."""

    def __init__(self) -> None:
        self._composites: dict[tuple[str, str], CompositePullClient] = {}

    def register(self, subject: str, group: str, composite: CompositePullClient) -> None:
        """Add the composite of a subscription; there is one for each."""
        assert (subject, group) not in self._composites
        self._composites[subject, group] = composite

    @property
    def clients(self) -> list[PullClient]:
        """The pull clients of all composites."""
        return [client for one in self._composites.values() for client in one.clients]

    def end_all(self) -> list[asyncio.Task[None]]:
        """Begin to hand over everything."""
        return [task for one in self._composites.values() for task in one.end_all()]
