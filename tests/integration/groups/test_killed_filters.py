"""Consumers with a filter that are killed under load: the cursor is right, and no wanted message is
lost.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keylane import Admin, Producer, Reader
from support.cluster import Cluster, eventually
from support.server_process import ForkedProcess
from support.written_lines import written_lines

FILTERER = Path(__file__).with_name("filterer.py")
COUNT = 3_000
KEYS = 7
EVERY = 5
"""One in this number of messages is wanted."""


@contextmanager
def filterer(cluster: Cluster, subject: str, path: Path, manner: str) -> Iterator[ForkedProcess]:
    arguments = [cluster.meta, subject, str(path), manner]
    process = ForkedProcess(str(FILTERER), arguments, os.environ, {})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def handed(path: Path) -> list[tuple[int, int, int]]:
    """(partition, offset, number) of each message that a handler got, in order."""
    if not path.exists():
        return []
    lines = [line.split() for line in written_lines(path)]
    return [(int(partition), int(offset), int(value)) for partition, offset, value in lines]


async def send(cluster: Cluster, subject: str) -> None:
    """Message n has key n % KEYS; every fifth is wanted; long runs of unwanted ones are in batches
    of their own.
    """
    async with Producer(cluster.meta) as producer:
        for number in range(COUNT):
            wanted = number % EVERY == 0
            await producer.send(
                subject,
                b"%d" % number,
                key=b"k%d" % (number % KEYS),
                tags=["paid" if wanted else "new"],
                properties={"country": "DE" if wanted else "FR"},
            )


async def cursors(admin: Admin, subject: str) -> dict[int, int]:
    described = await admin.describe_group(subject, "g")
    return {part.partition_id: part.offset or 0 for part in described.partitions}


@pytest.mark.parametrize("manner", ["tags", "property", "batch"])
async def test_killed_consumer_with_a_filter_loses_no_wanted_message(
    shared_cluster: Cluster, tmp_path: Path, manner: str
):
    """Handlers get nothing else; what is below the cursor at each kill was handled, or is not
    wanted; all is passed at the end.
    """
    subject, path = f"killed-{manner}", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=2)
    async with asyncio.timeout(120), Admin(shared_cluster.meta) as admin:
        sending = asyncio.create_task(send(shared_cluster, subject))
        at_kills: list[tuple[dict[int, int], set[tuple[int, int]]]] = []
        for killed in (40, 150, 300):
            with filterer(shared_cluster, subject, path, manner) as process:
                await eventually(lambda killed=killed: len(handed(path)) >= killed)
                process.kill()
                process.wait()
            got = {(partition, offset) for partition, offset, _ in handed(path)}
            at_kills.append((await cursors(admin, subject), got))
        await sending
        with filterer(shared_cluster, subject, path, manner):
            while (await admin.describe_group(subject, "g")).lag != 0:
                await asyncio.sleep(0.05)
        stored = await wanted_of(shared_cluster, subject)
    handled = handed(path)
    assert {(partition, offset): number for partition, offset, number in handled} == stored
    for cursor_of, got in at_kills:
        lost = [at for at in stored if at[1] < cursor_of[at[0]] and at not in got]
        assert not lost, "the cursor has passed messages that no handler got"
    assert any(
        cursor > sum(at[0] == partition for at in got)
        for cursor_of, got in at_kills
        for partition, cursor in cursor_of.items()
    ), "cursors pass over what is not wanted"
    last: dict[int, list[int]] = defaultdict(list)
    for _, offset, number in handled:
        last[number % KEYS].append(offset)
    begun_again = sum(
        after < before for offsets in last.values() for before, after in itertools.pairwise(offsets)
    )
    assert begun_again <= 3 * KEYS, "an order is begun again only behind a kill"


async def wanted_of(cluster: Cluster, subject: str) -> dict[tuple[int, int], int]:
    """(partition, offset) → number of each wanted message, as it is stored."""
    async with Reader(cluster.meta, subject) as reader:
        numbers = {
            (message.partition_id, message.offset): int(message.value) async for message in reader
        }
    assert len(numbers) == COUNT
    return {at: number for at, number in numbers.items() if number % EVERY == 0}
