"""An admin's calls about holds: messages that retention keeps for a job."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.errors import NotSentError, PartitionUnknownError
from ..protocol.ids import check_name
from ..protocol.reprocess.holds import HoldView, SetHold
from ..protocol.routing import Partition
from ..rpc.connections import in_turns
from .arguments import checked, mapping_of
from .calls import ClusterCalls


class HoldCalls(ClusterCalls):
    """The part of an admin that is about holds."""

    async def hold(
        self, subject: str, from_offsets: Mapping[int, int], *, job: str, ttl_ms: int
    ) -> dict[int, tuple[HoldView, ...]]:
        """
        Keep messages for a job against retention, or renew that; a hold that is not renewed expires by itself.

        Args:
            from_offsets: partition id → the first offset that is kept, with all messages behind it.
            job: whose hold it is; a later hold of the same job on a partition takes its place.
            ttl_ms: 0 to 86_400_000; how long it lasts without being renewed, in milliseconds; 0 ends it.

        Returns:
            Partition id → every hold on it.

        Raises:
            SubjectUnknownError, PartitionUnknownError
            OffsetOutOfRangeError: messages from the offset on are gone; the other partitions may be held.
            OverloadedError: 16 jobs hold the partition.
        """
        asked = {
            partition_id: checked(
                SetHold, {"job": check_name("job", job), "from_offset": start, "ttl_ms": ttl_ms}
            )
            for partition_id, start in mapping_of("from_offsets", from_offsets).items()
        }
        route = await self._meta.route(check_name("subject", subject))
        known = {int(partition.partition_id): partition for partition in route.partitions}
        strange = sorted(asked.keys() - known.keys())
        if strange:
            raise PartitionUnknownError(
                f"subject {subject} has no partition {strange[0]}", partition_id=strange[0]
            )
        held = await in_turns(
            lambda partition_id: self._hold(known[partition_id], asked[partition_id]), asked
        )
        return dict(zip(asked, held, strict=True))

    async def release_hold(self, subject: str, job: str) -> None:
        """
        End the holds of a job on every partition of a subject; a repeat changes nothing.

        Raises:
            SubjectUnknownError
        """
        body = checked(SetHold, {"job": check_name("job", job), "ttl_ms": 0})
        route = await self._meta.route(check_name("subject", subject))
        await in_turns(lambda partition: self._hold(partition, body), route.partitions)

    async def _hold(self, partition: Partition, body: SetHold) -> tuple[HoldView, ...]:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        broker = self._connections.broker_at(partition.address)
        return (await broker.hold(partition.partition_id, body)).holds
