"""A producer with a codec: each value is encoded once, and one that cannot be is told alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from keylane import (
    CodecError,
    Fate,
    InvalidRequestError,
    JsonCodec,
    MessageTooLargeError,
    ProducerSettings,
    QueueFullError,
    TextCodec,
)
from keylane.errors import ConfigError, Reason
from support.raising import raises
from support.scripted_network import QUICK, ScriptedNetwork, producer_on


class Counting:
    """Text, with the number of the call; it fails for "bad"."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, value: str, /) -> bytes:
        self.calls += 1
        if value == "bad":
            raise ValueError("cannot be")
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        return data.decode()


async def test_codec_error_is_raised_for_one_message_in_the_middle_of_a_batch():
    """Those before and after it are stored in their order, of its key and of others."""
    network = ScriptedNetwork()
    async with producer_on(network, codec=Counting()) as producer:
        await producer.send("s", "first", key=b"a")
        futures = []
        for number in range(300):
            if number == 150:
                with pytest.raises(CodecError, match="cannot be") as told:
                    producer.send("s", "bad", key=b"a")
                assert told.value.fate is Fate.NOT_DONE
            futures.append(producer.send("s", f"{number}", key=b"ab"[number % 2 :][:1]))
        assert [(await future).offset for future in futures] == list(range(1, 301))
        assert producer.stats.failed == 0
    assert network.stored[1] == [b"first", *(b"%d" % number for number in range(300))]


async def test_codec_encodes_the_values_of_its_subject_alone():
    network = ScriptedNetwork()
    async with producer_on(network, codec={"s": JsonCodec()}) as producer:
        await producer.send("s", {"a": 1})
        await producer.send("s", b"bytes")  # for JSON bytes are a value too
        with pytest.raises(
            InvalidRequestError, match=r"value must be bytes, not str: use value.en"
        ):
            producer.send("other", "text")
        await producer.send("s", 1, key="text")
        with pytest.raises(InvalidRequestError, match="key must be bytes or text, not int"):
            producer.send("s", 1, key=1)
    assert network.stored[1] == [b'{"a":1}', b'"Ynl0ZXM="', b"1"]


async def test_size_is_that_of_the_encoded_value():
    async with producer_on(ScriptedNetwork(), codec=TextCodec()) as producer:
        with pytest.raises(MessageTooLargeError):
            producer.send("s", "ü" * (1 << 19) + "ü")


async def test_codec_encodes_a_message_once_when_the_queue_is_full():
    network, codec = ScriptedNetwork(), Counting()
    settings = ProducerSettings(queue_bytes=1 << 20, batch_bytes=1_000, backoff=QUICK.backoff)
    async with producer_on(network, settings, codec=codec) as producer:
        await producer.send("s", "x")
        network.lost.add(1)
        full = [producer.send("s", letter * 600_000) for letter in "ab"]
        over = producer.send("s", "over")
        with pytest.raises(QueueFullError):
            producer.send("s", "refused")
        assert codec.calls == 4
        network.lost.clear()
        await over
        assert all(future.done() for future in full)
    assert network.stored[1][-1] == b"over"


async def test_send_all_tells_how_many_are_queued_when_a_codec_fails():
    network = ScriptedNetwork()
    async with producer_on(network, codec=Counting()) as producer:
        with raises(Reason.PARTLY_QUEUED) as told:
            await producer.send_all("s", [(b"k", "0"), (b"k", "1"), (b"k", "bad"), (b"k", "3")])
        assert told.value.queued == 2
        assert isinstance(told.value.__cause__, CodecError)
    assert network.stored[1] == [b"0", b"1"]


@pytest.mark.parametrize("bad", [b"paid", b"no", "no", 7, (b"k",), (b"k", b"0", b"eu")])
async def test_send_all_says_what_a_message_is_when_one_is_no_pair(bad: Any):
    """Python's "not enough values to unpack" did not; and of two bytes a key was refused, as an
    int.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with raises(Reason.PARTLY_QUEUED, match="pairs of a key and a value") as told:
            await producer.send_all("s", [(b"k", b"0"), bad])
        assert told.value.queued == 1
    assert network.stored[1] == [b"0"]


async def test_send_arrow_encodes_no_row():
    """Also where rows are sent one by one, as while a key is halted."""
    network, codec = ScriptedNetwork(), Counting()
    table = pa.table({"v": ["bad", "good"]})
    async with producer_on(network, codec=codec) as producer:
        await producer.send_arrow("s", table, value="v")
        producer._senders["s"].careful = True
        await producer.send_arrow("s", table, value="v")
        await producer.send("s", "encoded")
    assert codec.calls == 1
    assert sorted(network.stored[1]) == [b"bad", b"bad", b"encoded", b"good", b"good"]


@pytest.mark.parametrize("codec", [TextCodec, {"s": "json"}, "json", [TextCodec()]])
def test_config_error_is_raised_for_other_than_codecs_of_a_producer(codec: Any):
    with pytest.raises(ConfigError, match="a codec is an object with name, encode and decode"):
        producer_on(ScriptedNetwork(), codec=codec)
