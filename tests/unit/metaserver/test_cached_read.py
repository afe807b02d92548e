"""What was read last is told, with its age, while a new reading is not over."""

from __future__ import annotations

import asyncio

import pytest

from keylane.metaserver import cached_read
from keylane.metaserver.cached_read import CachedRead
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
    monkeypatch.setattr(cached_read, "WAIT_S", 0.05)


async def test_get_returns_a_new_result_when_the_source_answers() -> None:
    cache = CachedRead(HangingSource().read)
    for number in (1, 2):
        cached = await cache.get()
        assert (cached.value, cached.age_s, cached.error) == (number, 0, None)


async def test_get_returns_the_cached_result_while_the_source_hangs() -> None:
    source = HangingSource()
    cache = CachedRead(source.read)
    await cache.get()
    source.free.clear()
    for _ in range(2):
        cached = await cache.get()
        assert cached.value == 1
        assert cached.age_s > 0
    source.free.set()
    assert (await cache.get()).value == 2  # the reading that hung
    await cache.close()


async def test_get_returns_the_error_with_the_cached_result_when_the_source_fails() -> None:
    source = HangingSource()
    cache = CachedRead(source.read)
    await cache.get()
    source.error = StorageError("away")
    cached = await cache.get()
    assert (cached.value, cached.error) == (1, source.error)
    source.error = None
    assert (await cache.get()).error is None
