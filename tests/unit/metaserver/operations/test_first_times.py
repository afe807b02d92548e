"""Which children get a start time, and what happens if it cannot be sent to a broker."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from keylane.metaserver.operations import driver as driver_module
from keylane.metaserver.operations.driver import find_start_times, send_start_times
from keylane.protocol.backoff import Backoff, Pauses
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OverloadedError,
    Reason,
)
from keylane.protocol.routing import Partition, PartitionState


def partition(partition_id: int, broker_group: str, *parents: int, **changes: Any) -> Partition:
    values: dict[str, Any] = {
        "partition_id": partition_id,
        "name": f"p{partition_id}",
        "queue": 0,
        "range_start": 0,
        "range_end": 1024,
        "broker_group": broker_group,
        "state": PartitionState.PLANNED,
        "parents": parents,
        "address": f"{broker_group}:1",
    }
    return Partition(**(values | changes))


PARENTS = [partition(1, "g1"), partition(2, "g2")]
CHILD = partition(3, "g3", 1, 2)


def pauses() -> Pauses:
    return Backoff(first_ms=1, max_ms=1).pauses(random.Random(1))


def test_child_is_told_the_greatest_end_of_its_parents():
    other = partition(4, "g3", 1)
    assert find_start_times([CHILD, other], PARENTS, {1: 5, 2: 7}) == [(CHILD, 7), (other, 5)]


def test_child_is_not_told_of_parents_that_its_broker_has():
    beside = partition(3, "g2", 1, 2)
    assert find_start_times([beside], PARENTS, {1: 5, 2: 7}) == [(beside, 5)]
    assert find_start_times([partition(3, "g1", 1)], PARENTS, {1: 5, 2: 7}) == []


def test_child_is_not_told_of_parents_whose_brokers_did_not_say():
    """An older broker has sealed (0), another has not answered, a third parent is not of this
    round.
    """
    assert find_start_times([partition(3, "g3", 1, 2, 9)], PARENTS, {1: 0}) == []
    assert find_start_times([CHILD], PARENTS, {1: 0, 2: 7}) == [(CHILD, 7)]


@pytest.mark.parametrize("error", [NotSentError("cut off"), OverloadedError("full")])
async def test_broker_is_told_again_when_it_may_hear_soon(error: KeylaneError):
    heard: list[int] = []
    errors = [error, error]

    async def tell(_child: Partition, from_ms: int) -> None:
        if errors:
            raise errors.pop()
        heard.append(from_ms)

    assert await send_start_times([(CHILD, 7)], tell, pauses)
    assert heard == [7]


async def test_broker_is_not_told_again_when_the_child_is_open():
    async def tell(_child: Partition, _from_ms: int) -> None:
        raise InvalidRequestError(Reason.PARTITION_IN_USE, "it has messages", partition_id=3)

    assert await send_start_times([(CHILD, 7)], tell, pauses)


async def test_operation_goes_on_and_the_log_says_so_when_a_broker_is_not_told(caplog, monkeypatch):
    """It is silent, refuses, or hangs: the others are told."""
    monkeypatch.setattr(driver_module, "SEND_MS", 50)
    heard: list[int] = []

    async def tell(child: Partition, _from_ms: int) -> None:
        if child.partition_id == 4:
            raise BrokerReadOnlyError("the disk is broken")
        if child.partition_id == 5:
            await asyncio.sleep(60)
        heard.append(int(child.partition_id))

    silent = partition(6, "g6", 1, address=None)
    children = [CHILD, partition(4, "g4", 1), partition(5, "g5", 1), silent]
    with caplog.at_level(logging.WARNING):
        assert not await send_start_times([(child, 7) for child in children], tell, pauses)
    assert heard == [3]
    for said in (
        "'g4', which could not be sent the times of its parents: the disk is broken",
        "'g5'",
        "'g6'",
    ):
        assert said in caplog.text
    assert "'g3'" not in caplog.text
