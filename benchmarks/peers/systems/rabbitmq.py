"""RabbitMQ streams: a stream for each partition, with the client rstream."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from peers.durability import Durability
from peers.measure import free_port, is_listening
from peers.systems.base import (
    COMMIT_EVERY_S,
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

BATCH = 500
IN_FLIGHT = 20_000
CREDENTIALS = {"username": "guest", "password": "guest"}


def server_program() -> Path:
    """Return the server program itself; the wrapper on PATH switches to a user who may not read
    our folder.
    """
    return Path(which("rabbitmq-server") or "").parent.parent / "lib/rabbitmq/bin/rabbitmq-server"


class RabbitStreams(System):
    """Streams, which are never synced."""

    title = "RabbitMQ streams, rstream"
    client = "peers.systems.rabbitmq:RabbitClient"
    durability = Durability.PAGE_CACHE
    promise = "in the page cache; streams are never fsynced, and no setting changes that"
    settings = (
        "server: the stream plugin alone; producer: `send_batch` of 500, 20,000 in flight;"
        " consumer: `initial_credit=10`, offsets stored every 50 ms; the key stands before the "
        "value in the body"
    )
    sends_per_second = 200_000

    @classmethod
    def missing_text(cls, home: Path) -> str:
        if not which("rabbitmq-server") or not server_program().is_file():
            return "no rabbitmq-server"
        return "" if client_version(home, "rstream") else "no rstream in HOME/clients"

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        folders = sorted((server_program().parent.parent / "lib").glob("rabbitmq_server-*"))
        return {
            "RabbitMQ": folders[-1].name.partition("-")[2] if folders else "",
            "Erlang": first_line_of(
                "erl",
                "-noshell",
                "-eval",
                'io:format("~s~n", [erlang:system_info(otp_release)]), halt().',
            ),
            "rstream": client_version(home, "rstream"),
        }

    def start(self, folder: Path) -> None:
        names = self.start_names(folder)
        amqp, stream = free_port(), free_port()
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{amqp}\nstream.listeners.tcp.1 = 127.0.0.1:{stream}\n"
            f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {stream}\n"
        )
        self.start_node(folder, folder, f"peers{stream}@localhost", names, "rabbitmq_stream")
        self.where = {"port": stream}
        self.wait_until(lambda: is_listening(stream), "RabbitMQ", 90)
        time.sleep(1)  # it listens before it takes streams

    def start_names(self, folder: Path) -> int:
        """Start the name server of Erlang, without which a node leaves a daemon behind; return its
        port.
        """
        names = free_port()
        self.spawn(folder / "epmd.log", "epmd", "-port", str(names), "-address", "127.0.0.1")
        self.wait_until(lambda: is_listening(names), "epmd")
        return names

    def start_node(self, home: Path, folder: Path, node: str, names: int, plugin: str) -> None:
        """
        Start a node with the `rabbitmq.conf` of a folder.

        Args:
            home: has the cookie that nodes of a cluster share.
        """
        (folder / "enabled_plugins").write_text(f"[{plugin}].\n")
        self.spawn(
            folder / "rabbitmq.log",
            str(server_program()),
            RABBITMQ_NODENAME=node,
            RABBITMQ_CONFIG_FILE=str(folder / "rabbitmq"),
            RABBITMQ_MNESIA_BASE=str(folder / "data"),
            RABBITMQ_LOG_BASE=str(folder),
            HOME=str(home),
            RABBITMQ_ENABLED_PLUGINS_FILE=str(folder / "enabled_plugins"),
            RABBITMQ_DIST_PORT=str(free_port()),
            RABBITMQ_PID_FILE=str(folder / "pid"),
            RABBITMQ_ADVANCED_CONFIG_FILE=str(folder / "none"),
            RABBITMQ_CONF_ENV_FILE=str(folder / "none.conf"),
            RABBITMQ_LOGS="-",
            ERL_EPMD_ADDRESS="127.0.0.1",
            ERL_EPMD_PORT=str(names),
        )

    def create(self, topics: Sequence[str], partitions: int) -> None:
        async def create() -> None:
            from rstream import Producer

            async with Producer("127.0.0.1", port=self.where["port"], **CREDENTIALS) as producer:
                for topic in topics:
                    for number in range(partitions):
                        await producer.create_stream(f"{topic}-{number}")

        asyncio.run(create())


class RabbitClient(Client):
    """Counts every confirm; stores offsets."""

    library = "rstream:Consumer"

    async def open_producer(self) -> None:
        from rstream import Producer

        self._streams = [f"{self.topic}-{number}" for number in range(self.partitions)]
        self._number = {key: zlib.crc32(key) % self.partitions for key in KEYS}
        self._sent = self._acked = 0
        self._has_room = asyncio.Event()
        self._open: list[list[bytes]] = [[] for _ in range(self.partitions)]
        producer = Producer("127.0.0.1", port=self.where["port"], **CREDENTIALS)
        self._producer = await producer.__aenter__()
        await self.send(KEYS[0], FIRST)

    def _on_ack(self, status: Any) -> None:
        if not status.is_confirmed:
            raise RuntimeError(f"not confirmed: {status.response_code}")
        self._acked += 1
        if self._sent - self._acked < IN_FLIGHT // 2:
            self._has_room.set()

    async def _flush(self, number: int) -> None:
        batch, self._open[number] = self._open[number], []
        self._sent += len(batch)
        await self._producer.send_batch(
            self._streams[number], batch, on_publish_confirm=self._on_ack
        )
        while self._sent - self._acked > IN_FLIGHT:
            self._has_room.clear()
            await self._has_room.wait()

    async def send_all(self, value: bytes, count: int) -> None:
        number_of, batches = self._number, self._open
        for index in range(count):
            key = KEYS[index % 10_000]
            number = number_of[key]
            batches[number].append(encode_message(key, value))
            if len(batches[number]) >= BATCH:
                await self._flush(number)
        await self.drain()

    async def send(self, key: bytes, value: bytes) -> None:
        await self._producer.send_wait(self._streams[self._number[key]], encode_message(key, value))

    async def post(self, key: bytes, value: bytes) -> None:
        self._open[self._number[key]].append(encode_message(key, value))

    async def pause(self, seconds: float) -> None:
        for number, batch in enumerate(self._open):
            if batch:
                await self._flush(number)
        await asyncio.sleep(seconds)

    async def drain(self) -> None:
        await self.pause(0)
        while self._acked < self._sent:
            await asyncio.sleep(0.001)

    async def close_producer(self) -> None:
        await self._producer.close()

    async def _subscribe(self, topic: str, take: Callable[[bytes, Any], None]) -> Any:
        from rstream import Consumer, ConsumerOffsetSpecification, OffsetType

        consumer = Consumer("127.0.0.1", port=self.where["port"], **CREDENTIALS)
        await consumer.start()
        first = ConsumerOffsetSpecification(OffsetType.FIRST, None)
        for number in range(self.partitions):
            await consumer.subscribe(
                f"{topic}-{number}",
                take,
                decoder=bytes,
                offset_specification=first,
                initial_credit=10,
                subscriber_name=f"peers-{number}",
            )
        return consumer

    async def consume(self, handle: Handling, ready: Ready) -> None:
        done, touch = asyncio.Event(), handle.message
        places: dict[str, int] = {}

        def take(data: bytes, context: Any) -> None:
            touch(*decode_message(data))
            places[context.stream] = context.offset
            if handle.remaining <= 0:
                done.set()

        async def commit() -> None:
            told = dict(places)
            places.clear()
            for stream, offset in told.items():
                await consumer.store_offset(stream, "peers", offset)

        consumer = await self._subscribe(self.topic, take)
        ready()
        while not done.is_set():
            try:
                await asyncio.wait_for(done.wait(), COMMIT_EVERY_S)
            except TimeoutError:
                await commit()
        await commit()
        await consumer.close()

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        def take(data: bytes, _context: Any) -> None:
            raise AssertionError(f"a message that was not sent: {data!r}")

        # a library without types
        return (await self._subscribe(topic, take)).close  # type: ignore[no-any-return]
