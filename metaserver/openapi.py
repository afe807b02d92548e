"""The OpenAPI document of a server, made from its endpoints and the types of their bodies.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..protocol.control import ErrorBody
from ..protocol.endpoints import Endpoint

_REFERENCE = "#/components/schemas/{name}"


def openapi_document(endpoints: Sequence[Endpoint[Any]], *, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document, ready for JSON."""
    bodies = {endpoint.request for endpoint in endpoints if endpoint.request is not None}
    types = {endpoint.answer for endpoint in endpoints} | bodies | {ErrorBody}
    ordered = sorted(types, key=lambda body: body.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, references)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "keylane metaserver", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(
    endpoint: Endpoint[Any], references: dict[type[Any], dict[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", endpoint.path)
        ]
        + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query],
        "responses": {
            "200": {"description": "done", "content": _json(references[endpoint.answer])},
            "default": {"description": "refused", "content": _json(references[ErrorBody])},
        },
    }
    if endpoint.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _json(references[endpoint.request]),
        }
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
