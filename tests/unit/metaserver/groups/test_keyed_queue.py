"""A group whose row is locked occupies one connection; queued calls share a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.metaserver.groups import keyed_queue as turns_module
from keylane.metaserver.groups.keyed_queue import KeyedQueue, Work
from keylane.protocol.errors import StorageError


class HeldRow:
    """Runs transactions that wait until a locked row is free."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.free = asyncio.Event()
        self.begun = 0
        self.fails = False

    async def run(self, work: Work) -> Any:
        self.begun += 1
        await self.free.wait()
        if self.fails:
            raise StorageError("no answer in time", operation="query")
        return work(self._connection)


@pytest.fixture
def row() -> Iterator[HeldRow]:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        yield HeldRow(connection)
    engine.dispose()


async def waiting(queue: KeyedQueue, key: int, count: int) -> list[asyncio.Task[int]]:
    tasks = [
        asyncio.create_task(queue.run(key, lambda _connection, number=number: number))
        for number in range(count)
    ]
    await asyncio.sleep(0.01)
    return tasks


async def test_calls_of_one_group_share_a_transaction_when_its_row_was_held(row: HeldRow):
    queue = KeyedQueue(row.run)
    late = await waiting(queue, 1, 1)
    late += await waiting(queue, 1, 5)
    await waiting(queue, 2, 1)
    assert row.begun == 2  # one of each group
    row.free.set()
    assert await asyncio.gather(*late) == [0, 0, 1, 2, 3, 4]
    assert row.begun == 3
    assert not queue._writers


async def test_call_leaves_the_queue_when_its_caller_is_cancelled(row: HeldRow):
    queue = KeyedQueue(row.run)
    done: list[int] = []
    first = await waiting(queue, 1, 1)
    late = asyncio.create_task(queue.run(1, lambda _connection: done.append(1)))
    await asyncio.sleep(0.01)
    late.cancel()
    with suppress(asyncio.CancelledError):
        await late
    row.free.set()
    assert await first[0] == 0
    await asyncio.sleep(0.01)
    assert not done
    assert not queue._writers


async def test_call_is_refused_when_its_turn_does_not_come(
    row: HeldRow, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(turns_module, "WAIT_MS", 20)
    queue = KeyedQueue(row.run)
    first = await waiting(queue, 1, 1)
    late = await waiting(queue, 1, 1)
    await asyncio.sleep(0.05)
    row.free.set()
    assert await first[0] == 0
    with pytest.raises(StorageError, match="holds the row"):
        await late[0]
    assert row.begun == 1


async def test_calls_are_not_tried_alone_when_their_transaction_fails_late(
    row: HeldRow, monkeypatch: pytest.MonkeyPatch
):
    """Each of them would wait as long."""
    monkeypatch.setattr(turns_module, "WAIT_MS", 20)
    queue = KeyedQueue(row.run)
    late = [
        asyncio.create_task(queue.run(1, lambda _connection: 1)),
        asyncio.create_task(queue.run(1, lambda _connection: 2)),
    ]
    row.fails = True
    await asyncio.sleep(0.05)
    row.free.set()
    for each in late:
        with pytest.raises(StorageError, match="no answer"):
            await each
    assert row.begun == 1


async def test_turn_is_free_again_when_its_call_fails(row: HeldRow):
    queue = KeyedQueue(row.run)
    row.free.set()

    def fail(_connection: Connection) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await queue.run(1, fail)
    assert not queue._writers
