"""One consumer with all 1,024 partitions of one broker: handled messages are acked at once, and it
closes in time.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.consumer.pulling.ack_sender import AckRequest, AckSender
from keylane.protocol.frames import Acked
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
    request, confirmed = AckSender._request, AckSender._on_success
    began: dict[int, float] = {}

    def requested(self: AckSender) -> AckRequest:
        made = request(self)
        if made.ack.ranges:
            began[id(made)] = time.monotonic()
        return made

    def timed(self: AckSender, made: AckRequest, answer: Acked) -> None:
        confirmed(self, made, answer)
        if made.ack.ranges:
            ack_ms.append((time.monotonic() - began.pop(id(made))) * 1_000)

    monkeypatch.setattr(AckSender, "_request", requested)
    monkeypatch.setattr(AckSender, "_on_success", timed)
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
