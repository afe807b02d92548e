"""What `keylane.rpc.tracing` asks for, by OpenTelemetry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from opentelemetry.context import get_current
from opentelemetry.propagate import get_global_textmap
from opentelemetry.trace import Tracer

from ..protocol.message import Delivery, Message
from ..rpc.tracing import EndTrace, Properties
from .attributes import BATCH_MESSAGE_COUNT, PARTITION_ID, of_operation
from .contexts import ContextReader, read_context, span_context_of
from .processing import ProcessSpan, note_received
from .sending import SendSpan, create_message
from .settling import FollowedMessages, begin_operation


class OpenTelemetryTracing:
    """Makes the spans of all clients of a process; a `Tracing`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._reader = ContextReader()
        self._followed = FollowedMessages()
        self._unsampled: tuple[bytes, ProcessSpan | None] = b"", None
        """The properties of the last message of a trace that is not sampled, with its span. Others
        that were sent with it have the same properties, and the sampler is not asked again.
        """

    def context_id(self) -> int:
        """Return the identity of the current context."""
        return id(get_current())

    def has_context(self, properties: Properties) -> bool:
        """Return True if `properties` have a context that can be read."""
        if get_global_textmap().fields.isdisjoint(name for name, _ in properties.items()):
            return False
        return span_context_of(read_context(properties)) is not None

    def begin_send(self, subject: str, properties: Properties | None) -> SendSpan:
        """Begin the span of messages that are sent."""
        return SendSpan(self._tracer, subject, properties)

    def create(self, subject: str, properties: Properties | None) -> Mapping[str, str]:
        """Make the span of a message that an outbox sends later."""
        return create_message(self._tracer, subject, properties)

    def begin_send_created(
        self, subject: str, partition_id: int, packed: Sequence[bytes]
    ) -> EndTrace | None:
        """Begin the span of a batch of such messages, if one of them is sampled."""
        created = [span_context_of(self._reader.read(each)) for each in packed if each]
        followed = [each for each in created if each is not None and each.trace_flags.sampled]
        attributes = of_operation("send", "send", subject)
        attributes[PARTITION_ID] = str(partition_id)
        if len(packed) > 1:
            attributes[BATCH_MESSAGE_COUNT] = len(packed)
        return begin_operation(self._tracer, attributes, f"send {subject}", followed)

    def begin_handling(self, given: Message | Sequence[Message]) -> ProcessSpan:
        """Begin the span of what a handler gets."""
        if not isinstance(given, Message):
            return self._begin_span(given)
        packed, unsampled = self._unsampled  # read at once, because threads share it
        if unsampled is not None and packed == given.packed_properties:
            return unsampled
        span = self._begin_span((given,))
        if not span.is_recording:
            sent_by = span_context_of(self._reader.read(given.packed_properties))
            if sent_by is not None and not sent_by.trace_flags.sampled:
                self._unsampled = given.packed_properties, span
        return span

    def _begin_span(self, messages: Sequence[Message]) -> ProcessSpan:
        span = ProcessSpan(self._tracer, self._reader, messages)
        if span.is_recording:
            self._followed.add(messages, span.span_context)
        return span

    def note_received(self, messages: Sequence[Message]) -> None:
        """Make the span of messages that a program gets."""
        span_context = note_received(self._tracer, self._reader, messages)
        if span_context is not None:
            self._followed.add(messages, span_context)

    def begin_ack(self, delivery: Delivery, ranges: Collection[tuple[int, int]]) -> EndTrace | None:
        """Begin the span of an ack, if a message of it is sampled."""
        followed = self._followed.take(delivery, ranges)
        if not followed:
            return None
        attributes = of_operation("ack", "settle", delivery.subject, delivery.group)
        attributes[PARTITION_ID] = str(delivery.leased_id)
        count = sum(end - start for start, end in ranges)
        if count > 1:
            attributes[BATCH_MESSAGE_COUNT] = count
        name = f"ack {delivery.subject}"
        return begin_operation(self._tracer, attributes, name, followed)
