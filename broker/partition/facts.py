"""Checks the facts of a new partition: names, ids, ranges. Pure."""

from __future__ import annotations

from ...protocol.control import HostPartition
from ...protocol.errors import InvalidRequestError
from ...protocol.ids import check_name, check_partition_name
from ...protocol.limits import LOGICAL_PARTITIONS


def check_facts(facts: HostPartition) -> None:
    """
    Check the facts of a partition.

    Raises:
        InvalidRequestError: an id, a range, the queue or the parents are impossible.
        InvalidRequestError: the subject's or the partition's name is illegal.
    """
    partition = facts.partition
    check_name("subject", facts.subject)
    check_partition_name(partition.name)
    if not 1 <= partition.partition_id < 1 << 63:
        raise InvalidRequestError(f"not a partition id: {partition.partition_id}")
    if not 0 <= partition.range_start < partition.range_end <= LOGICAL_PARTITIONS:
        raise InvalidRequestError(
            f"not a range of logical partitions: [{partition.range_start}, {partition.range_end})"
        )
    if partition.queue < 0 or len(partition.parents) > LOGICAL_PARTITIONS:
        raise InvalidRequestError("impossible queue or parents")
