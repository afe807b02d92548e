"""The service with Kafka and aiokafka, and by_hand.py.

python by_hand.py tables
python by_hand.py place < orders.jsonl
python with_aiokafka.py relay
python with_aiokafka.py work
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections import deque

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError
from aiokafka.structs import ConsumerRecord
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import by_hand
from shop import DATABASE_URL, Order, bill

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")
CONCURRENCY = 16
WAITING_MAX = 1_000


async def relay(engine: AsyncEngine, stop: asyncio.Event) -> None:
    """Send what is in the outbox. Events are sent again if the relay dies before its commit."""
    producer = AIOKafkaProducer(bootstrap_servers=KAFKA, acks="all", enable_idempotence=True)
    async with producer:
        while not stop.is_set():
            async with engine.begin() as connection:
                events = await connection.run_sync(by_hand.oldest_events)
                sent = [
                    await producer.send("orders", row.event.encode(), key=row.customer.encode())
                    for row in events
                ]
                await asyncio.gather(*sent)
                await connection.run_sync(by_hand.delete_events, events)
            if not events:
                await asyncio.sleep(0.1)


class Partition:
    """The messages in hand of a partition: those of a key in order, different keys concurrently."""

    def __init__(self, engine: AsyncEngine, limit: asyncio.Semaphore) -> None:
        self._engine = engine
        self._limit = limit
        self._lanes: dict[bytes, deque[ConsumerRecord]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unhandled: dict[int, None] = {}
        self._next_offset = 0

    def __len__(self) -> int:
        return len(self._unhandled)

    @property
    def committable(self) -> int:
        """The offset before which everything is handled."""
        return next(iter(self._unhandled), self._next_offset)

    def add(self, message: ConsumerRecord) -> None:
        """Handle a message once the earlier ones of its key are handled."""
        self._unhandled[message.offset] = None
        self._next_offset = message.offset + 1
        lane = self._lanes.setdefault(message.key, deque())
        lane.append(message)
        if len(lane) == 1:
            task = asyncio.create_task(self._run(message.key, lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Let running handlers end, and drop the messages that wait for them."""
        for lane in self._lanes.values():
            while len(lane) > 1:
                lane.pop()
        await asyncio.gather(*self._tasks)

    async def _run(self, key: bytes, lane: deque[ConsumerRecord]) -> None:
        while lane:
            await self._handle(Order(**json.loads(lane[0].value)))
            del self._unhandled[lane.popleft().offset]
        del self._lanes[key]

    async def _handle(self, order: Order) -> None:
        failure = ""
        for attempt in itertools.count():
            try:
                async with self._limit, self._engine.begin() as connection:
                    if attempt < by_hand.TRIES:
                        await connection.run_sync(by_hand.handle_once, order, bill)
                    else:
                        await connection.run_sync(by_hand.park, order, failure)
                return
            except Exception as error:  # noqa: BLE001  any failure is a try
                failure = repr(error)
                await asyncio.sleep(min(0.1 * 2**attempt, 10))


class Worker(ConsumerRebalanceListener):
    """Gives partitions their messages, and commits what they have handled."""

    def __init__(self, engine: AsyncEngine, consumer: AIOKafkaConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self._partitions: dict[TopicPartition, Partition] = {}

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._partitions = {each: Partition(self._engine, self._limit) for each in assigned}

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._hand_over()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            taken = await self._consumer.getmany(timeout_ms=200, max_records=500)
            for where, messages in taken.items():
                for message in messages:
                    if where in self._partitions:
                        self._partitions[where].add(message)
            for where, partition in self._partitions.items():
                full = len(partition) >= WAITING_MAX
                (self._consumer.pause if full else self._consumer.resume)(where)
            await self._commit()
        await self._hand_over()

    async def _hand_over(self) -> None:
        await asyncio.gather(*(each.finish() for each in self._partitions.values()))
        await self._commit()
        self._partitions = {}

    async def _commit(self) -> None:
        offsets = {
            where: partition.committable
            for where, partition in self._partitions.items()
            if partition.committable
        }
        try:
            if offsets:
                await self._consumer.commit(offsets)
        except CommitFailedError:
            pass  # the partitions belong to another worker, which handles these messages again


async def work(engine: AsyncEngine, stop: asyncio.Event) -> None:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=KAFKA,
        group_id="billing",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=10_000,
    )
    consumer.subscribe(["orders"], listener=(worker := Worker(engine, consumer)))
    async with consumer:
        await worker.run(stop)


async def main(command: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = create_async_engine(DATABASE_URL)
    await {"relay": relay, "work": work}[command](engine, stop)
    await engine.dispose()


asyncio.run(main(sys.argv[1]))
