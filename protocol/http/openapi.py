"""The OpenAPI document of a server, built from its endpoints and the types of their bodies.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..control import ErrorBody
from .endpoint import Endpoint
from .posted import CONTENT_TYPE, JSON

_REFERENCE = "#/components/schemas/{name}"


API_VERSION = "1"
"""The version in the paths: /v1/."""


def openapi_document(endpoints: Sequence[Endpoint[Any]], *, program: str) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document that describes a program's calls, ready to be encoded as
    JSON.
    """
    types: set[Any] = {ErrorBody}
    for endpoint in endpoints:
        types |= {endpoint.answer, *(body for _, body in _describe_bodies(endpoint))}
    ordered_endpoints = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(ordered_endpoints, ref_template=_REFERENCE)
    references = dict(zip(ordered_endpoints, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _describe_operation(endpoint, references)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": f"keylane {program}", "version": API_VERSION},
        "paths": paths,
        "components": {"schemas": components},
    }


def _describe_operation(
    endpoint: Endpoint[Any], references: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "x-rights": endpoint.rights.value,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", endpoint.path)
        ]
        + [
            {"name": name, "in": location, "schema": {"type": "string"}}
            for location, names in (("query", endpoint.query), ("header", endpoint.headers))
            for name in names
            if name != CONTENT_TYPE
        ],
        "responses": {
            "200": {
                "description": "done",
                "content": {endpoint.response_type: {"schema": references[endpoint.answer]}},
            },
            "default": {
                "description": "refused",
                "content": {JSON: {"schema": references[ErrorBody]}},
            },
        },
    }
    bodies = _describe_bodies(endpoint)
    if bodies:
        operation["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": references[body]} for kind, body in bodies},
        }
    return operation


def _describe_bodies(endpoint: Endpoint[Any]) -> Sequence[tuple[str, Any]]:
    """Return the content types of a call's body, each with its type."""
    if endpoint.request is None:
        return ()
    return endpoint.content or ((JSON, endpoint.request),)
