"""Clients of `keylane.sync` that are used in wrong ways: by their own callbacks, by what ends a
program, with other arguments.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import keylane
from keylane import ConsumerSettings
from keylane.protocol.errors import (
    ClosedError,
    ConfigError,
    InvalidRequestError,
    Reason,
)
from keylane.protocol.message import Message, Receipt
from keylane.sync import Consumer, Producer, TakenMessage
from keylane.sync.loop_thread import LoopThread
from support.raising import raises

META = "127.0.0.1:1"


class ThreadedClient:
    """Has what a client does at its end."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.thread = LoopThread("client", close_client=self.close)

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture
def client() -> Iterator[ThreadedClient]:
    client = ThreadedClient()
    client.thread.start()
    yield client
    client.thread.stop()


async def number() -> int:
    return 7


def make_consumer() -> Consumer[bytes]:
    return Consumer(META, subject="orders", group="billing")


def make_producer() -> Producer[bytes]:
    return Producer(META)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_is_raised_to_the_caller_when_a_codec_raises_it(
    client: ThreadedClient, error: BaseException
):
    """It stopped the event loop: messages that were queued were lost without a word, and each later
    call raised a RuntimeError.
    """

    async def encode() -> None:
        raise error

    with pytest.raises(type(error)):
        client.thread.run(encode)
    assert not client.closed.is_set()
    assert client.thread.run(number) == 7


def test_client_is_closed_when_a_callback_of_its_loop_ends_the_program(
    client: ThreadedClient, caplog: pytest.LogCaptureFixture
):
    async def exit_soon() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(60)

    with caplog.at_level(logging.ERROR), pytest.raises(ClosedError):
        client.thread.run(exit_soon)
    assert client.closed.wait(10)
    client.thread.stop()
    assert "closing the client, because a callback ended its event loop" in caplog.text
    with pytest.raises(ClosedError):
        client.thread.run(number)
    client.thread.start()
    assert client.thread.run(number) == 7


def test_stop_is_refused_on_the_thread_itself_and_stops_nothing(client: ThreadedClient):
    async def stop() -> None:
        client.thread.stop()

    with raises(Reason.OTHER_LOOP, match="called on its own event loop"):
        client.thread.run(stop)
    assert client.thread.run(number) == 7


@pytest.mark.parametrize("make", [make_producer, make_consumer])
def test_close_is_refused_within_a_callback_and_closes_nothing(make: Callable[[], Any]):
    """It closed the producer beneath its program: messages that were queued were given up."""
    client = make()
    client._thread.start()

    async def callback() -> None:
        client.close()

    with raises(Reason.OTHER_LOOP, match="called on its own event loop"):
        client._thread.run(callback)
    assert client._thread.state == "open"
    client._thread.stop()


