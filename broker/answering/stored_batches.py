"""Builds replies that consist of a partition's stored batches."""

from __future__ import annotations

from ...protocol.errors import InvalidRequestError, OffsetOutOfRangeError
from ...protocol.frames import Batches, Pull, Read
from ...protocol.ids import check_offset
from ...protocol.limits import PULL_BYTES_MAX
from ...rpc.answer_budget import reserve_bytes
from ..partition.partition import HostedPartition
from ..store.store import Store


def check_read(partition: HostedPartition, offset: int, bytes_max: int) -> int:
    """Check that messages can be read at `offset`, and return the maximum size of the reply in
    bytes. Raises OffsetOutOfRangeError or InvalidRequestError.
    """
    is_in_range = partition.first_offset <= offset <= partition.readable_offset
    if not is_in_range:
        check_offset(offset)
    if bytes_max < 1:
        raise InvalidRequestError(f"cannot read {bytes_max} bytes")
    if not is_in_range:
        raise OffsetOutOfRangeError(
            offset=offset,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
        )
    if partition.lost:
        partition.readable_end(offset)
    return min(bytes_max, PULL_BYTES_MAX)


def batches_up_to(
    partition: HostedPartition, end: int, parked_version: int = 0, *, more: bool = False
) -> Batches:
    """Build the reply to a pull or read that receives the messages before offset `end`. `more`
    means that another reply follows.
    """
    return Batches(
        partition.first_offset,
        partition.readable_offset,
        end,
        partition.ended,
        parked_version,
        more=more,
    )


async def read_batches(
    store: Store,
    partition: HostedPartition,
    request: Pull | Read,
    bytes_max: int,
    parked_version: int = 0,
) -> tuple[Batches, bytes]:
    """Wait for room for the reply, then read batches from the offset of the request."""
    data, end = b"", request.offset
    if request.offset < partition.readable_offset:
        await reserve_bytes(bytes_max)
        data, end = await store.read(partition, request.offset, bytes_max=bytes_max)
    return batches_up_to(partition, end, parked_version), data
