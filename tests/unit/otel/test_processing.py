"""Spans of what consumers get, in a cluster in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from keylane import NACK, Consumer, ConsumerSettings, Message, Producer, Retry
from keylane.otel import process
from keylane.testing import VirtualCluster
from support.spans import Spans, is_child, linked_ids

STRANGE = ["00-nonsense", b"\xff\x00", "00-" + "f" * 32 + "-" + "0" * 16 + "-01", "x" * 600]


async def send_and_handle(
    cluster: VirtualCluster, spans: Spans, handler: Any, count: int = 1, **options: Any
) -> None:
    """Send messages, each in a span `request` of its own, and handle them."""
    await cluster.create_subject("orders", partitions=1)
    async with Producer(cluster.address) as producer:
        for number in range(count):
            with spans.begin("request"):
                await producer.send("orders", b"%d" % number, key="a")
    kind = "batch_handler" if options.pop("batch", False) else "handler"
    async with Consumer(
        cluster.address, subject="orders", group="billing", **{kind: handler}, **options
    ):

        async def is_handled() -> bool:
            return await cluster.lag("orders", "billing") == 0

        await cluster.until(is_handled)


def handlers_of_every_kind(spans: Spans) -> dict[str, Callable[[Any], Any]]:
    """Handlers with a span of their own, as a library would make it."""

    def work() -> None:
        with spans.begin("work"):
            pass

    async def work_later() -> None:
        await asyncio.sleep(0.01)
        work()

    async def handle_async(_given: object) -> None:
        await work_later()

    def handle(_given: object) -> None:
        work()

    def handle_and_return_awaitable(_given: object) -> Awaitable[None]:
        return work_later()

    def handle_and_return_task(_given: object) -> Awaitable[None]:
        return asyncio.create_task(work_later())

    class CallableHandler:
        async def __call__(self, _given: object) -> None:
            await work_later()

    return {
        "async": handle_async,
        "sync": handle,
        "awaitable": handle_and_return_awaitable,
        "task": handle_and_return_task,
        "object": CallableHandler(),
    }


@pytest.mark.parametrize("batch", [False, True], ids=["message", "batch"])
@pytest.mark.parametrize("kind", ["async", "sync", "awaitable", "task", "object"])
async def test_spans_of_a_handler_are_children_of_the_process_span(
    keylane_cluster: VirtualCluster, spans: Spans, kind: str, *, batch: bool
):
    handler = handlers_of_every_kind(spans)[kind]
    await send_and_handle(keylane_cluster, spans, handler, batch=batch)
    processed = await spans.one("process orders")
    assert is_child(await spans.one("work"), processed)
    assert is_child(processed, await spans.one("send orders"))


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_process_span_of_a_message_says_which_group_has_handled_it(
    keylane_cluster: VirtualCluster, spans: Spans, strategy: str
):
    async def handle(_message: Message) -> None: ...

    settings = ConsumerSettings(consume_strategy=strategy)
    await send_and_handle(keylane_cluster, spans, handle, settings=settings)
    processed, sent = await spans.one("process orders"), await spans.one("send orders")
    assert processed.kind is SpanKind.CONSUMER
    assert linked_ids(processed) == [sent.context.span_id]
    assert processed.attributes == {
        "messaging.system": "keylane",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "billing",
        "messaging.destination.partition.id": sent.attributes["messaging.destination.partition.id"],
        "messaging.message.id": sent.attributes["messaging.message.id"],
    }


async def test_ack_is_a_child_of_the_only_message_that_it_acks(
    keylane_cluster: VirtualCluster, spans: Spans
):
    async def handle(_message: Message) -> None: ...

    await send_and_handle(keylane_cluster, spans, handle)
    acked = await spans.one("ack orders")
    assert is_child(acked, await spans.one("process orders"))
    assert acked.kind is SpanKind.CLIENT
    assert acked.attributes["messaging.operation.type"] == "settle"
    assert acked.attributes["messaging.consumer.group.name"] == "billing"
    assert "messaging.batch.message_count" not in acked.attributes


async def test_ack_of_several_messages_links_to_each(keylane_cluster: VirtualCluster, spans: Spans):
    async def handle(_message: Message) -> None: ...

    await send_and_handle(keylane_cluster, spans, handle, count=5)
    processed, acks = spans.named("process orders"), spans.named("ack orders")
    linked = [span_id for acked in acks for span_id in linked_ids(acked)]
    assert sorted(linked) == sorted(span.context.span_id for span in processed)
    counts = [acked.attributes.get("messaging.batch.message_count", 1) for acked in acks]
    assert sum(counts) == 5
    assert max(counts) > 1
    assert all((acked.parent is None) == (len(acked.links) > 1) for acked in acks)


async def test_batch_is_a_trace_of_its_own_that_links_to_each_message(
    keylane_cluster: VirtualCluster, spans: Spans
):
    async def handle(_messages: list[Message]) -> None: ...

    await send_and_handle(keylane_cluster, spans, handle, count=5, batch=True)
    (processed,) = spans.named("process orders")
    sends = spans.named("send orders")
    assert processed.parent is None
    assert processed.attributes["messaging.batch.message_count"] == 5
    assert linked_ids(processed) == [sent.context.span_id for sent in sends]
    ids = [link.attributes["messaging.message.id"] for link in processed.links]
    assert ids == [sent.attributes["messaging.message.id"] for sent in sends]


async def test_failed_attempt_has_an_error_and_the_next_one_a_span_of_its_own(
    keylane_cluster: VirtualCluster, spans: Spans
):
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no such customer")

    await send_and_handle(keylane_cluster, spans, handle)
    failed, handled = spans.named("process orders")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "ValueError"
    assert failed.events[0].attributes["exception.message"] == "no such customer"
    assert handled.status.status_code is StatusCode.UNSET
    assert handled.attributes["messaging.keylane.message.attempt"] == 2
    sent = await spans.one("send orders")
    assert is_child(failed, sent)
    assert is_child(handled, sent)


@pytest.mark.parametrize("way", ["raise", "return", "group"])
async def test_retry_that_a_handler_asks_for_is_no_error(
    keylane_cluster: VirtualCluster, spans: Spans, way: str
):
    async def handle(message: Message) -> object:
        if message.attempt > 1:
            return None
        if way == "return":
            return NACK
        raise Retry if way == "raise" else ExceptionGroup("both", [Retry()])

    await send_and_handle(keylane_cluster, spans, handle)
    retried, handled = spans.named("process orders")
    assert retried.status.status_code is StatusCode.UNSET
    assert retried.attributes["messaging.keylane.retried"] is True
    assert "error.type" not in retried.attributes
    assert "messaging.keylane.retried" not in handled.attributes


@pytest.mark.parametrize("value", STRANGE)
async def test_unreadable_context_of_a_stranger_is_ignored(
    keylane_cluster: VirtualCluster, value: str | bytes
):
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.value)

    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1", properties={"traceparent": value})
    with Spans.instrumented() as spans:
        async with Consumer(keylane_cluster.address, subject="orders", group="g", handler=handle):
            processed = await spans.one("process orders")
    assert handled == [b"1"]
    assert processed.parent is None
    assert processed.links == ()


async def test_message_without_a_context_begins_a_trace_whatever_opened_the_consumer(
    keylane_cluster: VirtualCluster, spans: Spans
):
    handled: list[int] = []

    async def handle(_message: Message) -> None:
        handled.append(trace.get_current_span().get_span_context().span_id)

    await keylane_cluster.create_subject("orders", partitions=1)
    producer = Producer(keylane_cluster.address)
    with spans.begin("start of the program"):
        async with Consumer(keylane_cluster.address, subject="orders", group="g", handler=handle):
            async with producer:
                await producer.send("orders", b"1", properties={"traceparent": STRANGE[2]})
            processed = await spans.one("process orders")
    assert handled == [processed.context.span_id]
    assert not is_child(processed, await spans.one("start of the program"))


async def test_message_that_the_filter_rejects_has_no_span(
    keylane_cluster: VirtualCluster, spans: Spans
):
    async def handle(_message: Message) -> None: ...

    settings = ConsumerSettings(filter=lambda message: message.value == b"1")
    await send_and_handle(keylane_cluster, spans, handle, count=3, settings=settings)
    (processed,) = spans.named("process orders")
    assert is_child(processed, spans.named("send orders")[1])


async def test_message_of_a_trace_that_is_not_sampled_is_handled_in_its_trace(
    keylane_cluster: VirtualCluster, unsampled_spans: Spans
):
    handled: list[tuple[int, str]] = []

    async def handle(message: Message) -> None:
        current = trace.get_current_span().get_span_context()
        assert not current.trace_flags.sampled
        handled.append((current.trace_id, message.properties["traceparent"]))

    await send_and_handle(keylane_cluster, unsampled_spans, handle, count=3)
    assert len(handled) == 3
    assert all(f"{trace_id:032x}" in traceparent for trace_id, traceparent in handled)
    assert unsampled_spans.named("") == []


async def test_program_that_iterates_puts_its_work_into_the_process_span(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        for _ in range(3):
            await producer.send("orders", b"1", key="a")
    async with Consumer(keylane_cluster.address, subject="orders", group="g") as consumer:
        async for message in consumer:
            with process(message):
                with spans.begin("work"):
                    pass
            assert not trace.get_current_span().get_span_context().is_valid
            await message.ack()
            if message.offset == 2:
                break
    sends, received = spans.named("send orders"), spans.named("receive orders")
    processed, worked = spans.named("process orders"), spans.named("work")
    assert len(sends) == len(received) == len(processed) == len(worked) == 3
    for sent, got, done, work in zip(sends, received, processed, worked, strict=True):
        assert got.kind is SpanKind.CLIENT
        assert linked_ids(got) == [sent.context.span_id]
        assert is_child(done, sent)
        assert is_child(work, done)
    assert spans.named("ack orders")


async def test_getmany_is_one_receive_with_a_link_for_each_message(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=2)
    async with Producer(keylane_cluster.address) as producer:
        for number in range(4):
            await producer.send("orders", b"1", key=str(number))
    taken: list[Message] = []
    async with Consumer(keylane_cluster.address, subject="orders", group="g") as consumer:
        while len(taken) < 4:
            messages = await consumer.getmany()
            with process(messages), spans.begin("work"):
                pass
            await consumer.ack(messages)
            taken += messages
    received, processed = spans.named("receive orders"), spans.named("process orders")
    linked = sorted(span_id for got in received for span_id in linked_ids(got))
    assert linked == sorted(sent.context.span_id for sent in spans.named("send orders"))
    assert len(received) == len(processed)
    assert all(map(is_child, spans.named("work"), processed))


async def test_process_has_no_span_where_keylane_is_not_instrumented():
    with process([]), process(Message("orders", b"", b"1", 0, 1, 0)):
        assert not trace.get_current_span().get_span_context().is_valid


async def test_error_in_a_process_block_is_noted_and_raised(
    keylane_cluster: VirtualCluster, spans: Spans
):
    with pytest.raises(ValueError, match="broken"), process(Message("a", b"", b"1", 7, 3, 0)):
        raise ValueError("broken")
    processed = await spans.one("process a")
    assert processed.attributes["error.type"] == "ValueError"
    assert processed.attributes["messaging.message.id"] == "3:7"
    assert "messaging.consumer.group.name" not in processed.attributes
