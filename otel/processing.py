"""Spans of what is received and handled.

| span | kind | of |
| --- | --- | --- |
| `process orders` | CONSUMER | one message: the child of the span that sent it |
| `process orders` | CONSUMER | a batch: a root |
| `receive orders` | CLIENT | messages that a program asks for |

Each has a link to the span that sent the message, or to those that sent the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Token

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    set_span_in_context,
)

from ..protocol.message import Message
from ..rpc.tracing import current_tracing
from .attributes import (
    ATTEMPT,
    BATCH_MESSAGE_COUNT,
    MESSAGE_ID,
    PARTITION_ID,
    RETRIED,
    Attributes,
    message_id,
    of_operation,
)
from .contexts import NO_CONTEXT, ContextReader, span_context_of
from .sending import note_error

LINKS_MAX = 128
"""The largest number of links of a span; more would be dropped."""


class ProcessSpan:
    """The span of a message or a batch that is handled; a `HandlingTrace`."""

    __slots__ = ("_context", "_span", "is_recording")

    def __init__(self, tracer: Tracer, reader: ContextReader, messages: Sequence[Message]) -> None:
        is_single = len(messages) == 1
        parent = reader.read(messages[0].packed_properties) if is_single else NO_CONTEXT
        self._span: Span = tracer.start_span(
            f"process {messages[0].subject}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=_attributes("process", messages),
            links=_links(reader, messages),
        )
        self._context = set_span_in_context(self._span, parent)
        self.is_recording = self._span.is_recording()

    @property
    def span_context(self) -> SpanContext:
        """What identifies the span."""
        return self._span.get_span_context()

    def attach(self) -> Token[Context]:
        """Make the span the current one."""
        return attach(self._context)

    def detach(self, token: Token[Context]) -> None:
        """Make the earlier span the current one again."""
        detach(token)

    def end(self, error: BaseException | None = None, *, is_retried: bool = False) -> None:
        """End the span."""
        if is_retried:
            self._span.set_attribute(RETRIED, True)
        elif error is not None:
            note_error(self._span, error)
        self._span.end()


def note_received(
    tracer: Tracer, reader: ContextReader, messages: Sequence[Message]
) -> SpanContext | None:
    """Make the span of messages that a program gets; return what identifies it if it is
    recorded.
    """
    span = tracer.start_span(
        f"receive {messages[0].subject}",
        kind=SpanKind.CLIENT,
        attributes=_attributes("receive", messages),
        links=_links(reader, messages),
    )
    span.end()
    return span.get_span_context() if span.get_span_context().trace_flags.sampled else None


def _attributes(operation: str, messages: Sequence[Message]) -> Attributes:
    first = messages[0]
    attributes = of_operation(operation, operation, first.subject, first.group)
    if first.attempt != 1:
        attributes[ATTEMPT] = first.attempt
    if len(messages) == 1:
        attributes[MESSAGE_ID] = message_id(first.partition_id, first.offset)
    else:
        attributes[BATCH_MESSAGE_COUNT] = len(messages)
        if len({message.partition_id for message in messages}) > 1:
            return attributes
    attributes[PARTITION_ID] = str(first.partition_id)
    return attributes


def _links(reader: ContextReader, messages: Sequence[Message]) -> list[Link]:
    """Return a link for each message that has a context."""
    links: list[Link] = []
    for message in messages:
        if len(links) == LINKS_MAX:
            break
        sent_by = span_context_of(reader.read(message.packed_properties))
        if sent_by is not None:
            identified = {MESSAGE_ID: message_id(message.partition_id, message.offset)}
            links.append(Link(sent_by, identified if len(messages) > 1 else None))
    return links


@contextmanager
def process(given: Message | Sequence[Message]) -> Iterator[None]:
    """
    Make the block the processing of a message or of a batch, as a handler is: spans that begin
    inside are children of its span. Where keylane is not instrumented, this does nothing.

    It is for messages that a program takes itself, by `async for` or `getmany`.

        async for message in consumer:
            with process(message):
                ...
            await message.ack()
    """
    tracing = current_tracing()
    if tracing is None or not given:
        yield
        return
    span = tracing.begin_handling(given)
    token = span.attach()
    try:
        yield
    except BaseException as error:
        span.end(error)
        raise
    finally:
        span.detach(token)
    span.end()
