"""Judges wait for messages behind suspects, and for nothing else."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from keylane.testing.machines.loop import SimLoop
from sim.careful import LONGEST_S, careful_places, outlast_careful
from sim.run import pool
from sim.service import PATIENCE_S
from sim.slow_disks import run_slow


def _host(*partitions: int, group: str = "group0") -> Any:
    """A consumer as its host shows it, which handles suspects of these partitions."""
    clients = [SimpleNamespace(partition_id=number, is_careful=True) for number in partitions]
    consumer = SimpleNamespace(_assignments=SimpleNamespace(clients=clients))
    return SimpleNamespace(group=group, running=True, consumer=consumer)


def _end_careful(host: Any, partition_id: int) -> None:
    for client in host.consumer._assignments.clients:
        client.is_careful = client.is_careful and client.partition_id != partition_id


def _waited_s(host: Any, late: set[tuple[str, int]], *, ends: dict[int, float] | None = None):
    """How long a judge waits; `ends`: when careful parts end, in seconds, by partition."""
    loop = SimLoop(random.Random(1))

    async def wait() -> float:
        for partition_id, after_s in (ends or {}).items():
            loop.call_later(after_s, _end_careful, host, partition_id)
        began_s = loop.time()
        await asyncio.wait_for(outlast_careful([host], lambda: late), 1_000)
        return loop.time() - began_s

    try:
        return loop.run_until_complete(wait())
    finally:
        loop.dispose()


def test_place_is_careful_while_its_consumer_runs():
    host = _host(1, 2)
    _end_careful(host, 2)
    assert careful_places([host, _host(3, group="group1")]) == {("group0", 1), ("group1", 3)}
    host.running = False
    assert not careful_places([host])
    host.running, host.consumer = True, None
    assert not careful_places([host])


def test_judge_waits_for_nothing_when_nothing_is_late_or_no_suspect_is_in_the_way():
    assert _waited_s(_host(1), set()) == 0
    assert _waited_s(_host(1), {("group0", 2)}) == 0
    assert _waited_s(_host(1), {("group1", 1)}) == 0


def test_judge_waits_no_longer_when_one_of_two_places_has_no_suspect():
    """What is late there is a fault already."""
    assert _waited_s(_host(1), {("group0", 1), ("group0", 2)}) == 0


def test_judge_waits_until_what_is_left_behind_suspects_had_its_time():
    waited_s = _waited_s(_host(1), {("group0", 1)}, ends={1: 20.0})
    assert 20.0 + PATIENCE_S - 1 < waited_s < 20.0 + PATIENCE_S + 1


def test_judge_waits_no_longer_when_a_careful_part_never_ends():
    assert LONGEST_S <= _waited_s(_host(1), {("group0", 1)}) < LONGEST_S + 1


def test_judge_goes_on_when_all_is_handled():
    host, late = _host(1), {("group0", 1)}
    loop = SimLoop(random.Random(1))

    async def wait() -> float:
        loop.call_later(3.0, late.clear)
        await outlast_careful([host], lambda: late)
        return loop.time()

    try:
        assert 3.0 <= loop.run_until_complete(wait()) < 4.0
    finally:
        loop.dispose()


def test_messages_behind_suspects_are_no_fault_when_disks_are_slow():
    """A suspect takes a sync of the disk, so that the careful part takes longer than a silent owner takes to expire."""
    with pool(1) as executor:
        assert [problem for told in executor.map(run_slow, (1, 2, 3)) for problem in told] == []
