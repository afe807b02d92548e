"""A real broker beside a client that asks for many answers and reads none."""

from __future__ import annotations

import time
from pathlib import Path

from keylane.protocol import endpoints
from keylane.protocol.frames import Append, Read, encode_frame
from keylane.protocol.limits import PULL_BYTES_MAX
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from sim.machines.store import batch, facts
from support.brokers.broker_process import BrokerProcess
from support.raw_frames import connect

READS = 400
GROWTH_BYTES_MAX = 200 << 20
"""All of its answers were four times as much."""


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


async def test_client_that_reads_nothing_costs_little_memory_and_delays_no_other(tmp_path):
    """The broker's memory stays small, and other clients' appends are answered in a moment."""
    process = BrokerProcess(tmp_path / "data").start()
    network = HttpNetwork()
    client = BrokerClient(network, process.address)
    await client.control(endpoints.HOST_PARTITION, facts(1))
    for number in range(40):
        await client.call(Append(1), batch(sequence=2 * number, value=b"v" * 100_000))
    before = resident_bytes(process.pid)
    slow = await connect(process.address)
    await slow.greet()
    slow.transport.pause_reading()
    for number in range(READS):
        await slow.send(encode_frame(number + 1, Read(1, 0, PULL_BYTES_MAX)))
    slowest = 0.0
    for number in range(40, 80):
        begun = time.monotonic()
        await client.call(Append(1), batch(sequence=2 * number))
        slowest = max(slowest, time.monotonic() - begun)
        assert resident_bytes(process.pid) - before < GROWTH_BYTES_MAX
    assert slowest < 1.0
    slow.abort()
    await client.close()
    await network.close()
    assert process.end() == 0
