"""Spans of what is sent.

| span | kind | of |
| --- | --- | --- |
| `send orders` | PRODUCER | messages, until brokers have stored them |
| `send orders` | CLIENT | a message with a context of its own, to which the span links |
| `create orders` | PRODUCER | a message that an outbox sends later |
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import get_current
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)

from ..protocol.message import Receipt
from ..rpc.tracing import Properties
from .attributes import (
    BATCH_MESSAGE_COUNT,
    ERROR_TYPE,
    MESSAGE_ID,
    OFFSET,
    PARTITION_ID,
    STORED,
    Attributes,
    error_type,
    message_id,
    of_operation,
)
from .contexts import read_context, span_context_of, write_context

NO_FIELDS: Mapping[str, str] = {}


class SendSpan:
    """The span of messages that are sent in the same context; a `SendTrace`."""

    __slots__ = ("_context", "_span", "fields", "is_recording")

    def __init__(self, tracer: Tracer, subject: str, properties: Properties | None) -> None:
        # Keeps the context alive, so that no other one has its id while messages may join.
        self._context = get_current()
        own = None if properties is None else span_context_of(read_context(properties))
        self._span: Span = tracer.start_span(
            f"send {subject}",
            kind=SpanKind.PRODUCER if own is None else SpanKind.CLIENT,
            attributes=of_operation("send", "send", subject),
            links=() if own is None else (Link(own),),
        )
        self.is_recording = self._span.is_recording()
        self.fields = NO_FIELDS
        if own is None:
            self.fields = write_context(set_span_in_context(self._span, self._context))

    def note_stored(self, receipt: Receipt, message_count: int) -> None:
        """Note where a message is. The places of several messages differ, so each batch has an
        event.
        """
        where: Attributes = {PARTITION_ID: str(receipt.partition_id)}
        if message_count > 1:
            where[OFFSET] = receipt.offset
            self._span.add_event(STORED, where)
            return
        if receipt.offset >= 0:  # otherwise the broker does not know it any more
            where[MESSAGE_ID] = message_id(receipt.partition_id, receipt.offset)
        self._span.set_attributes(where)

    def end(self, message_count: int, error: BaseException | None = None) -> None:
        """End the span."""
        span = self._span
        if message_count > 1:
            span.set_attribute(BATCH_MESSAGE_COUNT, message_count)
        if error is not None:
            note_error(span, error)
        span.end()


def create_message(
    tracer: Tracer, subject: str, properties: Properties | None
) -> Mapping[str, str]:
    """Make the span of a message that is created now; return the properties with its context."""
    if properties is not None and span_context_of(read_context(properties)) is not None:
        return NO_FIELDS
    attributes = of_operation("create", "create", subject)
    span = tracer.start_span(f"create {subject}", kind=SpanKind.PRODUCER, attributes=attributes)
    span.end()
    return write_context(set_span_in_context(span))


def note_error(span: Span, error: BaseException) -> None:
    """Note the error with which the operation of a span has ended."""
    if span.is_recording():
        span.record_exception(error)
        span.set_attribute(ERROR_TYPE, error_type(error))
        span.set_status(Status(StatusCode.ERROR, str(error)[:300]))
