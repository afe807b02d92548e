"""A message that cannot be sent is refused alone, by every way to send: messages before and after
it are stored in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pyarrow as pa

import keylane.sync
from keylane import CodecError, Fate, JsonCodec, Producer
from keylane.errors import KeylaneError, MessageTooLargeError, Reason
from keylane.outbox import Outbox, create_tables
from keylane.protocol.limits import KEY_BYTES_MAX
from support.cluster import Cluster
from support.outbox.rows import SETTINGS
from support.raising import raises

LONG = b"k" * (KEY_BYTES_MAX + 1)
Send = Callable[[bytes, bytes], Awaitable[Any]]
"""Of a value and its key."""


@contextmanager
def refused(kind: type[KeylaneError]) -> Iterator[Any]:
    """The call is refused with a typed error that has advice, and has done nothing."""
    with raises(kind) as told:
        yield told
    assert told.value.fate is Fate.NOT_DONE
    assert told.value.hint


async def test_long_key_is_refused_alone_however_it_is_sent(shared_cluster: Cluster, tmp_path):
    """By producers, async and sync, one by one and many at once, by an outbox, and by plain
    HTTP.
    """
    subject, meta = "refused-long-key", shared_cluster.meta
    await shared_cluster.create(subject, partitions=2)
    sent: dict[bytes, list[bytes]] = {}
    url = f"sqlite:///{tmp_path / 'user.db'}"
    await create_tables(url)

    async def check(way: bytes, send: Send, kind: type[KeylaneError] = MessageTooLargeError) -> Any:
        """Send before and after a message with too long a key, under a key of this way and
        another.
        """
        for turn in range(2):
            for key in (way, way + b"-other"):
                await send(b"%d" % turn, key)
                sent.setdefault(key, []).append(b"%d" % turn)
            if turn == 0:
                with refused(kind) as told:
                    await send(b"never", LONG)
        return told.value

    async with Producer(meta) as producer, Outbox(meta, url, settings=SETTINGS) as outbox:

        async def send_all(value: bytes, key: bytes) -> None:
            await producer.send_all(subject, [(key, value)])

        async def send_arrow(value: bytes, key: bytes) -> None:
            table = pa.table({"k": [key], "v": [value]})
            await producer.send_arrow(subject, table, key="k", value="v")

        error = await check(b"one", lambda value, key: producer.send(subject, value, key=key))
        assert error.message.endswith("1025 bytes, at most 1024")
        assert error.hint == "Use a digest of the key instead."
        error = await check(b"many", send_all, Reason.PARTLY_QUEUED)
        assert isinstance(error.__cause__, MessageTooLargeError)
        assert (await check(b"table", send_arrow, Reason.ROWS_REFUSED)).rows == [0]
        await check(b"outbox", lambda value, key: outbox.send(subject, value, key=key))
    with keylane.sync.Producer(meta) as script:

        async def send_sync(value: bytes, key: bytes) -> None:
            await asyncio.to_thread(lambda: script.send(subject, value, key=key).result())

        await check(b"sync", send_sync)
    async with aiohttp.ClientSession() as session:

        async def post(value: bytes, key: bytes) -> None:
            address = f"http://{shared_cluster.brokers[0].address}/v1/subjects/{subject}/messages"
            async with session.post(address, data=value, params={"key": key.decode()}) as got:
                answer = await got.json()
                if got.status == 413:
                    assert (answer["name"], answer["code"]) == ("MessageTooLargeError", 1103)
                    raise MessageTooLargeError(answer["message"])
                assert got.status == 200, answer

        await check(b"posted", post)
    await shared_cluster.check_history(subject, sent)


async def test_value_that_no_codec_encodes_is_refused_alone_in_the_middle_of_a_batch(
    shared_cluster: Cluster,
):
    """By `send`, by `send_all`, which says how many are queued, and from a script."""
    subject = "refused-value"
    await shared_cluster.create(subject, partitions=2)
    keys = [b"%d" % number for number in range(3)]
    sent = {key: [b"%d" % number for number in range(100)] for key in keys}
    async with Producer(shared_cluster.meta, codec=JsonCodec()) as producer:
        for number in range(100):
            if number == 50:
                with refused(CodecError):
                    producer.send(subject, object(), key=keys[0])
                with refused(Reason.PARTLY_QUEUED) as told:
                    await producer.send_all(subject, [(keys[0], 1j)])
                assert (told.value.queued, type(told.value.__cause__)) == (0, CodecError)
            for key in keys:
                producer.send(subject, number, key=key)
        await producer.flush()

    def script() -> None:
        with keylane.sync.Producer(shared_cluster.meta, codec=JsonCodec()) as producer:
            producer.send(subject, "before", key=b"script")
            with refused(CodecError):
                producer.send(subject, object(), key=b"script").result()
            producer.send(subject, "after", key=b"script")

    await asyncio.to_thread(script)
    sent[b"script"] = [b'"before"', b'"after"']
    await shared_cluster.check_history(subject, sent)


async def test_late_delivery_of_a_key_or_of_the_past_is_refused_alone(shared_cluster: Cluster):
    """Messages of that key and of others that are sent before and after it are stored in order."""
    subject = "refused-time"
    await shared_cluster.create(subject, partitions=2)
    keys = [b"a", b"b", b"c"]
    now_ms = time.time_ns() // 1_000_000
    async with Producer(shared_cluster.meta) as producer:
        for number in range(40):
            for key in keys:
                producer.send(subject, b"%d" % number, key=key)
            if number == 20:
                with refused(Reason.DELIVER_AT_KEY) as told:
                    producer.send(subject, b"never", key=b"a", deliver_at=now_ms + 60_000)
                assert "in the order they were sent" in told.value.hint
                with refused(Reason.DELIVER_AT):
                    producer.send(subject, b"never", deliver_at=now_ms - 60_000)
        await producer.flush()
    values = [b"%d" % number for number in range(40)]
    await shared_cluster.check_history(subject, dict.fromkeys(keys, values))
