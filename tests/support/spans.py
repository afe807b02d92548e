"""The spans of a test, in the memory of OpenTelemetry's own exporter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from keylane.otel import KeylaneInstrumentor


class Spans:
    """The spans that have ended."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        # Without resource detectors, which would start threads.
        self.provider = TracerProvider(resource=Resource.get_empty(), **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.begin = self.provider.get_tracer("test").start_as_current_span

    @classmethod
    @contextmanager
    def instrumented(cls, **options: Any) -> Iterator[Self]:
        """Trace the clients that are opened in the block."""
        spans = cls(**options)
        KeylaneInstrumentor().instrument(tracer_provider=spans.provider)
        try:
            yield spans
        finally:
            KeylaneInstrumentor().uninstrument()

    def named(self, name: str) -> list[ReadableSpan]:
        """The ended spans of this name, in the order of their ends; all, if the name is ""."""
        return [span for span in self._exporter.get_finished_spans() if name in {"", span.name}]

    async def wait(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Wait until `count` spans of this name have ended."""
        async with asyncio.timeout(60):
            while len(self.named(name)) < count:
                await asyncio.sleep(0.01)
        return self.named(name)

    async def one(self, name: str) -> ReadableSpan:
        """Wait for the only span of this name."""
        (span,) = await self.wait(name)
        return span


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """True if the span is a child of the other one, in the same trace."""
    assert span.parent is not None
    assert span.context is not None
    assert parent.context is not None
    same_trace = span.context.trace_id == parent.context.trace_id
    return same_trace and span.parent.span_id == parent.context.span_id


def linked_ids(span: ReadableSpan) -> list[int]:
    """The ids of the spans to which a span links."""
    return [link.context.span_id for link in span.links]
