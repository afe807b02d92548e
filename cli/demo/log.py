"""Reads a whole partition from its broker, without a group, locks or Spark."""

from __future__ import annotations

import msgspec

from ...protocol.batch import batch_starts, columns
from ...protocol.errors import InternalError
from ...protocol.frames import Batches, Read
from ...protocol.limits import PULL_BYTES_MAX
from ...protocol.routing import Partition
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from .history import PartitionLog
from .source import ROW_PROPERTY, digest

_properties = msgspec.msgpack.Decoder(dict[str, str]).decode
UNKNOWN_ROW = -1


async def read_log(network: Network, partition: Partition) -> PartitionLog:
    """
    Read all messages of a partition.

    Raises:
        UnreachableError, RefusedError: the broker does not respond, or refuses the request.
        InternalError: the offsets have a gap.
    """
    assert partition.address is not None
    rows: list[int] = []
    keys: list[bytes] = []
    digests: list[int] = []
    first = offset = 0
    broker = BrokerClient(network, partition.address)
    try:
        while True:
            response, payload = await broker.call(
                Read(partition.partition_id, offset, PULL_BYTES_MAX)
            )
            assert isinstance(response, Batches)
            if not rows:
                first = response.first_offset
                offset = max(offset, first)
            for start, header in batch_starts(payload):
                if header.base_offset != offset:
                    raise InternalError(
                        f"partition {partition.partition_id}: offset "
                        f"{header.base_offset} follows {offset}"
                    )
                offset = header.next_offset
                batch = columns(payload, header, start)
                blob = batch.blob
                key_edges, value_edges = batch.key_edges, batch.value_edges
                edges = batch.property_edges
                for index in range(header.count):
                    keys.append(blob[key_edges[index] : key_edges[index + 1]])
                    digests.append(digest(blob[value_edges[index] : value_edges[index + 1]]))
                    packed = blob[edges[index] : edges[index + 1]]
                    rows.append(int(_properties(packed)[ROW_PROPERTY]) if packed else UNKNOWN_ROW)
            if offset >= response.next_offset:
                return PartitionLog(rows, keys, digests, first)
    finally:
        await broker.close()
