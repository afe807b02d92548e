"""The help of each class of settings names every field, with its range and its default."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from keylane import ConsumerSettings, ProducerSettings
from keylane.outbox import OutboxSettings


def texts_of(kind: type) -> dict[str, str]:
    """Field → its text in the docstring, on one line."""
    table = inspect.getdoc(kind).partition("Attributes:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + table)[1:]:
        name, _, text = entry.strip().partition(": ")
        texts[name] = " ".join(text.split())
    return texts


@pytest.mark.parametrize("kind", [ProducerSettings, ConsumerSettings, OutboxSettings])
def test_settings_help_has_each_field_with_its_range_and_default(kind: Any):
    """`help` shows the docstring of a class, and none of its fields."""
    texts = texts_of(kind)
    assert list(texts) == [field.name for field in fields(kind)]
    defaults = kind()
    ranges = importlib.import_module(kind.__module__)._RANGES
    for name, (low, high) in ranges.items():
        beginning = f"{low:_} to {high:_}, default {getattr(defaults, name):_}; "
        assert texts[name].startswith(beginning), name
    for name in texts.keys() - ranges.keys():
        default = getattr(defaults, name)
        shown = (
            f"Backoff(first_ms={default.first_ms:_}, max_ms={default.max_ms:_})"
            if name.endswith("backoff")
            else str(default)
        )
        assert shown in texts[name]
