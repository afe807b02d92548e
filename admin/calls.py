"""How an admin asks the metaserver and the brokers."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.control import BrokerView, GroupView, PartitionStatus
from ..protocol.errors import KeylaneError, NotSentError
from ..protocol.ids import check_name
from ..protocol.operations import Cordon, OperationKind, OperationView, Reshape
from ..protocol.routing import Partition
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, in_turns
from ..rpc.home import Resident
from .arguments import checked


class ClusterCalls(Resident):
    """The calls of which an admin's methods are made."""

    _connections: Connections
    _metaserver: MetaClient

    @property
    def _meta(self) -> MetaClient:
        self._connections.home.check()
        return self._metaserver

    async def _group(self, subject: str, group: str) -> GroupView:
        check_name("subject", subject)
        check_name("consumer group", group)
        return await self._meta.group(subject, group)

    async def _cordon(self, broker_group: str, *, cordoned: bool) -> BrokerView:
        check_name("broker group", broker_group)
        return await self._meta.cordon(broker_group, Cordon(cordoned=cordoned))

    async def _change(self, kind: OperationKind, dry_run: bool, **fields: object) -> OperationView:
        body = checked(Reshape, {"kind": kind, "dry_run": dry_run, **fields})
        (operation,) = (await self._meta.reshape(body)).operations
        return operation

    async def _status(self, partition: Partition) -> PartitionStatus:
        """Raises NotSentError and what the broker answers."""
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        broker = self._connections.broker_at(partition.address)
        return await broker.partition(partition.partition_id)

    async def _statuses(self, partitions: Iterable[Partition]) -> dict[int, PartitionStatus | str]:
        """Partition id → its status, or why there is none."""

        async def ask(partition: Partition) -> tuple[int, PartitionStatus | str]:
            try:
                return partition.partition_id, await self._status(partition)
            except KeylaneError as error:
                return partition.partition_id, error.message

        return dict(await in_turns(ask, partitions))
