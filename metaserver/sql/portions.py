"""Long lists of ids in several statements.

PostgreSQL takes 32,767 parameters in a statement, SQLite 32,766.  The statements stay in one transaction, so that all of
it is done or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

Id = TypeVar("Id", int, str)

IDS_AT_ONCE = 5_000
"""Ids of one statement."""


def portions(ids: Collection[Id]) -> Iterator[list[Id]]:
    """Return the ids, each once and ascending so that rows are locked in one order, at most `IDS_AT_ONCE` at a time."""
    ordered = sorted(set(ids))
    for first in range(0, len(ordered), IDS_AT_ONCE):
        yield ordered[first : first + IDS_AT_ONCE]
