"""Divides long lists of ids over several statements.

A statement on PostgreSQL takes 32,767 parameters, on SQLite 32,766. The statements stay in one
transaction, so that all of them or none take effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from sqlalchemy import Executable, Row
from sqlalchemy.engine import Connection

Id = TypeVar("Id", int, str)

IDS_AT_ONCE = 5_000
"""Most ids in one statement."""


def portions(ids: Collection[Id]) -> Iterator[list[Id]]:
    """Yield the ids without duplicates, at most `IDS_AT_ONCE` at a time, ascending so that rows are
    locked in one order.
    """
    ordered = sorted(set(ids))
    for first in range(0, len(ordered), IDS_AT_ONCE):
        yield ordered[first : first + IDS_AT_ONCE]


def rows_of(connection: Connection, select: Executable, ids: Collection[Id]) -> Iterator[Row[Any]]:
    """Yield the rows of a SELECT with a parameter `ids`, which gets the ids in `portions`."""
    for some in portions(ids):
        yield from connection.execute(select, {"ids": some})
