"""What was read last is told, with its age, while a new reading is not over."""

from __future__ import annotations

import asyncio

import pytest

from keylane.metaserver import remembered
from keylane.metaserver.remembered import Remembered
from keylane.protocol.errors import StorageError


class HangingSource:
    """A source of numbers that can hang or fail; `read` counts."""

    def __init__(self) -> None:
        self.number = 0
        self.free = asyncio.Event()
        self.free.set()
        self.error: StorageError | None = None

    async def read(self) -> int:
        await self.free.wait()
        if self.error is not None:
            raise self.error
        self.number += 1
        return self.number


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "WAIT_S", 0.05)


async def test_ask_gets_a_new_reading_when_the_source_answers() -> None:
    known = Remembered(HangingSource().read)
    for number in (1, 2):
        recalled = await known.ask()
        assert (recalled.value, recalled.age_s, recalled.error) == (number, 0, None)


async def test_ask_gets_the_last_reading_while_the_source_hangs() -> None:
    source = HangingSource()
    known = Remembered(source.read)
    await known.ask()
    source.free.clear()
    for _ in range(2):
        recalled = await known.ask()
        assert recalled.value == 1
        assert recalled.age_s > 0
    source.free.set()
    assert (await known.ask()).value == 2  # the reading that hung
    await known.close()


async def test_ask_gets_the_error_beside_the_last_reading_when_the_source_fails() -> None:
    source = HangingSource()
    known = Remembered(source.read)
    await known.ask()
    source.error = StorageError("away")
    recalled = await known.ask()
    assert (recalled.value, recalled.error) == (1, source.error)
    source.error = None
    assert (await known.ask()).error is None
