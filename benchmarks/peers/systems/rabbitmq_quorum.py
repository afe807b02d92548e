"""RabbitMQ quorum queues: three nodes, a queue for each partition, with the client aio-pika."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.durability import Durability
from peers.measure import free_port, is_listening
from peers.systems.base import (
    FIRST,
    KEYS,
    Client,
    Handling,
    Ready,
    client_version,
    decode_message,
    encode_message,
)
from peers.systems.rabbitmq import RabbitStreams

NODES = 3
IN_FLIGHT = 2_000
PREFETCH = 500
QUORUM = {"x-queue-type": "quorum", "x-quorum-initial-group-size": NODES}


class RabbitQuorum(RabbitStreams):
    """Three nodes."""

    title = "RabbitMQ quorum queues of three nodes, aio-pika"
    client = "peers.systems.rabbitmq_quorum:QuorumClient"
    durability = Durability.FSYNCED
    promise = "written and fsynced by two of three nodes"
    settings = (
        "producer: publisher confirms, 2,000 in flight; consumer: `prefetch_count=500`, an ack for "
        "each 250; the key stands before the value in the body"
    )
    sends_per_second = 5_000

    @classmethod
    def missing_text(cls, home: Path) -> str:
        missing = super().missing_text(home)
        return missing or (
            "" if client_version(home, "aio-pika") else "no aio-pika in HOME/clients"
        )

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        versions = super().versions(home)
        del versions["rstream"]
        return {**versions, "aio-pika": client_version(home, "aio-pika")}

    def start(self, folder: Path) -> None:
        names = self.start_names(folder)
        cookie = folder / ".erlang.cookie"
        cookie.write_text("KEYLANEPEERS")
        cookie.chmod(0o400)
        ports = [free_port() for _ in range(NODES)]
        nodes = [f"peers{port}@localhost" for port in ports]
        listed = "".join(
            f"cluster_formation.classic_config.nodes.{number} = {node}\n"
            for number, node in enumerate(nodes, start=1)
        )
        for port, node in zip(ports, nodes, strict=True):
            home = folder / node
            home.mkdir()
            (home / "rabbitmq.conf").write_text(
                f"listeners.tcp.1 = 127.0.0.1:{port}\n"
                "cluster_formation.peer_discovery_backend = classic_config\n"
                f"{listed}"
            )
            self.start_node(folder, home, node, names, "")
        self.where = {"port": ports[0], "leading_port": ports[-1]}
        self.wait_until(lambda: all(is_listening(port) for port in ports), "RabbitMQ", 120)

    def create(self, topics: Sequence[str], partitions: int) -> None:
        async def create() -> None:
            # A queue's leader is the node at which it is declared. Clients connect to another one,
            # so that its loss does not end their connections.
            leading = {"port": self.where["leading_port"]}
            async with await connect(leading) as connection:
                channel = await connection.channel()
                for topic in topics:
                    for number in range(partitions):
                        await channel.declare_queue(
                            f"{topic}-{number}", durable=True, arguments=QUORUM
                        )

        asyncio.run(create())

    def leader(self, topic: str) -> int:
        del topic  # it leads the queues of all topics
        return self._children[-1].pid


async def connect(where: dict[str, Any]) -> Any:
    """Connect to the first node."""
    import aio_pika

    return await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{where['port']}/")


class QuorumClient(Client):
    """Awaits every confirm; acks messages together."""

    library = "aio_pika:connect"

    async def open_producer(self) -> None:
        self._connection = await connect(self.where)
        channel = await self._connection.channel(publisher_confirms=True)
        self._exchange = channel.default_exchange
        self._queue_of = {key: f"{self.topic}-{zlib.crc32(key) % self.partitions}" for key in KEYS}
        self._waiting: deque[asyncio.Task[Any]] = deque()
        await self.send(KEYS[0], FIRST)

    async def send_all(self, value: bytes, count: int) -> None:
        for number in range(count):
            await self.post(KEYS[number % 10_000], value)
        await self.drain()

    async def send(self, key: bytes, value: bytes) -> None:
        import aio_pika

        message = aio_pika.Message(
            encode_message(key, value), delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        await self._exchange.publish(message, routing_key=self._queue_of[key])

    async def post(self, key: bytes, value: bytes) -> None:
        self._waiting.append(asyncio.ensure_future(self.send(key, value)))
        if len(self._waiting) >= IN_FLIGHT:
            await self._waiting.popleft()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    async def drain(self) -> None:
        while self._waiting:
            await self._waiting.popleft()

    async def close_producer(self) -> None:
        await self._connection.close()

    async def _subscribe(self, topic: str, take: Callable[[Any], Any]) -> Any:
        connection = await connect(self.where)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        for number in range(self.partitions):
            queue = await channel.get_queue(f"{topic}-{number}")
            await queue.consume(take)
        return connection

    async def consume(self, handle: Handling, ready: Ready) -> None:
        done, touch = asyncio.Event(), handle.message
        taken = 0

        async def take(message: Any) -> None:
            nonlocal taken
            touch(*decode_message(message.body))
            taken += 1
            if handle.remaining <= 0 or not taken % (PREFETCH // 2):
                await message.ack(multiple=True)
            if handle.remaining <= 0:
                done.set()

        connection = await self._subscribe(self.topic, take)
        ready()
        await done.wait()
        await connection.close()

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        async def take(message: Any) -> None:
            raise AssertionError(f"a message that was not sent: {message.body!r}")

        # a library without types
        return (await self._subscribe(topic, take)).close  # type: ignore[no-any-return]
