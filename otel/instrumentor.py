"""Switches the traces of keylane on and off; `opentelemetry-instrument` finds it by its entry
point.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation import instrumentor
from opentelemetry.trace import get_tracer

from ..protocol.membership.versions import VERSION
from ..rpc.tracing import install
from .attributes import SCHEMA_URL
from .tracing import OpenTelemetryTracing


class KeylaneInstrumentor(instrumentor.BaseInstrumentor):  # type: ignore[name-defined, misc]
    # its file tells type checkers to ignore it
    """
    Traces the messages of the clients that are opened after `instrument`, until `uninstrument`;
    clients that are open keep what they have.

        KeylaneInstrumentor().instrument()

    `instrument` takes `tracer_provider`; without it, the spans go to the program's own provider.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the package that is instrumented, which this is a part of."""
        return ("keylane",)

    def _instrument(self, **kwargs: Any) -> None:
        tracer = get_tracer(
            "keylane", VERSION, kwargs.get("tracer_provider"), schema_url=SCHEMA_URL
        )
        install(OpenTelemetryTracing(tracer))

    def _uninstrument(self, **_kwargs: Any) -> None:
        install(None)
