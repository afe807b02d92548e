"""A key may be a text: it is the same key as its bytes in UTF-8, wherever a key is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from keylane import Consumer, InvalidRequestError, Message, Producer, Reader, testing
from keylane.admin import Admin
from keylane.errors import CodecError, DeliveryError
from keylane.outbox import Outbox, create_tables
from keylane.testing import VirtualCluster
from support.scripted_network import ScriptedNetwork, producer_on

KEY = "Zoë-7"
LONE = "\ud800"


async def write_and_read(cluster: VirtualCluster) -> list[tuple[bytes, bytes]]:
    """(key, value) of what is read by a text key."""
    await cluster.create_subject("orders", partitions=3)
    async with Producer(cluster.address) as producer:
        first = await producer.send("orders", b"1", key=KEY)
        second = await producer.send("orders", b"2", key=KEY.encode())
        assert (first.partition_id, second.offset) == (second.partition_id, first.offset + 1)
        await producer.send_all("orders", [(KEY, b"3"), (KEY.encode(), b"4"), (b"", b"x")] * 2)
    read = await cluster.messages("orders", key=KEY)
    async with Reader(cluster.address, "orders", key=KEY) as reader:
        assert [message.value async for message in reader] == [each.value for each in read]
    return [(message.key, message.value) for message in read]


def test_text_key_is_the_key_of_its_bytes():
    read = testing.run(write_and_read)
    assert read == [(KEY.encode(), b"%d" % value) for value in (1, 2, 3, 4, 3, 4)]


async def park_and_redrive(cluster: VirtualCluster) -> list[bytes]:
    await cluster.create_subject("orders", partitions=1)
    async with Producer(cluster.address) as producer:
        await producer.send("orders", b"bad", key=KEY)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        if message.value == b"bad":
            raise ValueError(message.key_text)
        handled.append(message.value)

    consumer = Consumer(
        cluster.address,
        subject="orders",
        group="billing",
        handler=handle,
        on_failure="park",
        tries_max=1,
    )
    async with consumer, Admin(cluster.address) as admin:
        await cluster.until(lambda: cluster.parked("orders", "billing"))
        (view,) = [view async for view in admin.parked("orders", "billing", key=KEY)]
        assert view.key == KEY.encode()
        parked = await admin.parked_message("orders", "billing", key=KEY)
        assert parked.message is not None
        assert parked.message.key_text == KEY
        await admin.edit_parked("orders", "billing", key=KEY, value=b"good")
        await admin.redrive("orders", "billing", key=KEY)
        await asyncio.sleep(10)
        assert [view async for view in admin.parked("orders", "billing", key=KEY)] == []
    return handled


def test_parked_key_is_named_by_a_text():
    assert testing.run(park_and_redrive) == [b"good"]


async def test_outbox_takes_a_text_key(tmp_path: Path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/o.db")
    await create_tables(engine)
    async with engine.begin() as connection:
        outbox: Outbox[bytes] = Outbox("127.0.0.1:7000", engine)
        await outbox.add(connection, "orders", b"1", key=KEY)
        rows = (await connection.exec_driver_sql("SELECT order_key FROM keylane_outbox")).all()
        assert [bytes(row[0]) for row in rows] == [KEY.encode()]
    await engine.dispose()


async def test_empty_text_is_refused_as_a_key(tmp_path: Path):
    """It is most often a variable without a value, and its messages would have no order; b"" says
    that there is no key.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with pytest.raises(InvalidRequestError, match="key is an empty text"):
            producer.send("s", b"1", key="")
        with pytest.raises(DeliveryError, match="the next one was refused: key is an empty text"):
            await producer.send_all("s", [(b"", b"2"), ("", b"3")])
    assert network.stored[1] == [b"2"]
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/o.db")
    await create_tables(engine)
    async with engine.begin() as connection:
        outbox: Outbox[bytes] = Outbox("127.0.0.1:7000", engine)
        with pytest.raises(InvalidRequestError, match="key is an empty text"):
            await outbox.add(connection, "orders", b"1", key="")
        await outbox.add(connection, "orders", b"1", key=b"")
    await engine.dispose()


async def test_key_that_is_no_text_of_utf8_is_refused():
    """Nothing is sent of it, and the others are."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"1", key="a")
        with pytest.raises(InvalidRequestError, match="key is not a text that UTF-8 has"):
            producer.send("s", b"2", key=LONE)
        with pytest.raises(
            DeliveryError, match="1 message was queued; the next one was refused: k"
        ):
            await producer.send_all("s", [("a", b"3"), (LONE, b"4")])
    assert network.stored[1] == [b"1", b"3"]


def test_key_text_of_other_bytes_is_refused():
    """It says which message, and where the bytes are."""
    assert Message("s", b"", b"v", 5, 2, 7).key_text == ""
    with pytest.raises(CodecError, match="is not UTF-8 text") as caught:
        _ = Message("s", b"\xff", b"v", 5, 2, 7).key_text
    assert (caught.value.partition_id, caught.value.offset) == (2, 5)
    assert "message.key" in caught.value.hint
