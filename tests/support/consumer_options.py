"""Arguments of a consumer, of which those that are settings go into its settings."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

from keylane import Consumer, ConsumerSettings

_SETTINGS = {field.name for field in fields(ConsumerSettings)} - set(
    inspect.signature(Consumer).parameters
)


def consumer_options(**given: Any) -> dict[str, Any]:
    """Keyword arguments of `Consumer`, for those of it and of `ConsumerSettings`."""
    moved = {name: given.pop(name) for name in _SETTINGS & given.keys()}
    if moved:
        given["settings"] = replace(given.get("settings") or ConsumerSettings(), **moved)
    return given
