"""Spans of a test, in the memory of OpenTelemetry's own exporter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from support.spans import Spans


@pytest.fixture
def spans() -> Iterator[Spans]:
    with Spans.instrumented() as spans:
        yield spans


@pytest.fixture
def unsampled_spans() -> Iterator[Spans]:
    with Spans.instrumented(sampler=ParentBased(ALWAYS_OFF)) as spans:
        yield spans
