"""A principal that opens all connections of a real broker keeps no other one out, and loses no
message.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from keylane import Producer, Reader
from keylane.protocol.errors import ConnectionQuotaError, QuotaExceededError
from keylane.rpc.channel import DataChannel
from keylane.rpc.http_network import HttpNetwork
from support.access.guarded import GuardedCluster, figures_of

SUBJECT = "orders"
PLACES = 12
COUNT = 200


async def taken_all(
    guarded: GuardedCluster, networks: list[HttpNetwork]
) -> tuple[list[DataChannel], QuotaExceededError]:
    """Open connections until the broker refuses one; they, and the refusal."""
    address, channels = guarded.brokers[0].address, []
    for network in networks:
        network.add_metaservers([guarded.meta])
        try:
            channels.append(await network.open_channel(address, timeout_ms=5_000))
        except ConnectionQuotaError as refused:
            return channels, refused
    raise AssertionError("the broker refused no connection")


async def test_two_principals_work_when_one_of_them_takes_all_connections(tmp_path: Path):
    with GuardedCluster(tmp_path, broker_settings=f"data_connections_max = {PLACES}\n") as guarded:
        await guarded.made(SUBJECT)
        rights = ("produce", "consume", "read")
        greedy, shop = [await guarded.principal(name, *rights) for name in ("greedy", "shop")]
        networks = [HttpNetwork(token=greedy) for _ in range(PLACES + 1)]
        try:
            async with Producer(guarded.meta, token=greedy) as first:
                await first.send(SUBJECT, b"first", key=b"greedy")
                channels, refused = await taken_all(guarded, networks)
                assert refused.limit == PLACES
                assert "data_connections_max" in refused.hint
                assert len(channels) == PLACES - 1
                async with asyncio.timeout(30), Producer(guarded.meta, token=shop) as producer:
                    for number in range(COUNT):
                        producer.send(SUBJECT, b"%d" % number, key=b"shop")
                    await producer.flush()
                    assert producer.stats.acked == COUNT
                # The newest has made room, and the oldest, with which messages are sent, is there.
                async with asyncio.timeout(10):
                    while not channels[-1].closed:
                        await asyncio.sleep(0.02)
                assert not any(channel.closed for channel in channels[:-1])
                await first.send(SUBJECT, b"second", key=b"greedy")
                assert (first.stats.acked, first.stats.failed) == (2, 0)
            async with Reader(guarded.meta, SUBJECT, token=shop) as reader:
                values = [message.value async for message in reader]
            assert values == [b"first", *(b"%d" % number for number in range(COUNT)), b"second"]
            figures = await figures_of(guarded.brokers[0].address)
            assert f"keylane_connections_max {PLACES}" in figures.replace(".0\n", "\n")
            ended = re.search(r'keylane_refusals_total{[^}]*"ConnectionQuotaError"} (\d+)', figures)
            assert ended is not None
            assert int(ended[1]) >= 2
        finally:
            for network in networks:
                await network.close()
