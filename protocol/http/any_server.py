"""The control calls that every server of the cluster answers.  Pure."""

from __future__ import annotations

from ..control import Done, Health
from .endpoint import Endpoint, Rights

HEALTH = Endpoint("GET", "/v1/health", None, Health, Rights.KNOWN, "Whether the server is ready.")

LIVE = Endpoint("GET", "/health/live", None, Done, Rights.OPEN, "Answered while the server lives.")
READY = Endpoint(
    "GET",
    "/health/ready",
    None,
    Health,
    Rights.OPEN,
    "Whether to send clients to the server; status 503, with the reason, if not.",
)
METRICS = Endpoint(
    "GET",
    "/metrics",
    None,
    str,
    Rights.OPEN,
    "Figures of the server in the text format of Prometheus.",
    answered_as="text/plain; version=0.0.4; charset=utf-8",
)
OPENAPI = Endpoint(
    "GET",
    "/v1/openapi.json",
    None,
    dict,
    Rights.OPEN,
    "The calls of the server as an OpenAPI document.",
)
