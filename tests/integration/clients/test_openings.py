"""Clients that are opened while there is no metaserver: told at once, or after the wait that was
asked for.
"""

from __future__ import annotations

import asyncio
import socket
import traceback
from pathlib import Path

import pytest

import keylane.sync
from keylane import Admin, Consumer, Message, Producer, QueueReader, Reader
from keylane.protocol.errors import NotSentError
from support.cluster import Cluster, eventually


async def test_client_that_could_not_be_opened_may_be_opened_again(tmp_path: Path):
    """While the metaserver restarts nothing waits: the error says that nothing was done, and the
    next opening works.
    """
    cluster = Cluster(tmp_path, 1)
    handled: list[Message] = []
    try:
        await cluster.create("s", partitions=1)
        producer = Producer(cluster.meta)
        consumer = Consumer(cluster.meta, subject="s", group="g", handler=handled.append)
        cluster.meta_program.kill()
        for client in (producer, consumer):
            with pytest.raises(NotSentError):
                await client.__aenter__()
        with pytest.raises(NotSentError):
            await consumer.run()
        cluster.meta_program.restart()
        async with producer, consumer:
            await producer.send("s", b"v", key=b"k")
            await eventually(lambda: handled)
    finally:
        cluster.stop()


@pytest.mark.parametrize("several", [False, True])
async def test_traceback_is_short_when_a_consumer_has_a_wrong_address(several: bool):
    """It has the call of `run`, the line that raises, and the text with its hint: forty lines hid
    these.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        if several:
            consumer = Consumer(address)
            consumer.on("s", group="g")(lambda _message: None)
        else:
            consumer = Consumer(address, subject="s", group="g", handler=lambda _message: None)
        with pytest.raises(NotSentError) as told:
            await consumer.run()
    calls = traceback.extract_tb(told.tb)
    own = [Path(call.filename).name for call in calls if call.filename != __file__]
    assert own == ["client.py"] * (1 + several)
    text = "".join(traceback.format_exception(told.value))
    assert "direct cause" not in text
    assert f"cannot reach {address}: connection refused [NotSentError 1201]" in text
    assert "Check that it is running" in text.splitlines()[-1]


async def test_clients_wait_when_the_metaserver_is_still_starting(tmp_path: Path):
    """Each kind of client is opened before there is a metaserver, and works once it has started."""
    cluster = Cluster(tmp_path, 1)
    handled: list[Message] = []
    try:
        await cluster.create("s", partitions=1, static=True)
        cluster.meta_program.kill()
        meta = cluster.meta
        producer = Producer(meta, wait_s=60)
        admin = Admin(meta, wait_s=60)
        queue_reader = QueueReader(meta, subject="s", wait_s=60)
        reader = Reader(meta, "s", wait_s=60)
        script = keylane.sync.Producer(meta, wait_s=60)
        consumer = Consumer(meta, subject="s", group="g", handler=handled.append, wait_s=60)
        running = asyncio.create_task(consumer.run())
        opening = asyncio.gather(
            *(client.__aenter__() for client in (producer, admin, queue_reader, reader)),
            asyncio.to_thread(script.open),
        )
        await asyncio.sleep(0.5)
        assert not opening.done()
        assert not running.done()
        cluster.meta_program.restart()
        await asyncio.wait_for(opening, 60)
        await producer.send("s", b"v", key=b"k")
        await eventually(lambda: handled)
        assert [summary.subject for summary in await admin.list_subjects()] == ["s"]
        assert [message.value for message in (await queue_reader.read(0, 0)).messages] == [b"v"]
        await asyncio.to_thread(script.send_all, "s", [(b"k", b"w")])
        await asyncio.to_thread(script.close)
        for client in (producer, admin, queue_reader, reader, consumer):
            await client.close()
        await asyncio.wait_for(running, 60)
    finally:
        cluster.stop()
