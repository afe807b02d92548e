"""Reads and writes the context of a trace in the properties of a message, in the format that the
program has chosen for OpenTelemetry: by default `traceparent` and `tracestate` of W3C.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import SpanContext, get_current_span

from ..protocol.errors import CorruptBatchError
from ..protocol.message import unpack_properties
from ..rpc.tracing import Properties

NO_CONTEXT = Context()


class _PropertiesGetter(Getter[Properties]):
    """Reads text from properties; bytes are no context."""

    def get(self, carrier: Properties, key: str) -> list[str] | None:
        """Return the property, if it is text."""
        value = carrier.get(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Properties) -> list[str]:
        """Return the names of the properties."""
        return list(carrier)


_GETTER = _PropertiesGetter()


def read_context(properties: Properties) -> Context:
    """Return the context in the properties; NO_CONTEXT if they have none, or one that cannot be
    read.
    """
    return extract(dict(properties.items()), NO_CONTEXT, _GETTER) if properties else NO_CONTEXT


def write_context(context: Context) -> Mapping[str, str]:
    """Return the properties that carry a context."""
    fields: dict[str, str] = {}
    inject(fields, context)
    return fields


def span_context_of(context: Context) -> SpanContext | None:
    """Return what identifies the span of a context, or None if it has no span."""
    span_context = get_current_span(context).get_span_context()
    return span_context if span_context.is_valid else None


class ContextReader:
    """
    Reads contexts of messages. It keeps the last one, because messages that were sent together
    have the same.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[bytes, Context] = b"", NO_CONTEXT

    def read(self, packed: bytes) -> Context:
        """Return the context in packed properties; see `read_context`."""
        last_packed, context = self._last  # read at once, because threads share it
        if packed == last_packed:
            return context
        try:
            context = read_context(unpack_properties(packed))
        except CorruptBatchError:
            context = NO_CONTEXT
        self._last = packed, context
        return context
