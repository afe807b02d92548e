"""A broker as the metaserver sees one: a real control server that hosts what it is told, and reports itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keylane.protocol.control import (
    BrokerHeartbeat,
    HostPartition,
    PartitionStatus,
    PartitionStatusList,
)
from keylane.protocol.errors import BrokerReadOnlyError
from keylane.protocol.routing import Partition
from keylane.rpc.client import MetaClient
from keylane.rpc.server import ControlRoute, Server


class HostingBroker:
    """Hosts partitions in memory; `refuse_after` of them it takes no more."""

    def __init__(self, broker_group: str, broker_id: str = "") -> None:
        self.broker_group = broker_group
        self.broker_id = broker_id or f"folder-of-{broker_group}"
        self.hosted: dict[int, Partition] = {}
        self.calls = 0
        self.refuse_after: int | None = None
        self._server = Server(
            [
                ControlRoute("POST", "/v1/partitions", HostPartition, self._host),
                ControlRoute("GET", "/v1/partitions", None, self._list),
            ]
        )

    @property
    def address(self) -> str:
        return self._server.address

    async def start(self, port: int = 0) -> None:
        await self._server.start("127.0.0.1", port)

    async def stop(self) -> None:
        await self._server.stop()

    async def report(self, meta: MetaClient, *, writable: bool = True) -> None:
        await meta.broker_heartbeat(
            BrokerHeartbeat(
                broker_group=self.broker_group,
                broker_id=self.broker_id,
                address=self.address,
                writable=writable,
            )
        )

    async def _host(self, body: HostPartition, _params: object) -> PartitionStatus:
        self.calls += 1
        one = body.partition
        if self.refuse_after is not None and len(self.hosted) >= self.refuse_after:
            raise BrokerReadOnlyError("this broker takes no more partitions")
        self.hosted[one.partition_id] = one
        return self._status(one, body.subject)

    async def _list(self, _body: object, _params: object) -> PartitionStatusList:
        return PartitionStatusList(
            broker_group=self.broker_group,
            partitions=[self._status(one, "") for one in self.hosted.values()],
        )

    @staticmethod
    def _status(one: Partition, subject: str) -> PartitionStatus:
        return PartitionStatus(
            partition_id=one.partition_id,
            subject=subject,
            name=one.name,
            state=one.state,
            first_offset=0,
            next_offset=0,
        )


@asynccontextmanager
async def hosting_broker(
    meta: MetaClient, broker_group: str, broker_id: str = ""
) -> AsyncIterator[HostingBroker]:
    """A broker that serves and has reported itself once."""
    broker = HostingBroker(broker_group, broker_id)
    await broker.start()
    try:
        await broker.report(meta)
        yield broker
    finally:
        await broker.stop()
