"""Two metaservers share the SQLite file of one folder, on one machine: when one is killed, clients
go on with the other.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.operations import OperationState
from support.cluster import Program, eventually

TTL_MS = 2_000


async def test_clients_go_on_when_one_of_two_metaservers_on_a_file_is_killed(tmp_path: Path):
    """Nothing is lost, each key keeps its order, no lease ends, new clients open, and a resize
    ends; first one dies, then the other.
    """
    shared = ("keylane.metaserver", "--data", str(tmp_path / "meta"))
    metas = [Program(*shared).ready() for _ in range(2)]
    addresses = [meta.address for meta in metas]
    broker = Program(
        *("keylane.broker", "--group", "g1", "--data", str(tmp_path / "broker")),
        *("--meta", ",".join(addresses)),
    ).ready()
    handled: list[Message] = []
    lost: list[object] = []
    sent = 0
    try:
        async with Admin(addresses, wait_s=60) as admin:
            while not (await admin.list_brokers()).brokers:
                await asyncio.sleep(0.05)
            await admin.create_subject("s", partitions=2)
        consumer = Consumer(
            addresses,
            subject="s",
            group="g",
            handler=handled.append,
            settings=ConsumerSettings(ttl_ms=TTL_MS, on_lost=lost.append),
        )
        async with asyncio.timeout(200), Producer(addresses) as producer, consumer:
            await eventually(lambda: len(consumer.assignment) == 2)
            for victim, count in zip(metas, (3, 2), strict=True):
                victim.kill()
                until = time.monotonic() + 3 * TTL_MS / 1000
                while time.monotonic() < until:
                    await producer.send("s", b"%d" % sent, key=b"%d" % (sent % 5))
                    sent += 1
                    await asyncio.sleep(0.01)
                assert len(consumer.assignment) >= 2, "it keeps its leases beyond their ttl"
                async with Admin(addresses) as admin, Producer(addresses) as newcomer:
                    await newcomer.send("s", b"%d" % sent, key=b"%d" % (sent % 5))
                    sent += 1
                    done = await admin.wait(await admin.resize("s", partitions=count))
                    assert done.state is OperationState.DONE
                victim.restart()
            await eventually(lambda: len(handled) >= sent)
        assert not lost
        by_key: dict[bytes, list[int]] = {}
        for message in handled:
            by_key.setdefault(message.key, []).append(int(message.value))
        assert by_key == {b"%d" % key: list(range(key, sent, 5)) for key in range(5)}
    finally:
        for program in (broker, *metas):
            program.stop()
