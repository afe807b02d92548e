"""A reader of everything, once all is drained: of each key, what partitions continue comes before
what they store.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keylane.consumer.reading.reader import Reader
from keylane.protocol import endpoints
from keylane.protocol.errors import UnreachableError
from keylane.protocol.message import Message
from keylane.protocol.operations import PartitionHistory
from keylane.rpc.client import MetaClient

TRIES, PAUSE_S = 40, 0.5


class SmallReader(Reader[bytes]):
    """Reads in small chunks, so that most partitions take several, and a later one may overtake
    them.
    """

    _chunk_bytes = 200


async def read_everything(meta: MetaClient, addresses: Sequence[str], subject: str) -> list[str]:
    """The faults of the order in which a reader gives the messages of a subject."""
    left = TRIES
    while True:
        try:
            history = (await meta.call(endpoints.HISTORY, subject=subject)).partitions
            async with SmallReader(addresses, subject, call_timeout_ms=1_000) as reader:
                messages = [message async for message in reader]
            return disorder_of(messages, ancestors_of(history))
        except UnreachableError as error:  # a broker that has not reported itself again yet
            left -= 1
            if not left:
                return [f"no reader of {subject}: {error}"]
            await asyncio.sleep(PAUSE_S)


def ancestors_of(history: Iterable[PartitionHistory]) -> dict[int, frozenset[int]]:
    """Partition id → every partition that it continues, directly or not."""
    parents = {int(past.partition.partition_id): past.partition.parents for past in history}
    ancestors: dict[int, frozenset[int]] = {}

    def find(partition_id: int) -> frozenset[int]:
        if partition_id not in ancestors:
            above = [int(parent) for parent in parents.get(partition_id, ())]
            ancestors[partition_id] = frozenset(above).union(*map(find, above))
        return ancestors[partition_id]

    for partition_id in parents:
        find(partition_id)
    return ancestors


def disorder_of(
    messages: Iterable[Message[Any]], ancestors: Mapping[int, frozenset[int]]
) -> list[str]:
    """A line for each message that came after a later one of its key, or a second time."""
    problems = []
    seen: defaultdict[bytes, dict[int, int]] = defaultdict(dict)
    for message in messages:
        partition_id, offset = int(message.partition_id), message.offset
        of_key = seen[message.key] if message.key else {}
        later = [number for number in of_key if partition_id in ancestors[number]]
        if later or of_key.get(partition_id, -1) >= offset:
            place = f"offset {offset} of partition {partition_id}"
            problems.append(f"a reader gave {message.key!r} at {place} behind {later or 'itself'}")
        of_key[partition_id] = offset
    return problems
