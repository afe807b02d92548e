"""The newest message of a partition or a key, found backward within a limit."""

from __future__ import annotations

import pytest

from keylane.broker.answering import newest as module
from keylane.broker.answering.newest import find_newest
from keylane.protocol.message import TAGS_PROPERTY, pack_properties
from keylane.protocol.reading.newest import NewestMessage
from sim.machines.store import Desk, batch

GROUP = "audit"


async def found(desk: Desk, key: bytes | None, group: str = "") -> NewestMessage:
    partition = desk.store.state.partition(1)
    return await find_newest(
        desk.store, partition, key, group, wall_ms=desk.clock.wall_ms() + 5_000
    )


async def test_newest_message_of_a_key_is_found_behind_others(desk: Desk):
    tags = [pack_properties({TAGS_PROPERTY: "eu,paid"}), b""]
    await desk.append(batch(properties=tags))
    for sequence in range(2, 40, 2):
        await desk.append(batch(sequence=sequence))
    answer = await found(desk, b"k0")
    assert (answer.offset, answer.searched_from, answer.next_offset) == (0, 0, 40)
    assert answer.tags == ("eu", "paid")
    assert answer.age_ms >= 5_000
    assert answer.acked is None
    assert (await found(desk, b"k39")).offset == 39
    assert (await found(desk, None)).offset == 39


async def test_newest_message_of_a_key_is_the_last_of_several(desk: Desk):
    for sequence in (0, 2):
        await desk.append(batch(sequence=sequence))
    await desk.append(batch(producer_id=11))
    assert (await found(desk, b"k0")).offset == 4


async def test_search_finds_nothing_without_messages_and_for_an_unknown_key(desk: Desk):
    answer = await found(desk, b"k0")
    assert (answer.offset, answer.searched_from, answer.next_offset) == (None, 0, 0)
    await desk.append(batch())
    answer = await found(desk, b"k")
    assert (answer.offset, answer.searched_from) == (None, 0)


async def test_group_has_acked_what_is_below_its_cursor_or_in_a_range(desk: Desk):
    await desk.append(batch(count=6))
    await desk.ack(1, (0, 2), (4, 5))
    acked = [(await found(desk, b"k%d" % number, GROUP)).acked for number in range(6)]
    assert acked == [True, True, False, False, True, False]
    assert (await found(desk, b"k0", "nobody")).acked is None


async def test_search_ends_at_its_limit_and_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SEARCH_BYTES", 8_000)
    for sequence in range(0, 200, 2):
        await desk.append(batch(sequence=sequence, value=bytes(300)))
    answer = await found(desk, b"k0")
    assert answer.offset is None
    assert 0 < answer.searched_from < 200
    assert (await found(desk, b"k199")).offset == 199
    assert (await found(desk, b"k%d" % answer.searched_from)).offset == answer.searched_from
    assert (await found(desk, b"k%d" % (answer.searched_from - 1))).offset is None


async def test_batch_over_the_limit_is_searched_whole(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SEARCH_BYTES", 100)
    await desk.append(batch(count=50))
    assert (await found(desk, b"k0")).offset == 0
