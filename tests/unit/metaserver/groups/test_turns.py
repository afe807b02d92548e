"""A group whose row is held has few of the connections to the database."""

from __future__ import annotations

import asyncio

import pytest

from keylane.metaserver.groups import turns as turns_module
from keylane.metaserver.groups.turns import AT_ONCE_MAX, Turns
from keylane.protocol.errors import StorageError


class HeldRow:
    """Calls that wait for a row until it is let go."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.begun = 0

    async def lock(self) -> int:
        self.begun += 1
        number = self.begun
        await self.free.wait()
        return number


async def waiting(turns: Turns, row: HeldRow, key: int, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(turns.run(key, row.lock)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


async def test_turns_let_few_calls_run_when_the_row_of_their_group_is_held():
    turns, held, other = Turns(), HeldRow(), HeldRow()
    late = await waiting(turns, held, 1, 5)
    await waiting(turns, other, 2, 1)
    assert (held.begun, other.begun) == (AT_ONCE_MAX, 1)
    held.free.set()
    assert await asyncio.gather(*late) == [1, 2, 3, 4, 5]


async def test_turn_lasts_to_the_end_of_its_call_when_its_caller_is_cancelled():
    """Its transaction goes on, and has its connection; who has not begun leaves the queue."""
    turns, row = Turns(), HeldRow()
    late = await waiting(turns, row, 1, 4)
    for task in late[:3]:
        task.cancel()
    await asyncio.wait(late[:3])
    assert row.begun == AT_ONCE_MAX
    row.free.set()
    assert await late[3] == AT_ONCE_MAX + 1
    assert not turns._rows


async def test_call_is_refused_when_its_turn_does_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns_module, "WAIT_S", 0.02)
    turns, row = Turns(), HeldRow()
    late = await waiting(turns, row, 1, AT_ONCE_MAX)
    with pytest.raises(StorageError, match="holds the row"):
        await turns.run(1, row.lock)
    assert row.begun == AT_ONCE_MAX
    row.free.set()
    await asyncio.gather(*late)
    assert not turns._rows


async def test_turn_is_free_again_when_its_call_fails():
    turns = Turns()

    async def fail() -> None:
        raise ZeroDivisionError

    for _ in range(2 * AT_ONCE_MAX):
        with pytest.raises(ZeroDivisionError):
            await turns.run(1, fail)
    assert not turns._rows
