"""A broker as the metaserver sees one: a real control server that hosts what it is told, and
reports itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import (
    BrokerHeartbeat,
    Done,
    HostPartition,
    PartitionStatus,
    PartitionStatusList,
)
from keylane.protocol.errors import BrokerReadOnlyError, KeylaneError, PartitionUnknownError
from keylane.protocol.membership.versions import VERSION
from keylane.protocol.progress import RegisterGroups, RegisterGroupsBatch, RegisterGroupsResult
from keylane.protocol.routing import Partition, PartitionState
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.server import ControlRoute, Params, Server


class HostingBroker:
    """Hosts partitions in memory, without messages; `refuse_after` of them it takes no more."""

    def __init__(self, broker_group: str, broker_id: str = "") -> None:
        self.broker_group = broker_group
        self.broker_id = broker_id or f"folder-of-{broker_group}"
        self.hosted: dict[int, Partition] = {}
        self._told: dict[int, HostPartition] = {}
        self.calls = 0
        self.refuse_after: int | None = None
        self.refusal: KeylaneError = BrokerReadOnlyError("this broker takes no more partitions")
        self.known: dict[int, set[str]] = {}
        """Groups that it was told of, by partition."""
        self.untold: set[int] = set()
        """Partitions that its reports ask the groups of."""
        self.deaf = False
        """It hears of no group."""
        self._server = Server(
            [
                ControlRoute(endpoints.HOST_PARTITION, self._host),
                ControlRoute(endpoints.PARTITIONS, self._list),
                ControlRoute(endpoints.PARTITION, self._describe),
                ControlRoute(endpoints.SEAL, self._seal),
                ControlRoute(endpoints.REGISTER_GROUPS, self._register),
                ControlRoute(endpoints.REGISTER_GROUPS_BATCH, self._register_batch),
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
                version=VERSION,
                broker_group=self.broker_group,
                broker_id=self.broker_id,
                address=self.address,
                writable=writable,
                untold=tuple(sorted(self.untold)),
            )
        )

    async def _host(self, body: HostPartition, _params: object) -> PartitionStatus:
        self.calls += 1
        partition = body.partition
        if self.refuse_after is not None and len(self.hosted) >= self.refuse_after:
            raise self.refusal
        known = self.hosted.get(partition.partition_id)
        if known is None or known.state is not PartitionState.SEALED:
            self.hosted[partition.partition_id] = partition
        self._told[partition.partition_id] = body
        if body.groups:
            self.known.setdefault(partition.partition_id, set()).update(body.groups)
        return self._status(partition.partition_id)

    async def _describe(self, _body: object, params: Params) -> PartitionStatus:
        return self._status(self._known(params))

    def _known(self, params: Params) -> int:
        partition_id = int(params["id"])
        if partition_id not in self.hosted:
            raise PartitionUnknownError(partition_id=partition_id)
        return partition_id

    async def _seal(self, _body: object, params: Params) -> PartitionStatus:
        partition_id = self._known(params)
        sealed = replace(self.hosted[partition_id], state=PartitionState.SEALED)
        self.hosted[partition_id] = sealed
        return self._status(partition_id)

    async def _register_batch(
        self, body: RegisterGroupsBatch, _params: object
    ) -> RegisterGroupsResult:
        for each in body.partitions:
            await self._register(each.registration, {"id": str(each.partition_id)})
        return RegisterGroupsResult()

    async def _register(self, body: RegisterGroups, params: Params) -> Done:
        if self.deaf:
            raise BrokerReadOnlyError
        self.known.setdefault(int(params["id"]), set()).update(body.groups)
        if body.complete:
            self.untold.discard(int(params["id"]))
        return Done()

    async def _list(self, _body: object, _params: object) -> PartitionStatusList:
        return PartitionStatusList(
            broker_group=self.broker_group,
            partitions=[self._status(partition_id) for partition_id in self.hosted],
            broker_id=self.broker_id,
        )

    def _status(self, partition_id: int) -> PartitionStatus:
        partition = self.hosted[partition_id]
        told = self._told[partition_id]
        return PartitionStatus(
            partition_id=partition_id,
            subject=told.subject,
            name=partition.name,
            state=partition.state,
            first_offset=0,
            next_offset=0,
            facts=told,
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


class MetaAndBroker(NamedTuple):
    meta: MetaClient
    address: str
    broker: HostingBroker


@asynccontextmanager
async def running_house(folder: Path, **settings: object) -> AsyncIterator[MetaAndBroker]:
    """A metaserver with these settings, and a broker of group `left`, in this process."""
    network = HttpNetwork()
    wanted = {"poll_ms": 100, "repair_ms": 100, "port": 0} | settings
    try:
        async with running_metaserver(MetaserverSettings(data=folder, **wanted)) as running:
            meta = MetaClient(network, [running.address], timeout_ms=120_000)
            async with hosting_broker(meta, "left") as broker:
                yield MetaAndBroker(meta, running.address, broker)
    finally:
        await network.close()
