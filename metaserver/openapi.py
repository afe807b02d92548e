"""The OpenAPI document of a metaserver, made from its table of calls and the types of their bodies.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..protocol.control import ErrorBody
from .calls import Call

_REFERENCE = "#/components/schemas/{name}"


def openapi_document(calls: Sequence[Call], *, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document, ready for JSON."""
    types = {one.answer for one in calls} | {one.body for one in calls if one.body} | {ErrorBody}
    ordered = sorted(types, key=lambda one: one.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in calls:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "keylane metaserver", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(
    call: Call, references: dict[type[msgspec.Struct], dict[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": call.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", call.path)
        ]
        + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in call.query],
        "responses": {
            "200": {"description": "done", "content": _json(references[call.answer])},
            "default": {"description": "refused", "content": _json(references[ErrorBody])},
        },
    }
    if call.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(references[call.body])}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
