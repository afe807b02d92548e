"""A consumer of frames alone: joins a group, acquires what it is granted, parks messages."""

from __future__ import annotations

import secrets
from typing import Any, Self

from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from keylane.protocol.frames import (
    Ack,
    Acquire,
    AdoptParked,
    ChangeParked,
    ListParked,
    Pull,
)
from keylane.protocol.parked import (
    Adopt,
    Failure,
    ParkChange,
    ParkedKeyRow,
    decode_adopted,
    decode_key_rows,
    encode_parked,
)
from keylane.protocol.routing import Route
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork

FAILURE = Failure("ValueError", "no such aircraft", "host-1:worker", 1_800_000_000_123, 5)


class RawOwner:
    """The only consumer of a group: it has all partitions."""

    def __init__(self, meta: str, subject: str, group: str) -> None:
        self._network = HttpNetwork()
        self._meta = MetaClient(self._network, [meta])
        self._subject, self._group = subject, group
        self._session = secrets.token_hex(8)
        self._tokens: dict[int, int] = {}
        self._brokers: dict[int, BrokerClient] = {}

    async def __aenter__(self) -> Self:
        join = Join(subject=self._subject, group=self._group, session=self._session)
        await self._meta.call(endpoints.JOIN, join)
        await self.granted()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for broker in self._brokers.values():
            await broker.close()
        await self._network.close()

    async def route(self) -> Route:
        return (await self._meta.call(endpoints.SUBJECT, subject=self._subject)).route

    async def granted(self) -> list[int]:
        """Acquire the partitions that are granted now; their ids."""
        grants = (
            await self._meta.call(endpoints.HEARTBEAT, Heartbeat(session=self._session))
        ).grants
        for grant in grants:
            number = grant.partition.partition_id
            if self._tokens.get(number) == grant.token:
                continue
            assert grant.partition.address is not None
            self._tokens[number] = grant.token
            self._brokers[number] = BrokerClient(self._network, grant.partition.address)
            acquire = Acquire(number, self._group, self._session, grant.token, 30_000)
            await self._brokers[number].call(acquire)
        return [grant.partition.partition_id for grant in grants]

    async def drained(self, number: int) -> None:
        """Tell the metaserver that all of a sealed partition is handled."""
        await self._meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=self._session, drained=(number,))
        )

    def _owner(self, number: int) -> tuple[int, str, str, int]:
        return number, self._group, self._session, self._tokens[number]

    async def change(self, number: int, *changes: ParkChange) -> None:
        request = ChangeParked(*self._owner(number))
        await self._brokers[number].call(request, encode_parked(changes))

    async def ack(self, number: int, *ranges: tuple[int, int]) -> Any:
        answer, _ = await self._brokers[number].call(Ack(*self._owner(number), ranges))
        return answer

    async def pull(self, number: int, offset: int, *, wait_ms: int) -> Any:
        request = Pull(*self._owner(number), offset, 1 << 20, wait_ms)
        answer, _ = await self._brokers[number].call(request, wait_ms=wait_ms)
        return answer

    async def keys(self, number: int) -> list[ParkedKeyRow]:
        request = ListParked(*self._owner(number), 0)
        _, payload = await self._brokers[number].call(request)
        return decode_key_rows(payload)

    async def adopt(self, parent: int, child: int) -> None:
        """Take over what of the parent belongs to a child."""
        await self.change(child, await self.take(parent, child))

    async def take(self, parent: int, child: int) -> Adopt:
        """Have the parent pass on what belongs to a child; returns what the child has to adopt."""
        (partition,) = [
            each for each in (await self.route()).partitions if each.partition_id == child
        ]
        low, high = partition.range_start, partition.range_end
        request = AdoptParked(parent, self._group, low, high, 0)
        answer, payload = await self._brokers[parent].call(request)
        assert answer.following is None
        return Adopt(parent, tuple(decode_adopted(payload)), last=True)
