"""Three hosts over TLS and PostgreSQL, cut off from each other one way, lossy, slow, gone, back
with a wrong clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from keylane.checker.events import Granted, Sent, Settled, Stored
from proof.hosts_stage import DATABASE, SERVERS, WATCH, HostsStage

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_200)]

HOUR_S = 3_600
EVERYWHERE = (*SERVERS, DATABASE, WATCH)


async def one_way_cuts(stage: HostsStage, *ways: tuple[str, str], seconds: float) -> None:
    for source, target in ways:
        stage.network.rule(source, target, cut=True)
    await asyncio.sleep(seconds)
    for source, target in ways:
        stage.network.rule(source, target)


async def judged(stage: HostsStage, capsys: pytest.CaptureFixture[str]) -> Counter[str]:
    """The events by kind, of a history in which nothing is wrong."""
    findings, events = await stage.judge()
    with capsys.disabled():
        print(f"\n{stage.netem()}")
    assert not findings.total, findings.examples
    counts = Counter(type(event).__name__ for event in events)
    assert counts["Stored"] <= counts["Sent"]
    return counts


async def test_cluster_of_hosts_keeps_its_promises_through_one_fault_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing lost, out of order or stale: checked by every message's history."""
    async with HostsStage(tmp_path, seed=1) as stage:
        await stage.settled_more(10_000)
        await one_way_cuts(stage, ("a", DATABASE), (WATCH, "b"), ("c", "b"), seconds=2.5)
        stage.network.rule(delay_ms=50.0, loss=0.03)
        await asyncio.sleep(3.0)
        stage.network.rule()
        await stage.lose("c")
        await asyncio.sleep(3.0)
        await stage.bring_back("c", wrong_s=-HOUR_S)
        await stage.settled_more(10_000)
        told = await judged(stage, capsys)
    assert told[Stored.__name__] > 1_000
    assert told[Settled.__name__] == told[Sent.__name__]
    assert told[Granted.__name__] > 6


@pytest.mark.whole
async def test_copy_takes_the_place_of_a_host_that_is_cut_off_or_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One broker group with copies on three hosts: what it is cut off from, one way and both, and
    a host that is lost.
    """
    async with HostsStage(tmp_path, seed=3, copies=True) as stage:
        await stage.settled_more(10_000)
        for ways in (
            [("a", "b"), ("a", "c")],  # its copies do not hear the broker
            [(host, other) for host in "bc" for other in EVERYWHERE if host != other],
        ):
            await one_way_cuts(stage, *ways, seconds=6.0)
            await stage.settled_more(5_000)
            await stage.wait_for_copies()
        stage.network.rule(delay_ms=50.0, loss=0.03)
        await asyncio.sleep(3.0)
        stage.network.rule()
        lost = await stage.serving_host()
        await stage.lose(lost)
        async with asyncio.timeout(60):
            while await stage.serving_host() == lost:
                await asyncio.sleep(0.1)
        await stage.settled_more(5_000)
        await stage.bring_back(lost, wrong_s=HOUR_S)
        await stage.wait_for_copies()
        await stage.settled_more(5_000)
        counted = await judged(stage, capsys)
    assert counted[Stored.__name__] > 1_000
    assert counted[Settled.__name__] == counted[Sent.__name__]


@pytest.mark.whole
@pytest.mark.parametrize("copies", [False, True])
async def test_cluster_of_hosts_keeps_its_promises_through_many_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], copies: bool
) -> None:
    """As the short ones, with forty faults drawn at random, some at once."""
    rng = random.Random(7)
    async with HostsStage(tmp_path, seed=7, copies=copies) as stage:
        for number in range(40):
            kind = ("cut", "slow", "gone", "database")[number % 4]
            if kind == "cut":
                ways = [tuple(rng.sample(EVERYWHERE, 2)) for _ in range(rng.randint(1, 4))]
                await one_way_cuts(stage, *ways, seconds=rng.uniform(1.0, 8.0))  # type: ignore[arg-type]
            elif kind == "slow":
                stage.network.rule(delay_ms=50.0, loss=rng.uniform(0.0, 0.1))
                await asyncio.sleep(rng.uniform(2.0, 6.0))
                stage.network.rule()
            elif kind == "gone":
                host = rng.choice(SERVERS)
                await stage.lose(host)
                await asyncio.sleep(rng.uniform(0.0, 8.0))
                await stage.bring_back(host, wrong_s=rng.choice((-HOUR_S, HOUR_S)))
            else:
                stage.network.rule(DATABASE, rng.choice(SERVERS), cut=True)
                await asyncio.sleep(rng.uniform(1.0, 5.0))
                stage.network.rule()
            await stage.settled_more(5_000)
        told = await judged(stage, capsys)
        hours = (max(stage.stamps_ns) - min(stage.stamps_ns)) / HOUR_S / 1e9
    assert told[Stored.__name__] > 10_000
    assert hours > 0.9, "the clocks were to be wrong"
