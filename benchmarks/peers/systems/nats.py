"""NATS JetStream: a file stream with a subject for each partition, and a durable push consumer with
explicit acks.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from peers.durability import Durability
from peers.measure import free_port, is_listening
from peers.systems.base import (
    FIRST,
    KEYS,
    Client,
    Handling,
    Ready,
    System,
    client_version,
    decode_message,
    encode_message,
    first_line_of,
)

CONFIG = """\
listen: "127.0.0.1:{port}"
server_name: "n{node}"
jetstream {{
  store_dir: "{data}"
  {more}
}}
"""
CLUSTER = """\
cluster {{
  name: peers
  listen: "127.0.0.1:{own}"
  routes: [{routes}]
}}
"""


STREAM_TRIES = 60


def server_program(home: Path) -> str:
    """Return the server program in the home, or the one on PATH; "" if there is none."""
    return which("nats-server", path=str(home / "bin")) or which("nats-server") or ""


class Nats(System):
    """Its default: synced every two minutes."""

    title = "NATS JetStream, nats-py"
    client = "peers.systems.nats:NatsClient"
    durability = Durability.PAGE_CACHE
    promise = "in the page cache; synced every two minutes (the default of `sync_interval`)"
    settings = (
        "consumer: push, `max_ack_pending=20000`; the key stands before the value in the body"
    )
    sends_per_second = 15_000
    more = ""
    nodes = 1

    @classmethod
    def missing_text(cls, home: Path) -> str:
        if not server_program(home):
            return "no nats-server in HOME/bin"
        return "" if client_version(home, "nats-py") else "no nats-py in HOME/clients"

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        return {
            "nats-server": first_line_of(server_program(home), "--version")
            .rpartition(" ")[2]
            .lstrip("v"),
            "nats-py": client_version(home, "nats-py"),
        }

    def start(self, folder: Path) -> None:
        ports = [free_port() for _ in range(self.nodes)]
        routes = [free_port() for _ in range(self.nodes)]
        listed = ", ".join(f'"nats-route://127.0.0.1:{each}"' for each in routes)
        for node, (port, own) in enumerate(zip(ports, routes, strict=True), start=1):
            config = folder / f"nats-{node}.conf"
            text = CONFIG.format(node=node, port=port, data=folder / f"js-{node}", more=self.more)
            if self.nodes > 1:
                text += CLUSTER.format(own=own, routes=listed)
            config.write_text(text)
            self.spawn(folder / f"nats-{node}.log", server_program(self.home), "-c", str(config))
        self.where = {"server": [f"nats://127.0.0.1:{port}" for port in ports]}
        self.wait_until(lambda: all(is_listening(port) for port in ports), "NATS")

    def create(self, topics: Sequence[str], partitions: int) -> None:
        del partitions  # subjects of a stream are made by their first message

        async def create() -> None:
            import nats

            connection = await nats.connect(self.where["server"])
            for topic in topics:
                await self._create_stream(connection.jetstream(), topic)
            await connection.close()

        asyncio.run(create())

    async def _create_stream(self, context: Any, topic: str) -> None:
        """Make a stream; in a new cluster it is refused until the servers have met."""
        import nats

        for _ in range(STREAM_TRIES):
            try:
                await context.add_stream(
                    name=topic, subjects=[f"{topic}.*"], num_replicas=self.nodes
                )
                return
            except nats.errors.Error:
                await asyncio.sleep(0.5)
        raise TimeoutError(f"NATS did not make the stream {topic}")


class NatsFsync(Nats):
    """Each message synced."""

    title = "NATS JetStream, fsynced, nats-py"
    durability = Durability.FSYNCED
    promise = "fsynced before the ack (`sync_interval: always`)"
    settings = (
        "server: `sync_interval: always`; consumer: push, `max_ack_pending=20000`;"
        " the key stands before the value in the body"
    )
    sends_per_second = 4_000
    more = "sync_interval: always"


class NatsReplicated(Nats):
    """Three servers."""

    title = "NATS JetStream of three servers, nats-py"
    promise = (
        "in the page caches of two of three servers, synced every two minutes (the default of "
        "`sync_interval`)"
    )
    settings = (
        "streams: `num_replicas=3`; consumer: push, `max_ack_pending=20000`; the key stands "
        "before the value in the body"
    )
    sends_per_second = 6_000
    nodes = 3

    def leader(self, topic: str) -> int:
        async def ask() -> str:
            import nats

            connection = await nats.connect(self.where["server"])
            stream = await connection.jetstream().stream_info(topic)
            await connection.close()
            return str(stream.cluster.leader)

        return self._children[int(asyncio.run(ask())[1:]) - 1].pid


class NatsClient(Client):
    """Awaits every ack; acks each message."""

    library = "nats:connect"

    async def _connect(self) -> Any:
        import nats

        connection = await nats.connect(self.where["server"])
        self._subject_of = {
            key: f"{self.topic}.{zlib.crc32(key) % self.partitions}" for key in KEYS
        }
        return connection

    async def open_producer(self) -> None:
        self._connection = await self._connect()
        self._stream = self._connection.jetstream()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        await self.send(KEYS[0], FIRST)

    async def send_all(self, value: bytes, count: int) -> None:
        waiting = self._waiting
        for number in range(count):
            await self.post(KEYS[number % 10_000], value)
            if not number % 100:
                while waiting and waiting[0].done():
                    waiting.popleft().result()
        await self.drain()

    async def send(self, key: bytes, value: bytes) -> None:
        await self._stream.publish(self._subject_of[key], encode_message(key, value))

    async def post(self, key: bytes, value: bytes) -> None:
        future = await self._stream.publish_async(self._subject_of[key], encode_message(key, value))
        self._waiting.append(future)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    async def drain(self) -> None:
        while self._waiting:
            await self._waiting.popleft()

    async def close_producer(self) -> None:
        await self._connection.close()

    async def _subscribe(self, connection: Any, topic: str) -> Any:
        import nats

        # Push: `fetch` of a pull consumer waits for a whole batch, which is long at a low rate.
        config = nats.js.api.ConsumerConfig(max_ack_pending=20_000)
        return await connection.jetstream().subscribe(
            f"{topic}.*", durable="peers", config=config, manual_ack=True
        )

    async def consume(self, handle: Handling, ready: Ready) -> None:
        connection = await self._connect()
        subscription = await self._subscribe(connection, self.topic)
        ready()
        take = handle.message
        async for message in subscription.messages:
            take(*decode_message(message.data))
            await message.ack()
            if handle.remaining <= 0:
                break
        await connection.flush()
        await connection.close()

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        connection = await self._connect()
        await self._subscribe(connection, topic)
        return connection.close  # type: ignore[no-any-return]  # a library without types
