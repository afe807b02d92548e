"""When joins may begin: in number, and after heartbeats; a storm of them ends no session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from keylane import Admin, Consumer, Message
from keylane.consumer import ConsumerSettings
from keylane.metaserver.groups.admission import (
    AT_ONCE,
    AT_ONCE_MAX,
    LATE_MS,
    LATE_PAUSE_MS,
    SLOW_MS,
    JoinAdmission,
)
from keylane.testing import VirtualCluster, run
from keylane.testing.machines.database import MemoryDatabase


class CountedMs:
    """Milliseconds that a test counts."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms


def test_joins_of_a_group_are_limited_when_no_heartbeat_is_late():
    """Those of another group begin all the same; one that ends makes room."""
    admission = JoinAdmission(CountedMs())
    assert at_once(admission, "a") == AT_ONCE
    assert admission.begin_join("b")
    admission.end_join("a", took_ms=LATE_MS + 1)
    assert at_once(admission, "a") == 1


def test_more_joins_run_at_once_when_they_are_quick_and_fewer_when_they_are_slow():
    """Between a limit and one."""
    admission = JoinAdmission(CountedMs())
    for took_ms, most in ((LATE_MS, AT_ONCE_MAX), (SLOW_MS + 1, 1)):
        for _ in range(2 * AT_ONCE_MAX):
            assert admission.begin_join("a")
            admission.end_join("a", took_ms=took_ms)
        count = at_once(admission, "a")
        assert count == most
        for _ in range(count):
            admission.end_join("a", took_ms=LATE_MS + 1)


def at_once(admission: JoinAdmission, group: str) -> int:
    """How many further joins of a group begin now."""
    count = 0
    while admission.begin_join(group):
        count += 1
    return count


@pytest.mark.parametrize("ended", [False, True])
def test_joins_begin_one_a_second_when_heartbeats_are_late(ended: bool):
    """A renewal is late while it lasts, and for a moment behind its end; then joins begin as before."""
    clock = CountedMs()
    admission = JoinAdmission(clock)
    assert admission.begin_join("a")
    renewal = admission.begin_renewal()
    assert admission.begin_join("a")
    clock.ms = LATE_MS + 1
    if ended:
        admission.end_renewal(renewal)
    assert not admission.begin_join("a")
    assert not admission.begin_join("b")
    clock.ms = LATE_PAUSE_MS
    assert admission.begin_join("b")
    assert not admission.begin_join("c")
    if not ended:
        admission.end_renewal(renewal)
        assert not admission.begin_join("c")
    clock.ms += LATE_MS + 1
    assert admission.begin_join("a")
    assert admission.begin_join("a")


CONSUMERS = 60
PARTITIONS = 64


@pytest.fixture
def slow_database(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Transactions one after the other, those of joins 200 ms each, others 5 ms: heartbeats wait behind what came before."""
    done: list[str] = []
    turn = asyncio.Lock()
    real_write, real_read = MemoryDatabase.write, MemoryDatabase.read

    def slowed(real: Callable[..., object]) -> Callable[..., object]:
        async def call(self, work, *args, **kwargs):
            name = getattr(work, "__name__", "")
            if name not in {"join_group", "settle_group", "renew_at_once", "renew_sessions"}:
                return await real(self, work, *args, **kwargs)
            async with turn:
                await asyncio.sleep(0.2 if name == "join_group" else 0.005)
                done.append(name)
                return await real(self, work, *args, **kwargs)

        return call

    for name in ("write", "write_first", "renew"):
        monkeypatch.setattr(MemoryDatabase, name, slowed(real_write))
    monkeypatch.setattr(MemoryDatabase, "read", slowed(real_read))
    return done


def test_no_consumer_loses_its_session_when_very_many_join_at_once(
    slow_database: list[str], caplog
):
    """Their joins take twice a ttl in all; the number of owners only rises, until each consumer has a partition."""
    owners: list[int] = []
    settings = ConsumerSettings(ttl_ms=6_000)

    def handle(_message: Message) -> None:
        pass

    async def story(cluster: VirtualCluster) -> None:
        async with Admin(cluster.address) as admin:
            await admin.create_subject("s", partitions=PARTITIONS)
            await admin.create_group("s", "g")
        consumers = [
            Consumer(cluster.address, subject="s", group="g", handler=handle, settings=settings)
            for _ in range(CONSUMERS)
        ]
        opening = [asyncio.create_task(consumer.__aenter__()) for consumer in consumers]
        while len(owners) < 120 and (not owners or owners[-1] < CONSUMERS):
            await asyncio.sleep(0.5)
            owners.append(sum(bool(consumer.assignment) for consumer in consumers))
        await asyncio.gather(*opening)
        await asyncio.gather(*(consumer.close() for consumer in consumers))

    run(story)
    assert owners[-1] == CONSUMERS, owners
    assert owners == sorted(owners)
    assert "lost" not in caplog.text
    assert slow_database.count("join_group") == CONSUMERS
