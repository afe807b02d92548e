"""Malformed arguments raise a typed error, and no message is queued."""

from __future__ import annotations

import asyncio
import enum

import pytest

from keylane import Consumer, Producer
from keylane.consumer import ConsumerSettings
from keylane.producer.settings import ProducerSettings, check_timeout
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import Health
from keylane.protocol.errors import ConfigError, InvalidRequestError, Reason
from keylane.protocol.message import pack_properties
from keylane.rpc.environment import Environment
from support.raising import raises


class Digest(bytes):
    """Bytes of a kind of their own."""


class SilentNetwork:
    """A metaserver that is healthy and never tells a route."""

    async def control(self, method, address, path, answer, **_more):
        if answer is not Health:
            await asyncio.Event().wait()
        return Health(program="metaserver", ready=True)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("meta", [5, None, [], [5], "", [""], b"127.0.0.1:7000"])
def test_address_is_refused_when_it_is_malformed(meta):
    """Both clients refuse a malformed address at once."""
    with pytest.raises(ConfigError, match="host:port"):
        Producer(meta)
    with pytest.raises(ConfigError, match="host:port"):
        Consumer(meta, subject="s", group="g")


def test_strategy_is_refused_when_it_does_not_exist():
    """An unknown strategy is refused; the error names those that exist."""
    with pytest.raises(ConfigError, match="strict or best_tried, not 'bogus'"):
        Producer("127.0.0.1:7000", order_strategy="bogus")
    with pytest.raises(ConfigError, match="exclusive or shared, not 'bogus'"):
        Consumer(
            "127.0.0.1:7000",
            subject="s",
            group="g",
            settings=ConsumerSettings(consume_strategy="bogus"),
        )


def test_handler_is_refused_when_it_cannot_be_called():
    """A handler that cannot be called is refused."""
    with pytest.raises(ConfigError, match="handler"):
        Consumer("127.0.0.1:7000", subject="s", group="g", handler=5)


def test_settings_are_refused_when_they_are_not_numbers():
    """Settings that are not numbers are refused like those out of range."""
    with pytest.raises(ConfigError, match="batch_bytes must be a whole number from"):
        ProducerSettings(batch_bytes="many")
    with pytest.raises(ConfigError, match="concurrency must be a whole number from"):
        ConsumerSettings(concurrency=None)


class Milliseconds(enum.IntEnum):
    LONG = 5_000


def test_error_says_what_to_use_when_a_setting_is_a_whole_number_of_another_type():
    """As of numpy or an IntEnum: "must be a whole number" alone would not help."""
    with pytest.raises(ConfigError, match=r"ttl_ms must be .*, not <.*LONG.*>: use int\(5000\)"):
        ConsumerSettings(ttl_ms=Milliseconds.LONG)
    with pytest.raises(
        ConfigError, match=r"linger_ms must be a whole number from 0 to 10000, not True "
    ):
        ProducerSettings(linger_ms=True)
    with pytest.raises(InvalidRequestError, match=r"timeout_ms must be .*: use int\(5000\)"):
        check_timeout(Milliseconds.LONG)


@pytest.mark.parametrize("tags", [5, 1.5, object()])
def test_tags_of_a_message_are_refused_when_they_are_no_collection(tags):
    with pytest.raises(InvalidRequestError, match="tags are texts without commas"):
        pack_properties(None, tags)


@pytest.mark.parametrize("tags", [5, 1.5, object()])
def test_tags_of_a_consumer_are_refused_when_they_are_no_collection(tags):
    with pytest.raises(ConfigError, match="tags are 1 to"):
        Consumer("127.0.0.1:7000", subject="s", group="g", settings=ConsumerSettings(tags=tags))


@pytest.mark.parametrize("settings", [5, {}, {"ttl_ms": 5_000}])
def test_settings_are_refused_when_they_are_of_another_class(settings):
    """Both clients refuse such settings when they are made, not when they are opened."""
    with pytest.raises(ConfigError, match="settings must be ProducerSettings"):
        Producer("127.0.0.1:7000", settings=settings)
    with pytest.raises(ConfigError, match="settings must be ConsumerSettings"):
        Consumer("127.0.0.1:7000", subject="s", group="g", settings=settings)


@pytest.mark.parametrize(
    "values", [{"first_ms": -1}, {"max_ms": 0}, {"factor": 0.5}, {"factor": "2"}]
)
def test_pauses_are_refused_when_they_cannot_be_counted(values):
    """A backoff that could not give a pause is refused when it is made, not at the first
    failure.
    """
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name} must be a"):
        Backoff(**values)
    for kind, field in (
        (ProducerSettings, "backoff"),
        (ConsumerSettings, "backoff"),
        (ConsumerSettings, "handler_backoff"),
    ):
        with pytest.raises(ConfigError, match=f"{field} must be a Backoff"):
            kind(**{field: 50})


@pytest.mark.parametrize("name", [5, b"name", "n" * 513, "a\0b", "a\ud800"])
def test_name_is_refused_when_no_metaserver_takes_it(name):
    """A consumer refuses such a name when it is made, not when it joins."""
    with pytest.raises(ConfigError, match="name must be text of at most 512 characters"):
        Consumer("127.0.0.1:7000", subject="s", group="g", settings=ConsumerSettings(name=name))
    Consumer(
        "127.0.0.1:7000",
        subject="s",
        group="g",
        settings=ConsumerSettings(name="ein Name, ü" + "n" * 500),
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"value": "text"},
            InvalidRequestError,
            r"value must be bytes, not str: use value.encode\(\)",
        ),
        ({"key": "\ud800"}, InvalidRequestError, "key is not a text that UTF-8 has: "),
        ({"value": bytearray(b"v")}, InvalidRequestError, r"not bytearray: use bytes\(value\)"),
        ({"key": ""}, InvalidRequestError, "key is an empty text: leave it out, or give b"),
        ({"key": memoryview(b"k")}, InvalidRequestError, r"not memoryview: use bytes\(key\)"),
        ({"key": Digest(b"k")}, InvalidRequestError, r"not Digest: use bytes\(key\)"),
        ({"value": None}, InvalidRequestError, "value must be bytes, not NoneType; to send other"),
        ({"key": None}, InvalidRequestError, "not NoneType: leave it out for a message without"),
        ({"key": 7}, InvalidRequestError, "key must be bytes or text, not int "),
        (
            {"properties": ["a"]},
            InvalidRequestError,
            "properties must be a mapping of text to text or bytes, not list",
        ),
        (
            {"properties": "a"},
            InvalidRequestError,
            "properties must be a mapping of text to text or bytes, not str",
        ),
        ({"properties": {"a": 1}}, InvalidRequestError, "a property has a text name and"),
        ({"subject": []}, Reason.NAME_INVALID, "illegal name"),
        ({"subject": {}}, Reason.NAME_INVALID, "illegal name"),
        ({"subject": 5}, Reason.NAME_INVALID, "illegal name"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_send_is_refused_when_its_arguments_are_malformed(arguments, kind, words):
    """`send` itself refuses a malformed message, by one error and not by one that came of
    another.
    """
    producer = Producer("meta:1", _environment=Environment(network=SilentNetwork()))
    await producer.__aenter__()
    with raises(kind, match=words) as caught:
        producer.send(**({"subject": "s", "value": b"v"} | arguments))
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert producer.stats.sent == 0
    await producer.close(flush=False)
