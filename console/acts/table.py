"""All acts of the console, by name."""

from __future__ import annotations

from . import access, groups, operations, parked, subjects
from .act import Act

ACTS: dict[str, Act] = subjects.ACTS | operations.ACTS | groups.ACTS | parked.ACTS | access.ACTS
