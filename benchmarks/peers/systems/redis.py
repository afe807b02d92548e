"""Redis streams: a stream for each partition, a consumer group, and the append-only file."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
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
    first_line_of,
)

PIPELINE = 500
GROUP = "peers"
SETTINGS = (
    "server: `appendonly yes`, `appendfsync {fsync}`, no snapshots;"
    " producer: pipelines of 500 `XADD`; consumer: `XREADGROUP COUNT 500`, an `XACK` "
    "for each batch read"
)


class Redis(System):
    """The default of its append-only file."""

    title = "Redis streams, redis-py"
    client = "peers.systems.redis:RedisClient"
    durability = Durability.PAGE_CACHE
    promise = (
        "in memory and the page cache; up to a second of acks is lost with the power "
        "(`appendfsync everysec`)"
    )
    settings = SETTINGS.format(fsync="everysec")
    sends_per_second = 90_000
    fsync = "everysec"

    @classmethod
    def missing_text(cls, home: Path) -> str:
        if not which("redis-server"):
            return "no redis-server"
        return "" if client_version(home, "redis") else "no redis in HOME/clients"

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        words = first_line_of("redis-server", "--version").split()
        return {
            "Redis": next((word[2:] for word in words if word.startswith("v=")), ""),
            "redis-py": client_version(home, "redis"),
            "hiredis": client_version(home, "hiredis"),
        }

    def start(self, folder: Path) -> None:
        port = free_port()
        self.spawn(
            folder / "redis.log",
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
            "--appendonly",
            "yes",
            "--appendfsync",
            self.fsync,
            "--save",
            "",
        )
        self.where = {"port": port}
        self.wait_until(lambda: is_listening(port), "Redis")

    def create(self, topics: Sequence[str], partitions: int) -> None:
        """Streams are made by their first message, or by the first group."""


class RedisFsync(Redis):
    """Synced before each answer."""

    title = "Redis streams, fsynced, redis-py"
    durability = Durability.FSYNCED
    promise = (
        "fsynced before the answer (`appendfsync always`); a send that is sent "
        "again is stored again"
    )
    settings = SETTINGS.format(fsync="always")
    fsync = "always"


class RedisClient(Client):
    """Has every answer; acks each batch read."""

    library = "redis:Redis"

    def _connect(self) -> Any:
        import redis

        return redis.Redis(port=self.where["port"])

    def _streams(self, topic: str) -> list[bytes]:
        return [f"{topic}-{number}".encode() for number in range(self.partitions)]

    async def open_producer(self) -> None:
        self._redis = self._connect()
        self._pipe = self._redis.pipeline(transaction=False)
        streams = self._streams(self.topic)
        self._stream_of = {key: streams[zlib.crc32(key) % self.partitions] for key in KEYS}
        await self.send(KEYS[0], FIRST)

    async def send_all(self, value: bytes, count: int) -> None:
        pipe, stream_of = self._pipe, self._stream_of
        for base in range(0, count, PIPELINE):
            for number in range(base, min(base + PIPELINE, count)):
                key = KEYS[number % 10_000]
                pipe.xadd(stream_of[key], {b"k": key, b"v": value})
            pipe.execute()

    async def send(self, key: bytes, value: bytes) -> None:
        self._redis.xadd(self._stream_of[key], {b"k": key, b"v": value})

    async def post(self, key: bytes, value: bytes) -> None:
        self._pipe.xadd(self._stream_of[key], {b"k": key, b"v": value})

    async def pause(self, seconds: float) -> None:
        self._pipe.execute()
        time.sleep(seconds)

    async def drain(self) -> None:
        self._pipe.execute()

    async def close_producer(self) -> None:
        self._redis.close()

    def _create_groups(self, topic: str) -> Any:
        """Open a connection, and create a group on each stream."""
        redis = self._connect()
        for stream in self._streams(topic):
            redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        return redis

    async def consume(self, handle: Handling, ready: Ready) -> None:
        redis = self._create_groups(self.topic)
        ready()
        take = handle.message
        asked = dict.fromkeys(self._streams(self.topic), b">")
        while handle.remaining > 0:
            answer = redis.xreadgroup(GROUP, "first", asked, count=PIPELINE, block=1_000)
            pipe = redis.pipeline(transaction=False)
            for stream, entries in entries_of(answer):
                for _, fields in entries:
                    take(fields[b"k"], fields[b"v"])
                pipe.xack(stream, GROUP, *[entry_id for entry_id, _ in entries])
            pipe.execute()
        redis.close()

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        return self._create_groups(topic).close  # type: ignore[no-any-return]  # a library without types


def entries_of(answer: Any) -> Iterator[tuple[bytes, list[Any]]]:
    """Stream and entries, of either form that the library gives."""
    if isinstance(answer, dict):
        for stream, parts in answer.items():
            yield stream, [entry for part in parts for entry in part]
    else:
        yield from answer
