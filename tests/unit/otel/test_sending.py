"""Spans of what producers send, in a cluster in memory."""

import asyncio
import datetime as dt

import pytest
from opentelemetry import baggage, context
from opentelemetry.trace import SpanKind, StatusCode

from keylane import Producer
from keylane.protocol.errors import (
    DeliveryTimeoutError,
    GivenUpError,
    InvalidRequestError,
    SubjectUnknownError,
)
from keylane.protocol.limits import PROPERTIES_BYTES_MAX
from keylane.testing import VirtualCluster
from support.spans import Spans, is_child, linked_ids

OWN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def properties_of(cluster: VirtualCluster, subject: str = "orders") -> list[dict]:
    return [dict(message.properties) for message in await cluster.messages(subject)]


async def test_send_is_a_child_of_the_sender_s_span_and_ends_when_the_message_is_stored(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        with spans.begin("request"):
            receipt = await producer.send("orders", b"1", key="a")
        sent = await spans.one("send orders")
    assert is_child(sent, await spans.one("request"))
    assert sent.kind is SpanKind.PRODUCER
    assert sent.status.status_code is StatusCode.UNSET
    assert sent.attributes == {
        "messaging.system": "keylane",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.partition.id": str(receipt.partition_id),
        "messaging.message.id": f"{receipt.partition_id}:0",
    }
    assert sent.events == ()
    (properties,) = await properties_of(keylane_cluster)
    trace_id, span_id = sent.context.trace_id, sent.context.span_id
    assert properties["traceparent"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")


async def test_messages_of_one_context_and_turn_share_a_span(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=2)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
        with spans.begin("request"):
            for number in range(10):
                producer.send("orders", b"1", key=str(number), properties={"n": str(number)})
        with spans.begin("next"):
            producer.send("orders", b"1")
        await producer.flush()
        _, *sends = await spans.wait("send orders", 3)
    alone, together = sorted(
        sends, key=lambda sent: sent.attributes.get("messaging.batch.message_count", 1)
    )
    assert is_child(together, await spans.one("request"))
    assert is_child(alone, await spans.one("next"))
    assert together.attributes["messaging.batch.message_count"] == 10
    assert "messaging.message.id" not in together.attributes
    assert "messaging.batch.message_count" not in alone.attributes
    assert {event.name for event in together.events} == {"keylane.stored"}
    stored_in = {
        event.attributes["messaging.destination.partition.id"] for event in together.events
    }
    assert len(stored_in) == len(together.events) == 2
    properties = await properties_of(keylane_cluster)
    assert sum("n" in each for each in properties) == 10
    assert len({each["traceparent"] for each in properties}) == 3


async def test_send_all_continues_the_trace_of_its_caller(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=2)
    async with Producer(keylane_cluster.address) as producer:
        with spans.begin("import"):
            await producer.send_all("orders", [(str(number), b"1") for number in range(3_000)])
    (imported,) = spans.named("import")
    sends = spans.named("send orders")
    assert all(is_child(sent, imported) for sent in sends)
    assert len(sends) < 10
    counts = [sent.attributes.get("messaging.batch.message_count", 1) for sent in sends]
    assert sum(counts) == 3_000


async def test_context_in_the_properties_of_a_message_is_kept(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        with spans.begin("request"):
            await producer.send("orders", b"1", properties={"traceparent": OWN})
        sent = await spans.one("send orders")
    assert await properties_of(keylane_cluster) == [{"traceparent": OWN}]
    assert sent.kind is SpanKind.CLIENT
    assert linked_ids(sent) == [0x00F067AA0BA902B7]


@pytest.mark.parametrize("value", ["00-nonsense", b"\xff\x00", "", "00-" + "0" * 32 + "-1-01"])
async def test_unreadable_context_in_the_properties_is_replaced(
    keylane_cluster: VirtualCluster, spans: Spans, value
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1", properties={"traceparent": value, "a": "b"})
        sent = await spans.one("send orders")
    (properties,) = await properties_of(keylane_cluster)
    assert properties["a"] == "b"
    assert f"{sent.context.trace_id:032x}" in properties["traceparent"]


async def test_baggage_travels_with_the_message(keylane_cluster: VirtualCluster, spans: Spans):
    await keylane_cluster.create_subject("orders", partitions=1)
    token = context.attach(baggage.set_baggage("shop", "7"))
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1", tags=["paid"])
    context.detach(token)
    (message,) = await keylane_cluster.messages("orders")
    assert message.properties["baggage"] == "shop=7"
    assert message.tags == ("paid",)


async def test_message_at_a_limit_is_sent_without_its_context(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    full = {"a": "b" * (PROPERTIES_BYTES_MAX - 6)}
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"0")
        await producer.send("orders", b"1", properties=full)
        await producer.send("orders", b"2" * (1 << 20))
        await spans.wait("send orders", 3)
    messages = await keylane_cluster.messages("orders")
    assert ["traceparent" in message.properties for message in messages] == [True, False, False]


async def test_failed_send_has_the_class_of_its_error_and_is_still_reported(
    keylane_cluster: VirtualCluster, spans: Spans
):
    async with Producer(keylane_cluster.address) as producer:
        producer.send("nowhere", b"1")
        with pytest.raises(GivenUpError) as given_up:
            await producer.flush()
        sent = await spans.one("send nowhere")
    assert isinstance(given_up.value.__cause__, SubjectUnknownError)
    assert sent.attributes["error.type"] == "SubjectUnknownError"
    assert sent.status.status_code is StatusCode.ERROR
    assert [event.name for event in sent.events] == ["exception"]


async def test_refused_message_has_no_span(keylane_cluster: VirtualCluster, spans: Spans):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        with pytest.raises(InvalidRequestError):
            producer.send("orders", "no bytes")
        await asyncio.sleep(1)
    assert spans.named("") == []


async def test_scheduled_message_has_the_context_of_its_sender(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    due = keylane_cluster.now() + dt.timedelta(seconds=60)
    async with Producer(keylane_cluster.address) as producer:
        with spans.begin("request"):
            await producer.send("orders", b"1", deliver_at=due)
        sent = await spans.one("send orders")
    assert is_child(sent, await spans.one("request"))
    await asyncio.sleep(90)
    (properties,) = await properties_of(keylane_cluster)
    assert f"-{sent.context.span_id:016x}-" in properties["traceparent"]


async def test_context_that_is_not_sampled_travels_without_a_span(
    keylane_cluster: VirtualCluster, unsampled_spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
    (properties,) = await properties_of(keylane_cluster)
    assert int(properties["traceparent"][-2:], 16) & 1 == 0
    assert unsampled_spans.named("") == []


async def test_producer_that_was_opened_before_is_not_traced(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        with Spans.instrumented() as spans:
            await producer.send("orders", b"1")
    assert await properties_of(keylane_cluster) == [{}]
    assert spans.named("") == []


async def test_message_that_times_out_beside_others_ends_with_its_error(
    keylane_cluster: VirtualCluster, spans: Spans
):
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"0", key="a")
        keylane_cluster.brokers[0].crash()
        with spans.begin("waits"):
            waiting = producer.send("orders", b"1", key="a")
        with spans.begin("gives up"):
            late = producer.send("orders", b"2", key="b", timeout_ms=1_000)
        with pytest.raises(DeliveryTimeoutError):
            await late
        await asyncio.sleep(1)
        _, given_up = spans.named("send orders")
        assert given_up.attributes["error.type"] == "DeliveryTimeoutError"
        assert "messaging.message.id" not in given_up.attributes
        keylane_cluster.brokers[0].start()
        receipt = await waiting
        *_, stored = await spans.wait("send orders", 3)
    assert is_child(given_up, spans.named("gives up")[0])
    assert is_child(stored, spans.named("waits")[0])
    assert stored.attributes["messaging.message.id"] == f"{receipt.partition_id}:{receipt.offset}"
