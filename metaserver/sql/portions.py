"""Long lists of ids in several statements.

PostgreSQL takes 32,767 parameters in a statement, SQLite 32,766.  The statements stay in one
transaction, so that all of it is done or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from sqlalchemy import Executable, Row
from sqlalchemy.engine import Connection

Id = TypeVar("Id", int, str)

IDS_AT_ONCE = 5_000
"""Ids of one statement."""


def portions(ids: Collection[Id]) -> Iterator[list[Id]]:
    """Return the ids, each once and ascending so that rows are locked in one order, at most
    `IDS_AT_ONCE` at a time.
    """
    ordered = sorted(set(ids))
    for first in range(0, len(ordered), IDS_AT_ONCE):
        yield ordered[first : first + IDS_AT_ONCE]


def rows_of(connection: Connection, select: Executable, ids: Collection[Id]) -> Iterator[Row[Any]]:
    """Return the rows of a SELECT whose parameter `ids` has ids, in `portions`."""
    for some in portions(ids):
        yield from connection.execute(select, {"ids": some})
