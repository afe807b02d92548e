"""Reads of copies: which one is asked, and when the broker is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from keylane.protocol.errors import CorruptLogError, KeylaneError, NotSentError, WrongBrokerError
from keylane.protocol.frames import Batches, Read
from keylane.rpc import copied_reads
from keylane.rpc.copied_reads import REFRESH_MS, SILENT_MS, CopiedReads

READ = Read(1, 0, 100)


class ScriptedCopies:
    """A broker `b` and its copies, whose answers a test chooses."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.asked: list[str] = []
        self.health_error: KeylaneError | None = None
        self.healths = 0
        self.errors: dict[str, Exception] = {}
        self.hanging: set[str] = set()
        self.empty: set[str] = set()
        self.copies: Any = {
            "x": {"reads_at": "c1"},
            "y": {"reads_at": "c2"},
            "silent": {"reads_at": ""},
            "old": {"bytes_behind": 0},
        }
        self.reads = CopiedReads(self.client, lambda: self.now_ms)

    def client(self, address: str) -> Any:
        async def call(_request: Read) -> Any:
            self.asked.append(address)
            if address in self.hanging:
                await asyncio.Event().wait()
            if address in self.errors:
                raise self.errors[address]
            data = b"" if address in self.empty else address.encode()
            return Batches(0, 9, 9, sealed=False), memoryview(data)

        async def health() -> Any:
            self.healths += 1
            await asyncio.sleep(0)
            if self.health_error is not None:
                raise self.health_error
            return SimpleNamespace(details={"copies": self.copies})

        return SimpleNamespace(address=address, call=call, health=health)

    async def read(self) -> tuple[str, list[str]]:
        """Return who has answered, and who was asked."""
        self.asked.clear()
        _, data = await self.reads.call(self.client("b"), READ)
        return bytes(data).decode(), list(self.asked)


@pytest.fixture
def scripted() -> ScriptedCopies:
    return ScriptedCopies()


async def test_copy_is_asked_in_place_of_its_broker(scripted: ScriptedCopies):
    """Reads at the same time wait for one look-up."""
    answers = await asyncio.gather(*(scripted.read() for _ in range(5)))
    assert {who for who, _ in answers} == {"c1"}
    assert scripted.healths == 1
    scripted.copies = {}
    assert (await scripted.read())[0] == "c1"
    scripted.now_ms = REFRESH_MS
    assert await scripted.read() == ("b", ["b"])


async def test_next_one_is_asked_when_a_copy_does_not_have_an_offset(scripted: ScriptedCopies):
    scripted.errors["c1"] = WrongBrokerError("the copy does not have it")
    assert await scripted.read() == ("c2", ["c1", "c2"])
    scripted.empty.add("c2")
    assert await scripted.read() == ("b", ["c1", "c2", "b"])


async def test_copy_that_is_silent_is_left_alone_for_a_while(
    scripted: ScriptedCopies, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(copied_reads, "CALL_TIMEOUT_S", 0.01)
    scripted.errors["c1"] = NotSentError("it refuses connections")
    scripted.hanging.add("c2")
    assert await scripted.read() == ("b", ["c1", "c2", "b"])
    assert await scripted.read() == ("b", ["b"])
    scripted.now_ms = SILENT_MS
    del scripted.errors["c1"]
    assert await scripted.read() == ("c1", ["c1"])


async def test_copy_is_asked_again_when_one_message_is_damaged(scripted: ScriptedCopies):
    scripted.errors["c1"] = CorruptLogError("the batch is damaged")
    assert await scripted.read() == ("c2", ["c1", "c2"])
    del scripted.errors["c1"]
    assert await scripted.read() == ("c1", ["c1"])


async def test_broker_is_asked_when_it_does_not_say_where_its_copies_are(scripted: ScriptedCopies):
    scripted.health_error = NotSentError("it is busy")
    assert await scripted.read() == ("b", ["b"])
    scripted.health_error = None
    assert await scripted.read() == ("b", ["b"])
    scripted.now_ms = REFRESH_MS
    assert (await scripted.read())[0] == "c1"
    scripted.health_error = NotSentError("it is busy")
    scripted.now_ms = 2 * REFRESH_MS
    assert (await scripted.read())[0] == "c1", "those that it has named before"


async def test_error_of_the_broker_is_raised(scripted: ScriptedCopies):
    scripted.copies = {}
    scripted.errors["b"] = NotSentError("it refuses connections")
    with pytest.raises(NotSentError):
        await scripted.read()
