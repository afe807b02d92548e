"""Spans of operations on messages that are followed already.

| span | kind | of |
| --- | --- | --- |
| `ack orders` | CLIENT | an ack that a consumer sends for its handlers or its program |
| `send orders` | CLIENT | a batch that an outbox sends |

A single followed message is the parent; of several, each has a link. An operation on messages that
nobody follows has no span, because it would be a trace of its own that leads nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from threading import Lock
from weakref import WeakKeyDictionary

from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Tracer,
    set_span_in_context,
)

from ..protocol.message import Delivery, Message
from ..rpc.tracing import EndTrace
from .attributes import Attributes
from .contexts import NO_CONTEXT
from .processing import LINKS_MAX
from .sending import note_error

FOLLOWED_MAX = 1_024
"""The largest number of messages of a partition whose spans are kept until they are acked."""


class FollowedMessages:
    """The spans of messages that are handled and not acked yet, by partition and offset."""

    def __init__(self) -> None:
        self._spans: WeakKeyDictionary[Delivery, dict[int, SpanContext]] = WeakKeyDictionary()
        self._lock = Lock()  # handlers run in threads

    def add(self, messages: Sequence[Message], span_context: SpanContext) -> None:
        """Keep a span for messages that a group has got; the oldest are forgotten at the limit."""
        with self._lock:
            for message in messages:
                if message.delivery is None or not message.group:
                    continue  # nobody acks it
                spans = self._spans.setdefault(message.delivery, {})
                spans[message.offset] = span_context
                if len(spans) > FOLLOWED_MAX:
                    del spans[next(iter(spans))]

    def take(self, delivery: Delivery, ranges: Collection[tuple[int, int]]) -> list[SpanContext]:
        """Remove and return the spans of the offsets in `ranges`, which do not overlap."""
        if delivery not in self._spans:
            return []
        with self._lock:
            spans = self._spans[delivery]
            offsets = sorted(spans)
            return [
                spans.pop(offset)
                for start, end in ranges
                for offset in offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]
            ]


def begin_operation(
    tracer: Tracer,
    attributes: Attributes,
    name: str,
    followed: Sequence[SpanContext],
) -> EndTrace | None:
    """Begin the span of an operation; None if `followed` is empty."""
    if not followed:
        return None
    distinct = list({(each.trace_id, each.span_id): each for each in followed}.values())
    is_single = len(distinct) == 1
    parent = set_span_in_context(NonRecordingSpan(distinct[0]), NO_CONTEXT)
    span = tracer.start_span(
        name,
        context=parent if is_single else NO_CONTEXT,
        kind=SpanKind.CLIENT,
        attributes=attributes,
        links=[Link(each) for each in distinct[:LINKS_MAX]],
    )

    def end(error: BaseException | None) -> None:
        if error is not None:
            note_error(span, error)
        span.end()

    return end
