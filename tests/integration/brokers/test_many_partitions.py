"""One consumer with all 1,024 partitions of one broker: handled messages are acked at once, and it
closes in time.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.consumer.session.events import Event, Request
from keylane.consumer.session_shell import SessionShell
from keylane.protocol.frames import Ack, Acked
from keylane.protocol.limits import PARTITIONS_MAX
from support.cluster import Cluster, eventually

ACK_MS_MAX = 500
CLOSE_S_MAX = 25.0
"""Pulls that were waited for one after the other would take far longer."""


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_acks_and_releases_are_quick_beside_a_thousand_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """While a pull of each partition waits, the ack of a message takes milliseconds, and so does
    closing.
    """
    ack_ms: list[float] = []
    began: dict[int, float] = {}
    ask = SessionShell.ask

    def do(self: SessionShell, request: Request) -> None:
        if isinstance(request, Ack) and request.ranges:
            began[self.partition_id] = time.monotonic()
        send(self, request)

    def timed(self: SessionShell, event: Event) -> list[Message]:
        if isinstance(event, Acked) and self.partition_id in began:
            ack_ms.append((time.monotonic() - began.pop(self.partition_id)) * 1_000)
        return ask(self, event)

    send = SessionShell._do
    monkeypatch.setattr(SessionShell, "_do", do)
    monkeypatch.setattr(SessionShell, "ask", timed)
    cluster = Cluster(tmp_path, 1)
    try:
        await cluster.create("many", partitions=PARTITIONS_MAX)
        handled: list[Message] = []
        consumer = Consumer(
            cluster.meta,
            subject="many",
            group="g",
            handler=handled.append,
            settings=ConsumerSettings(call_timeout_ms=60_000, consume_strategy=strategy),
        )
        async with Producer(cluster.meta) as producer:
            await consumer.__aenter__()
            await eventually(
                lambda: (
                    sum(partition.waiting_for == "messages" for partition in consumer.assignment)
                    == PARTITIONS_MAX
                ),
                seconds=60,
            )
            for number in range(10):
                await producer.send("many", b"v", key=b"k%d" % number)
                await eventually(lambda: len(ack_ms) > number)  # noqa: B023  awaited here
            began = time.monotonic()
            await consumer.close()
            close_s = time.monotonic() - began
        assert len(handled) == 10
        assert median(ack_ms) < ACK_MS_MAX, ack_ms
        assert close_s < CLOSE_S_MAX
    finally:
        cluster.stop()
