"""The judge that shares no code with the product reads what brokers have parked, redriven and
handed to children.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from integration.parking.test_parked_keys import FAST, ParkedBrokers, brokers_of
from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.checker.events import Sent, Settled
from keylane.protocol.operations import OperationKind, Reshape
from proof.recording import Recorder
from proof.second_opinion import second_opinion
from support.cluster import Cluster, eventually
from support.observation import dropped, ended, started

SUBJECT = "orders"
KEYS = [b"key-%d" % number for number in range(8)]


class RecordedHandler:
    """Fails for the messages of `poison` keys; writes down what the judge compares with the
    disks.
    """

    def __init__(self, record: Recorder) -> None:
        self.poison = set(KEYS[:4])
        self.handled: Counter[bytes] = Counter()
        self._record = record

    async def __call__(self, message: Message) -> None:
        self._record(started(message, group="g", clock_ns=0, ours=True))
        await asyncio.sleep(0)
        if message.key in self.poison:
            self._record(dropped(message))
            raise ValueError("cannot take it")
        self.handled[message.key] += 1
        self._record(ended(message, group="g"))


async def send(producer: Producer, record: Recorder, numbers: range) -> None:
    """One message for each key and number, with what the producer is told."""
    for number in numbers:
        for key in KEYS:
            value = b"%s:%d" % (key, number)
            record(Sent(value, key, "p", number, True))
            receipt = await producer.send(SUBJECT, value, key=key)
            place = (receipt.partition_id, receipt.offset)
            record(Settled(value, "stored", *place, receipt.reordered, False))


async def parked_count(brokers: ParkedBrokers, count: int) -> None:
    while await brokers.count() != count:
        await asyncio.sleep(0.05)


async def test_parked_and_redriven_messages_hold_against_the_disks(tmp_path: Path):
    """Four keys are parked, through a killed broker and a resize; three are redriven while new
    messages come, one stays.
    """
    record = Recorder(tmp_path / "all.events")
    handler = RecordedHandler(record)
    with Cluster(tmp_path) as cluster:
        await cluster.create(SUBJECT, partitions=2)
        async with (
            asyncio.timeout(90),
            Producer(cluster.meta) as producer,
            brokers_of(cluster, SUBJECT) as brokers,
            Consumer(
                cluster.meta,
                subject=SUBJECT,
                group="g",
                handler=handler,
                on_failure="park",
                tries_max=2,
                settings=ConsumerSettings(handler_backoff=FAST, backoff=FAST),
            ),
        ):
            await send(producer, record, range(3))
            await parked_count(brokers, 4 * 3)
            for broker in cluster.brokers:
                broker.kill()
                broker.restart()
            await cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject=SUBJECT, partitions=3))
            await send(producer, record, range(3, 6))
            await parked_count(brokers, 4 * 6)
            handler.poison = {KEYS[0]}
            for key in KEYS[1:4]:
                await brokers.redrive(key)
            await send(producer, record, range(6, 9))
            await eventually(lambda: all(handler.handled[key] == 9 for key in KEYS[1:]))
            await parked_count(brokers, 9)
    told = second_opinion(tmp_path)
    assert told["findings"] == {}, told["examples"]
    assert (told["stored"], told["handled"], told["parked"]) == (8 * 9, 7 * 9, 9)
