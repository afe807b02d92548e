"""OpenTelemetry: the context of a trace travels with each message, and what keylane does for a
message is a span, by the conventions for messaging.

`opentelemetry-instrument` switches it on, or `KeylaneInstrumentor().instrument()`, before clients
are opened.
"""

from ..protocol.errors import MissingExtraError

try:
    from .instrumentor import KeylaneInstrumentor
    from .processing import process
except ModuleNotFoundError as error:
    raise MissingExtraError.of(error, "keylane.otel", "otel") from error

__all__ = ["KeylaneInstrumentor", "process"]
