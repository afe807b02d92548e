"""A broker's volume that is detached from a dead host and attached to another one, under load: no
acked message is lost, order holds. `pytest -s` prints how long nobody was served.

A volume is played by a folder: a rename detaches it from one place and attaches it to another, and
an address of loopback is a host. So the figures are those of keylane alone; the storage adds its
own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Producer
from keylane.protocol.routing import Route, logical_partition
from support.brokers.broker_process import BrokerProcess
from support.cluster import Cluster, pause, resume
from support.load import Load

SUBJECT = "orders"
MOVES = 3
PULSE_SECONDS = 0.01
SERVED_SECONDS_MAX = 30.0
"""Far above what a move takes, so that a busy machine passes; docs/do/survive-a-disk.md has what
was measured.
"""

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


class Volume:
    """The data folder of broker group g1, and the process that has it at present."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._meta = cluster.meta
        self._place = folder / "broker-1"
        self._folder = folder
        self._first = cluster.brokers[0]
        self.process: BrokerProcess | None = None
        self.moves = 0

    def kill(self) -> None:
        """Kill the broker with SIGKILL."""
        if self.process is None:
            self._first.kill()
        else:
            self.process.kill()

    def attach_elsewhere(self) -> str:
        """Move the folder to another place, start a broker on it at another address, and return
        this address.
        """
        self.moves += 1
        place = self._folder / f"host-{self.moves}" / "data"
        place.parent.mkdir()
        self._place.rename(place)
        self._place = place
        self.process = self.broker_at(place, host=f"127.0.0.{1 + self.moves}")
        return self.process.start().address

    def broker_at(self, place: Path, *, host: str) -> BrokerProcess:
        return BrokerProcess(place, "--meta", self._meta, "--host", host)

    @property
    def place(self) -> Path:
        """Where the folder is at present."""
        return self._place

    def end(self) -> None:
        if self.process is not None:
            self.process.end()


class Pulse:
    """Sends a message to a partition of g1 every PULSE_SECONDS, and notes when each is acked."""

    def __init__(self, meta: str, key: bytes) -> None:
        self._meta = meta
        self._key = key
        self.values: list[bytes] = []
        self.acked_at: list[float] = []

    async def run(self) -> None:
        async with Producer(self._meta) as producer:
            while True:
                value = b"pulse-%d" % len(self.values)
                self.values.append(value)
                await producer.drain()
                sent = producer.send(SUBJECT, value, key=self._key)
                sent.add_done_callback(lambda _: self.acked_at.append(time.monotonic()))
                await asyncio.sleep(PULSE_SECONDS)

    async def next_ack(self, after: float) -> float:
        """Wait for the first ack after a time, and return its time."""
        async with asyncio.timeout(SERVED_SECONDS_MAX):
            while not (self.acked_at and self.acked_at[-1] > after):
                await asyncio.sleep(PULSE_SECONDS / 4)
        return next(at for at in self.acked_at if at > after)


def key_at(route: Route, address: str) -> bytes:
    """A key whose messages go to a partition at this address."""
    for number in range(1_000):
        key = b"pulse-key-%d" % number
        place = logical_partition(key)
        if any(
            each.address == address and each.range_start <= place < each.range_end
            for each in route.partitions
        ):
            return key
    raise AssertionError(f"no partition at {address}")


@pytest.fixture
def volume(cluster: Cluster, tmp_path: Path) -> Iterator[Volume]:
    volume = Volume(cluster, tmp_path)
    yield volume
    volume.end()


async def test_broker_loses_nothing_when_its_volume_moves_under_load(
    cluster: Cluster, volume: Volume, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL, another place, another address, three times: each message is stored and handled in
    the order of its key, once, and clients stay open.
    """
    route = await cluster.create(SUBJECT, partitions=4)
    pulse = Pulse(cluster.meta, key_at(route, cluster.brokers[0].address))
    lines = []
    async with Load(cluster.meta, SUBJECT) as load:
        await load.progress(1_000)
        pulsing = asyncio.create_task(pulse.run())
        await pulse.next_ack(time.monotonic())
        for move in range(MOVES):
            await load.progress(1_000)
            await asyncio.to_thread(volume.kill)
            killed = time.monotonic()
            await asyncio.to_thread(volume.attach_elsewhere)
            listening = time.monotonic()
            acked = await pulse.next_ack(listening)
            handled = len(load.handled["audit"])
            await load.progress(1_000)
            assert len(load.handled["audit"]) > handled
            lines.append(
                f"move {move + 1}: {1_000 * (listening - killed):.0f} ms until the broker listens "
                f"elsewhere, {1_000 * (acked - listening):.0f} ms more until the first ack"
            )
        pulsing.cancel()
        load.sent[pulse._key] = pulse.values
        load.count += len(pulse.values)
        await load.finish()
        load.check()
    await cluster.check_history(SUBJECT, load.sent)
    with capsys.disabled():
        print("", *lines, sep="\n")


async def test_volume_has_one_broker_when_two_are_started(
    cluster: Cluster, volume: Volume, tmp_path: Path
) -> None:
    """On one machine the lock refuses the second process, even while the first one is paused."""
    await cluster.create(SUBJECT)
    pause(cluster.brokers[0].process.pid)
    try:
        second = volume.broker_at(volume.place, host="127.0.0.2")
        refusal = await asyncio.to_thread(second.refused)
    finally:
        resume(cluster.brokers[0].process.pid)
    assert "another broker is using the data folder" in refusal