@pytest.mark.parametrize("make", [make_producer, make_consumer])
def test_close_leaves_nothing_for_the_end_of_the_process_when_the_event_loop_has_ended(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    """Each opening of such a client was kept until the process ended, and with it the client."""
    client = make()
    kept: list[object] = []
    monkeypatch.setattr(atexit, "register", kept.append)
    monkeypatch.setattr(atexit, "unregister", kept.remove)
    client._thread.start()
    client._exit_hook.enable()

    async def exit_soon() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(60)

    with pytest.raises(ClosedError):
        client._thread.run(exit_soon)
    client._thread.stop()
    client.close()
    assert not kept


def test_close_with_a_flush_that_is_no_switch_closes_nothing():
    producer = Producer(META)
    producer._thread.start()
    for flush in ("no", 0, None):
        with pytest.raises(InvalidRequestError, match="flush must be True or False"):
            producer.close(flush=flush)  # type: ignore[arg-type]  # that is the test
    assert producer._thread.state == "open"
    producer._thread.stop()


@pytest.mark.parametrize("make", [make_producer, make_consumer])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_client_is_not_copied(make: Callable[[], Any], copied: Callable[[Any], Any]):
    """A shallow copy had the same thread: the end of one closed the other."""
    with pytest.raises(InvalidRequestError, match="neither copied nor pickled"):
        copied(make())


async def no_messages() -> AsyncIterator[tuple[bytes, bytes]]:
    yield b"key", b"value"


@pytest.mark.parametrize("messages", [None, 5, no_messages()])
def test_send_all_refuses_what_it_cannot_iterate(messages: Any):
    with pytest.raises(InvalidRequestError, match=r"messages must be pairs \(key, value\)"):
        Producer(META).send_all("orders", messages)


@pytest.mark.parametrize("messages", [None, 5, "x", b"x", [5], [None], [b"x"]])
@pytest.mark.parametrize("call", ["ack", "nack"])
def test_acks_refuse_what_are_no_messages(messages: Any, call: str):
    consumer = make_consumer()
    consumer._thread.start()
    with pytest.raises(
        InvalidRequestError,
        match=r"a list of messages|only messages can be acked|acks are of messages",
    ):
        getattr(consumer, call)(messages)
    consumer._thread.stop()


@pytest.mark.parametrize("name", ["handler", "batch_handler", "on_assigned"])
def test_consumer_says_where_handlers_are(name: str):
    given: dict[str, Any] = {name: print}
    if name == "on_assigned":
        given = {"settings": ConsumerSettings(on_assigned=print)}
    text = (
        rf"keylane\.sync\.Consumer takes no {name}=: .*for message in consumer.*keylane\.Consumer"
    )
    with pytest.raises(ConfigError, match=text):
        Consumer(META, subject="orders", group="billing", **given)


def test_consumer_refuses_a_name_that_no_consumer_has_as_python_does():
    given: dict[str, Any] = {"handlr": print}
    with pytest.raises(TypeError, match="unexpected keyword argument 'handlr'"):
        Consumer(META, subject="orders", group="billing", **given)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("topic", "give subject="),
        ("group_id", "give group="),
        ("enable_auto_commit", "give ack="),
        ("max_retries", "give tries_max="),
        ("hand_over_ms", r"did you mean handover_ms\?"),
        ("handler_timout_ms", r"did you mean handler_timeout_ms\?"),
        ("poll_wait_ms", r"did you mean pull_wait_ms\?"),
        ("handover_ms", r"settings=ConsumerSettings\(handover_ms=\.\.\.\)"),
        ("ttl_ms", r"settings=ConsumerSettings\(ttl_ms=\.\.\.\)"),
    ],
)
@pytest.mark.parametrize("kind", [Consumer, keylane.Consumer])
def test_consumer_says_what_to_give_when_an_argument_is_unknown(kind: Any, name: str, advice: str):
    """It was Python's bare error."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*{advice}"):
        kind(META, subject="orders", **{name: 1})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("topic", "each message names its subject"),
        ("acks", "a receipt always means that the message is on the disk"),
        ("linger", r"did you mean linger_ms\?"),
        ("queue_bytes", r"settings=ProducerSettings\(queue_bytes=\.\.\.\)"),
    ],
)
@pytest.mark.parametrize("kind", [Producer, keylane.Producer])
def test_producer_says_what_to_give_when_an_argument_is_unknown(kind: Any, name: str, advice: str):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*{advice}"):
        kind(META, **{name: 1})


@pytest.mark.parametrize(
    "client",
    [
        keylane.Producer(META),
        keylane.Consumer(META, subject="orders", group="billing"),
        keylane.Reader(META, "orders"),
        keylane.Admin(META),
    ],
)
def test_client_says_how_it_is_opened_when_it_is_started_in_another_way(client: Any):
    """As by `await producer.start()` and `with Producer(...)`."""
    kind = type(client).__name__
    with pytest.raises(TypeError, match=rf"`async with {kind}\(...\)` opens it") as refused:
        with client:
            raise AssertionError
    assert ("keylane.sync" in str(refused.value)) is (kind in {"Producer", "Consumer"})
    for name in ("start", "stop"):
        assert not hasattr(client, name)
        with pytest.raises(AttributeError, match=rf"'{name}': `async with {kind}\(...\)`"):
            getattr(client, name)
    with pytest.raises(AttributeError, match=r"'sned'$"):
        client.sned  # noqa: B018 - that is the test


def test_python_suggests_no_private_name_when_a_client_is_opened_in_another_way(capsys):
    for name, suggested in (("open", False), ("sendd", True)):
        with pytest.raises(AttributeError) as refused:
            getattr(keylane.Producer(META), name)
        sys.__excepthook__(refused.type, refused.value, None)
        assert ("Did you mean" in capsys.readouterr().err) is suggested


@pytest.mark.parametrize("kind", [Producer, Consumer, keylane.Producer, keylane.Consumer])
def test_client_without_an_address_says_what_it_needs(kind: Any):
    """Also where the address has the name that another system gives it."""
    name = kind.__name__.removeprefix("Sync")
    with pytest.raises(TypeError, match=rf'{name}\("127\.0\.0\.1:7000"\)'):
        kind(settings=None)
    with pytest.raises(TypeError, match=r"'bootstrap_servers': give the addresses of metaservers"):
        kind(bootstrap_servers="127.0.0.1:9092", settings=None)


@pytest.mark.parametrize(
    ("client", "name", "advice"),
    [
        (keylane.Producer(META), "send_and_wait", r"use await send\(...\)"),
        (Producer(META), "send_and_wait", r"use send\(...\).result\(\)"),
        (Producer(META), "start", r"`with`, or open\(\), opens it"),
        (keylane.Producer(META), "publish", r"use send\(subject, value, key=...\)"),
        (keylane.Consumer(META), "commit", r"each message is acked: message.ack\(\)"),
        (
            Consumer(META, subject="s", group="g"),
            "commit",
            r"each message is acked: message.ack\(\)",
        ),
        (keylane.Consumer(META), "poll", r"use getmany\(\)"),
        (keylane.Consumer(META), "subscribe", r"@consumer.on\(subject, group=...\)"),
    ],
)
def test_client_says_what_to_use_when_a_method_is_of_another_system(client, name, advice):
    assert not hasattr(client, name)
    with pytest.raises(AttributeError, match=rf"'{name}': .*{advice}"):
        getattr(client, name)


async def test_sync_client_says_how_it_is_opened_when_async_with_opens_it():
    with pytest.raises(TypeError, match="`async with` does not open a SyncProducer: `with`"):
        async with Producer(META):  # type: ignore[attr-defined]  # that is the test
            raise AssertionError


def test_send_says_where_the_subject_belongs_when_a_topic_is_named():
    producer: Any = keylane.Producer(META)
    for send in (
        lambda: producer.send("orders", b"v", topic="orders"),
        lambda: producer.send("orders", b"v", "customer-7"),
    ):
        with pytest.raises(TypeError, match="only subject and value by position: pass the key by"):
            send()
    with pytest.raises(TypeError, match="keyword argument 'topic': give subject="):
        producer.send(topic="orders", value=b"v")


@pytest.mark.parametrize("kind", [Producer, keylane.Producer])
def test_send_says_what_to_give_when_headers_are_given(kind: Any):
    """And names the public class when it has no advice."""
    producer: Any = kind(META)
    with pytest.raises(TypeError, match=r"^Producer\.send\(\) got .* 'headers': give properties=$"):
        producer.send("orders", b"v", headers={"a": "b"})
    with pytest.raises(TypeError, match=r"^Producer\.send\(\) got .* argument 'colour'$"):
        producer.send("orders", b"v", colour="red")


@pytest.mark.parametrize("name", ["delay", "delay_s", "countdown"])
async def test_send_says_what_to_give_when_a_delay_is_given(name: str):
    advice = "give deliver_at=, as in datetime.now(UTC) + timedelta(seconds=10), and no key: "
    later: Any = {name: 10}
    with pytest.raises(TypeError, match=rf"'{name}': {re.escape(advice)}"):
        Producer(META).send("orders", b"v", **later)
    producer = keylane.Producer(META)
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'") as raised:
        producer.send("orders", b"v", **later)
    await producer.__aexit__(TypeError, raised.value, None)  # the end of its `async with`
    (note,) = raised.value.__notes__
    assert advice in note


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        (keylane.ConsumerSettings, "auto_offset_reset", r"in Consumer\(...\), give start=$"),
        (
            keylane.ConsumerSettings,
            "prefetch",
            r"in Consumer\(...\), give settings=ConsumerSettings\(buffer_messages=...\); in a shared",
        ),
        (keylane.ConsumerSettings, "group_id", r"in Consumer\(...\), give group=$"),
        (keylane.ConsumerSettings, "hand_over_ms", r"did you mean handover_ms\?$"),
        (keylane.ProducerSettings, "acks", r"in Producer\(...\), leave it out: a receipt "),
        (keylane.ProducerSettings, "linger", r"did you mean linger_ms\?$"),
    ],
)
def test_settings_say_what_to_give_when_a_name_is_unknown(kind: Any, name: str, advice: str):
    start = rf"^{kind.__name__}\(\) got an unexpected keyword argument '{name}': "
    with pytest.raises(TypeError, match=start + advice):
        kind(**{name: 1})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("topic", "subject"),
        ("headers", "properties"),
        ("partition", "partition_id"),
        ("timestamp", "sent_at_ns, which is in nanoseconds since 1970"),
        ("body", r"value, or decode\(\) with a codec"),
        ("routing_key", "key"),
    ],
)
def test_message_says_its_own_names_when_another_system_has_others(name: str, advice: str):
    message: Any = Message("orders", b"k", b"v", 7, 1, 0)
    assert not hasattr(message, name)
    with pytest.raises(
        AttributeError, match=rf"^'Message' object has no .* '{name}': use {advice}$"
    ):
        getattr(message, name)
    taken: Any = TakenMessage(None, message)
    assert not hasattr(taken, name)
    with pytest.raises(AttributeError, match=rf"^'TakenMessage' object .* '{name}': use {advice}$"):
        getattr(taken, name)
    with pytest.raises(AttributeError, match=r"attribute 'colour'$"):
        message.colour  # noqa: B018 - that is the test
    with pytest.raises(AttributeError, match=r"'Receipt' object .* 'partition': use partition_id$"):
        Receipt(1, 7, "fsync").partition  # type: ignore[attr-defined]  # noqa: B018 - as above


def test_send_says_that_the_key_chooses_when_a_partition_is_named():
    producer: Any = keylane.Producer(META)
    with pytest.raises(TypeError, match="'partition': the key chooses it; queue= for a static"):
        producer.send("orders", b"v", partition=1)


@pytest.mark.parametrize(
    ("arguments", "missing"), [({"subject": "orders"}, "value"), ({"value": b"v"}, "subject")]
)
def test_send_names_the_argument_that_is_missing(arguments: dict[str, Any], missing: str):
    producer: Any = keylane.Producer(META)
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{missing}'"):
        producer.send(**arguments)


def test_messages_in_hand_are_equal_as_their_messages_are():
    message: Message[bytes] = Message(
        subject="orders", key=b"k", value=b"v", partition_id=1, offset=7, sent_at_ns=0
    )
    first, second = TakenMessage(None, message), TakenMessage(None, message)
    assert first == second
    assert len({first, second}) == 1
    assert first != message


@pytest.mark.parametrize("consumer", [keylane.Consumer, Consumer])
def test_consumer_says_which_arguments_have_names_when_too_many_have_none(consumer: Any):
    with pytest.raises(TypeError, match=r"only meta by position: .* as in subject=, group="):
        consumer(META, "orders", "billing", print)
