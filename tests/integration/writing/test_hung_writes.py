"""Writes beside programs that hang (SIGSTOP): calls run into their limit, are made again, and each
row is stored once. No JVM.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

import pyarrow as pa
import pytest

import keylane.arrow
from keylane.errors import Reason
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import KeylaneError
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing import lanes
from keylane.spark.writing.hidden import HiddenSubject
from keylane.spark.writing.job import TaskReport, WriteOptions, check_job
from keylane.spark.writing.task import write_task
from support.cluster import Cluster, Program, pause, resume
from support.raising import raises

COUNT = 30_000
CHUNK = 1_000
HUNG_S = 1.5


class HungJob:
    """A job of one task, which tells when it has given half of its rows."""

    def __init__(self, cluster: Cluster, name: str, *, timeout_ms: int = 20_000) -> None:
        self.network = HttpNetwork()
        self.options = WriteOptions(
            meta=(cluster.meta,),
            subject=name,  # type: ignore[arg-type]
            partitions=2,
            timeout_ms=timeout_ms,
        )
        self.hidden = f"{name}.hidden-a"
        self.subject = HiddenSubject(self.network, self.options, self.hidden)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.network.close()

    def rows(self, half: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        for first in range(0, COUNT, CHUNK):
            if first == COUNT // 2:
                half()
            numbers = range(first, first + CHUNK)
            yield pa.record_batch(
                {"key": [b"k%d" % (n % 7) for n in numbers], "value": [b"%d" % n for n in numbers]}
            )

    async def attempt(self, half: Callable[[], None] = lambda: None) -> TaskReport:
        return await write_task(
            self.network,
            self.options,
            self.hidden,
            self.rows(half),
            identity=("job", self.hidden, 0),
            task=0,
            sent_at_ns=1,
            clock=SystemClock(),
            rng=random.Random(0),
        )


def check_each_once_in_order(cluster: Cluster, subject: str) -> None:
    columns = ("key", "value")
    rows = keylane.arrow.read(cluster.meta, subject, columns=columns).read_all()
    pairs = list(zip(rows["key"].to_pylist(), map(int, rows["value"].to_pylist()), strict=True))
    assert Counter(number for _, number in pairs) == Counter(range(COUNT))
    for key in {key for key, _ in pairs}:
        numbers = [number for other, number in pairs if other == key]
        assert numbers == sorted(numbers)


def hang_for(program: Program, loop: asyncio.AbstractEventLoop) -> None:
    """Stop a program, from any thread, and let it go on after HUNG_S."""
    pause(program.process.pid)
    loop.call_soon_threadsafe(loop.call_later, HUNG_S, resume, program.process.pid)


@pytest.mark.parametrize("which", ["broker", "metaserver"])
async def test_task_and_commit_ride_out_a_program_that_hangs(cluster, which, monkeypatch):
    """In mid-task, then in the commit; the broker's calls run into their limit meanwhile."""
    monkeypatch.setattr(lanes, "CALL_TIMEOUT_MS", 400)
    loop = asyncio.get_running_loop()
    program = cluster.brokers[0] if which == "broker" else cluster.meta_program
    async with HungJob(cluster, "written") as job:
        await job.subject.create()
        report = await job.attempt(lambda: hang_for(program, loop))
        hang_for(program, loop)
        assert check_job([report], await job.subject.count_messages()) == COUNT
        hang_for(program, loop)
        await job.subject.publish()
    await asyncio.to_thread(check_each_once_in_order, cluster, "written")


async def test_task_beside_a_broker_that_hangs_too_long_fails_and_its_repeat_stores_each_row_once(
    cluster, monkeypatch
):
    """All brokers hang: a broker that is slow to report itself gets no partition, and would not be
    missed.
    """
    monkeypatch.setattr(lanes, "CALL_TIMEOUT_MS", 300)
    brokers = [broker.process.pid for broker in cluster.brokers]

    def pause_all() -> None:
        for broker in brokers:
            pause(broker)

    async with HungJob(cluster, "repeated", timeout_ms=1_000) as job:
        await job.subject.create()
        try:
            with pytest.raises(KeylaneError):
                await job.attempt(pause_all)
        finally:
            for broker in brokers:
                resume(broker)
    async with HungJob(cluster, "repeated") as again:
        report = await again.attempt()
        assert check_job([report], await again.subject.count_messages()) == COUNT
        await again.subject.publish()
    await asyncio.to_thread(check_each_once_in_order, cluster, "repeated")


async def test_commit_beside_a_hung_metaserver_is_unknown_and_its_repeat_publishes_once(cluster):
    """The driver's message says how to find out."""
    async with HungJob(cluster, "unknown", timeout_ms=1_000) as job:
        await job.subject.create()
        report = await job.attempt()
        assert check_job([report], await job.subject.count_messages()) == COUNT
        meta = cluster.meta_program.process.pid
        pause(meta)
        try:
            with raises(Reason.COMMIT_UNKNOWN, match="may be published in 'unknown' or not"):
                await job.subject.publish()
        finally:
            resume(meta)
    async with HungJob(cluster, "unknown") as again:
        await again.subject.publish()
        await again.subject.publish()
    await asyncio.to_thread(check_each_once_in_order, cluster, "unknown")
