"""Asks brokers for the offsets of a partition and the progress of a group. Does network I/O."""

from __future__ import annotations

from ...protocol import endpoints
from ...protocol.control import TimeBound
from ...protocol.errors import KeylaneError, NotSentError
from ...protocol.routing import Partition
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from .cursors import PartitionOffsets

CALL_TIMEOUT_MS = 2_000


def broker_at(network: Network, address: str | None, broker_group: str) -> BrokerClient:
    """Return a client for a broker. Raises NotSentError if the broker is silent."""
    if address is None:
        raise NotSentError(f"broker group {broker_group!r} is silent")
    return BrokerClient(network, address, timeout_ms=CALL_TIMEOUT_MS)


async def read_offsets(
    network: Network, partition: Partition, group: str, *, at_ms: int | None
) -> PartitionOffsets:
    """
    Read the offsets of a partition from its broker.

    Args:
        at_ms: also look up the first message stored at or after this time, in milliseconds since
            1970.

    Raises:
        NotSentError: the broker does not respond; nothing was changed.
    """
    try:
        broker = broker_at(network, partition.address, partition.broker_group)
        status = await broker.control(endpoints.PARTITION, id=partition.partition_id)
        at_time = None
        if at_ms is not None:
            at_time = (
                await broker.control(
                    endpoints.OFFSET_AT,
                    query={"at_ms": at_ms, "bound": TimeBound.LOWER},
                    id=partition.partition_id,
                )
            ).offset
    except KeylaneError as error:
        raise NotSentError(
            f"partition {partition.partition_id} on {partition.broker_group!r} cannot be asked, "
            f"and nothing was changed: {error.message}",
            partition_id=partition.partition_id,
        ) from error
    return PartitionOffsets(
        partition=partition,
        first_offset=status.first_offset,
        next_offset=status.next_offset,
        offset_at_time=at_time,
        cursor=next(
            (progress.cursor for progress in status.groups if progress.group == group), None
        ),
        fence=max(
            (progress.token for progress in status.groups if progress.group == group), default=0
        ),
    )
