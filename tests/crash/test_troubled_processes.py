"""Real programs, stopped, killed, cut off from each other and with wrong calendars: the checker
finds nothing, and does find something once the fence or the drain rule is taken out.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from keylane.checker.events import Settled, Started
from proof.actor import READY_S, Actor
from proof.controls import run_without_drain_rule, run_without_fence
from proof.recording import Frozen
from proof.second_opinion import second_opinion
from proof.stage import Stage
from proof.story import Story
from support.cluster import eventually

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

SEED = 1


async def test_cluster_keeps_its_promises_through_every_fault(tmp_path: Path):
    """2 → 4 → 8 → 3 partitions under load while every fault comes once: nothing lost, late, stale
    or out of order.
    """
    async with Stage(tmp_path, keys=1_000, per_second=400) as stage:
        story = Story(stage, random.Random(SEED), pause_ttls_max=3.0)
        await story.run((4, 8, 3), faults_each=4, gap_s=0.5)
        told = await story.told()
    assert not told.findings.total, told.findings.examples
    assert not story.never_struck
    assert told.events["Stored"] > 1_000
    assert told.events["Granted"] > 8
    assert stage.calendar_hours > 0.9, "the calendars were to be wrong"
    verdict = second_opinion(tmp_path)
    assert not verdict["findings"], verdict["examples"]
    assert verdict["stored"] == told.events["Stored"]
    assert verdict["handled"] >= verdict["acked"] > 1_000


async def test_consumer_stopped_at_the_first_line_of_a_handler_does_no_harm(tmp_path: Path):
    """A stop between the look at the lease and the first line: the next owner handles again, and
    the fence refuses the late ack.
    """
    async with Stage(tmp_path, keys=100, per_second=300, partitions=3) as stage:
        await stage.freeze_at_start("c0", 2.5 * stage.ttl_s)
        findings, events = await stage.judge()
    assert not findings.total, findings.examples
    assert not second_opinion(tmp_path)["findings"]
    (frozen,) = [event for event in events if type(event) is Frozen]
    assert frozen.late_ms > 1_000
    begun = [event for event in events if type(event) is Started]
    tokens = {start.token for start in begun if start[2:4] == (frozen.partition_id, frozen.offset)}
    assert len(tokens) == 2, "the one that slept, and the next owner"


async def test_handlers_of_a_killed_consumer_are_forgotten(tmp_path: Path):
    """A restarted consumer is inside no handler that its killed process had begun."""
    async with Stage(
        tmp_path, keys=100, per_second=300, consumers=1, ttl_ms=30_000, handler_ms=30_000.0
    ) as stage:
        await eventually(lambda: stage.in_handler("c0"), what="a handler")
        await stage.crash("c0")  # and nothing is granted before the session that died expires
        assert not stage.in_handler("c0")


async def test_dead_program_is_told_with_its_last_words(tmp_path: Path):
    """The error of a failed story has the end of the program's log."""
    broken = Actor("x", ["--wall", str(tmp_path / "wall"), "proof.consumer"], tmp_path / "x.log")
    with pytest.raises(AssertionError, match=r"(?s)x ended with 1: .*Traceback.*Error"):
        await broken.start()
    await broken.kill()
    async with Stage(tmp_path, keys=10, per_second=100) as stage:
        stage.actors["c1"].signal(signal.SIGKILL)
        await eventually(lambda: not stage.actors["c1"].running, what="the end of c1")
        with pytest.raises(AssertionError, match="c1 ended with -9: "):
            await stage.judge()


async def test_calendar_of_one_program_is_moved_alone(tmp_path: Path):
    """Messages carry the calendar of their producer, even when every other calendar is an hour
    off.
    """
    async with Stage(tmp_path, keys=10, per_second=100, consumers=1) as stage:

        async def more_messages() -> None:
            before = Counter(type(event) for event in await stage.history())[Settled]
            async with asyncio.timeout(READY_S):
                while (
                    Counter(type(event) for event in await stage.history())[Settled] < before + 50
                ):
                    await asyncio.sleep(0.1)

        await more_messages()
        stage.set_calendar(3_600, set(stage.actors) - {"p"})
        await more_messages()
        assert stage.calendar_hours < 0.1
        stage.set_calendar(3_600, ["p"])
        async with asyncio.timeout(READY_S):
            while stage.calendar_hours <= 0.9:  # messages sent before come first
                await more_messages()
        findings, _ = await stage.judge()
    assert not findings.total, findings.examples


async def test_without_the_fence_a_stopped_consumer_does_harm(tmp_path: Path):
    """A broker that does not look at tokens serves a consumer that woke up too late, and the
    checker says so.
    """
    findings = await run_without_fence(tmp_path)
    assert findings.counts["stale effect"], findings.examples
    assert second_opinion(tmp_path)["findings"]["not linearizable"]


async def test_without_the_drain_rule_a_resize_breaks_the_order(tmp_path: Path):
    """A metaserver that lets children be read before their parents are drained, and the checker
    says so.
    """
    findings = await run_without_drain_rule(tmp_path)
    assert findings.counts["skip"], findings.examples
    assert second_opinion(tmp_path)["findings"]["handled too early"]
