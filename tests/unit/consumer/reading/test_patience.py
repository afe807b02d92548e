"""How long a reader waits for servers that do not reply, in a virtual cluster."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Admin, ClosedError, NotSentError, Producer, Reader
from keylane.consumer.reading.patience import TRANSIENT_ERRORS, FailureTracker
from keylane.protocol.errors import (
    ConnectionQuotaError,
    ForeignServerError,
    OffsetOutOfRangeError,
    OverloadedError,
    WrongBrokerError,
)
from keylane.protocol.limits import READ_GIVE_UP_MS
from keylane.testing import VirtualCluster


def test_following_reader_goes_on_when_a_broker_was_down_for_minutes(caplog):
    """Messages of the other broker arrive in the meantime, without the pauses between attempts."""
    cluster = VirtualCluster(brokers=2)
    late_s: list[float] = []

    async def story() -> None:
        await cluster.create_subject("orders", partitions=8)
        loop = asyncio.get_running_loop()
        seen: list[bytes] = []

        async def follow(reader: Reader) -> None:
            async for message in reader:
                seen.append(message.value)
                if message.value.startswith(b"at "):
                    late_s.append(loop.time() - float(message.value[3:]))

        async with (
            Reader(cluster.address, "orders", follow=True) as reader,
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
        ):
            following = asyncio.create_task(follow(reader))
            keys = [b"%d" % number for number in range(32)]
            sent = {key: await producer.send("orders", b"before " + key, key=key) for key in keys}
            route = await admin.describe_subject("orders")
            alive = {each.partition_id for each in route.partitions if each.broker_group == "g1"}
            key = next(key for key, receipt in sent.items() if receipt.partition_id in alive)
            cluster.brokers[0].crash()
            for _ in range(300):
                await producer.send("orders", b"at %f" % loop.time(), key=key)
                await asyncio.sleep(1)
            assert not following.done()
            cluster.brokers[0].start()
            await asyncio.sleep(10)
            for key in keys:
                await producer.send("orders", b"after " + key, key=key)
            await asyncio.sleep(5)
            assert {b"after " + key for key in keys} <= set(seen)
            assert len(seen) == len(set(seen))
            following.cancel()

    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        cluster.run(story)
    told = [each.getMessage() for each in caplog.records if "reader of" in each.getMessage()]
    assert 3 <= len(told) <= 8
    assert "has been failing for" in told[0]
    assert "has recovered after" in told[-1]
    assert sorted(late_s)[len(late_s) * 9 // 10] < 0.2


def test_reader_that_does_not_follow_gives_up_when_a_broker_stays_down():
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=2)
        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"1", key=b"k")
        async with Reader(cluster.address, "orders") as reader:
            cluster.brokers[0].crash()
            with pytest.raises(NotSentError):
                async with asyncio.timeout(30):
                    await anext(reader)

    cluster.run(story)


def test_following_reader_ends_when_it_is_closed_while_it_waits_for_a_broker():
    cluster = VirtualCluster(brokers=1)

    async def story() -> None:
        await cluster.create_subject("orders", partitions=2)
        async with Reader(cluster.address, "orders", follow=True) as reader:
            cluster.brokers[0].crash()
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(60)
        with pytest.raises(ClosedError):
            async with asyncio.timeout(5):
                await following

    cluster.run(story)


AWAY = NotSentError(address="a:1")
LACKS = OffsetOutOfRangeError(partition_id=2)
HOUR_MS = 3_600_000


@pytest.mark.parametrize("error", [ForeignServerError(address="b:1"), LACKS])
def test_following_reader_gives_up_when_waiting_does_not_help(error):
    """Another program listens at the address, or the broker runs on an older copy of its data
    folder.
    """
    patience = FailureTracker("orders", follows=True)
    patience.record_failures({2: error}, 5_000)
    patience.check(5_000 + READ_GIVE_UP_MS - 1)
    with pytest.raises(type(error)):
        patience.check(5_000 + READ_GIVE_UP_MS)


def test_following_reader_waits_when_its_connection_went_to_another_principal(caplog):
    """The broker refuses the reader until a connection is free; the reader used to end."""
    error = ConnectionQuotaError(principal="shop", limit=4)
    assert isinstance(error, TRANSIENT_ERRORS)
    patience = FailureTracker("orders", follows=True)
    patience.record_failures({2: error}, 0)
    patience.check(HOUR_MS, NotSentError(address="meta:1"))
    assert error.message in caplog.text


@pytest.mark.parametrize("error", [OverloadedError("copies"), WrongBrokerError("a copy has it")])
def test_following_reader_waits_when_its_broker_awaits_copies_or_has_lost_its_place(error):
    """A metaserver names the broker that has its place; the reader used to end at once."""
    assert isinstance(error, TRANSIENT_ERRORS)
    patience = FailureTracker("orders", follows=True)
    patience.record_failures({2: error}, 0)
    patience.check(HOUR_MS)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("error", [ForeignServerError(address="b:1"), LACKS])
def test_patience_counts_anew_when_a_broker_is_back_and_lacks_messages(follows, error):
    patience = FailureTracker("orders", follows=follows)
    patience.record_failures({2: AWAY}, 0)
    patience.record_failures({2: error}, HOUR_MS)
    patience.check(HOUR_MS + READ_GIVE_UP_MS - 1)
    with pytest.raises(type(error)):
        patience.check(HOUR_MS + READ_GIVE_UP_MS)
    patience.record_failures({2: AWAY}, HOUR_MS + 1)
    patience.record_failures({2: error}, 2 * HOUR_MS)
    patience.check(2 * HOUR_MS)  # what it lacked before it went away again does not count


def test_patience_counts_for_each_partition_when_another_one_has_failed_for_long():
    patience = FailureTracker("orders", follows=False)
    patience.record_failures({1: AWAY}, 0)
    patience.record_failures({2: AWAY}, READ_GIVE_UP_MS - 1)
    patience.check(READ_GIVE_UP_MS)
    with pytest.raises(NotSentError):
        patience.check(2 * READ_GIVE_UP_MS)


def test_reader_is_given_up_when_its_broker_goes_and_comes_on_an_older_copy():
    """It restarts repeatedly, and each failure by itself is short."""
    patience = FailureTracker("orders", follows=False)
    for now_ms in range(0, READ_GIVE_UP_MS, 1_000):
        patience.record_failures({2: LACKS if now_ms % 2_000 else AWAY}, now_ms)
        patience.check(now_ms)
    patience.record_failures({2: AWAY}, READ_GIVE_UP_MS)
    with pytest.raises(NotSentError):
        patience.check(READ_GIVE_UP_MS)


@pytest.mark.parametrize("follows", [True, False])
def test_patience_raises_what_does_not_pass_when_another_broker_is_away(follows):
    patience = FailureTracker("orders", follows=follows)
    patience.record_failures({1: AWAY, 2: LACKS}, 0)
    with pytest.raises(OffsetOutOfRangeError):
        patience.check(READ_GIVE_UP_MS)


@pytest.mark.parametrize("follows", [True, False])
def test_patience_names_the_metaservers_when_none_says_what_became_of_messages(follows, caplog):
    patience = FailureTracker("orders", follows=follows)
    patience.record_failures({2: LACKS}, 0)
    metaserver_error = NotSentError(address="meta:1")
    if follows:
        patience.check(READ_GIVE_UP_MS, metaserver_error)
        assert metaserver_error.message in caplog.text
        with pytest.raises(OffsetOutOfRangeError):
            patience.check(READ_GIVE_UP_MS)
    else:
        with pytest.raises(NotSentError):
            patience.check(READ_GIVE_UP_MS, metaserver_error)


def test_patience_tells_of_each_broker_when_others_have_been_away_for_long(caplog):
    """One line for each broker, however many partitions it has, and one when it is back."""
    patience = FailureTracker("orders", follows=True)
    other = NotSentError("cannot reach the server at b:1", address="b:1")
    patience.record_failures({1: AWAY}, 0)
    patience.check(HOUR_MS)
    patience.record_failures({1: AWAY, 2: other, 3: other}, HOUR_MS)
    patience.record_failures({1: AWAY, 2: other, 3: other, 4: other}, HOUR_MS + 1_000)
    for later_ms in range(READ_GIVE_UP_MS, READ_GIVE_UP_MS + 2_000, 500):
        patience.check(HOUR_MS + later_ms)
    patience.record_failures({1: AWAY}, HOUR_MS + 15_000)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [("3600 s" in each, AWAY.message in each) for each in told] == [
        (True, True),
        (False, False),
        (False, False),
    ]
    assert "has been failing for 10 s" in told[1]
    assert "has recovered after 15 s" in told[2]
    assert all(other.message in each for each in told[1:])
