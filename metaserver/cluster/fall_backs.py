"""Detects that the database is an older state of itself, which may name other copies than those
that acks wait for, and quarantines the copies of all broker groups. Runs SQL synchronously.

    a broker, or this metaserver, knows more changes of copies than the database has
    PostgreSQL: a standby was promoted that may lack commits      ─▶ quarantine, for each group
        the group's broker says which copies count, and they follow it ─▶ ends
        an operator promotes a copy, or says that none was promoted    ─▶ ends

Invariants
    In quarantine no copy takes the place of its broker unless an operator gives up what it may
    lack, and the set does not change: a copy may have taken the place unnoticed.
    The number of changes that are known never decreases.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..sql.dialect import insert_or_replace
from ..sql.origin import Origin, parse_origin, read_origin
from ..sql.quarantine import quarantine_copies
from ..sql.schema import copy_sets, facts
from .brokers import wait_for_broker_locks

HISTORY_FLOOR, ORIGIN = "history", "origin"
"""Names of the facts: what is added to the number of changes that the database has; where it was
when that was compared last.
"""
_facts_query = sa.select(facts.c.name, facts.c.value).where(
    facts.c.name.in_((HISTORY_FLOOR, ORIGIN))
)
_changes_query = sa.select(sa.func.coalesce(sa.func.sum(copy_sets.c.version), 0))


class History(NamedTuple):
    """What the database says of its history."""

    changes: int
    """How often sets of copies were changed."""
    floor: int
    """The part of `changes` that was learned from others."""
    stored_origin: str
    origin: Origin | None


class FallBack(NamedTuple):
    """A database that fell back."""

    reason: str
    broker_groups: list[str]
    """The groups whose copies are in quarantine now."""


def read_history(connection: Connection) -> History:
    """Return what the database says of its history."""
    values = {row.name: row.value for row in connection.execute(_facts_query)}
    floor = int(values.get(HISTORY_FLOOR, 0))
    changes = floor + int(connection.execute(_changes_query).scalar_one())
    return History(changes, floor, values.get(ORIGIN, ""), read_origin(connection))


def needs_note(history: History, known: int) -> bool:
    """Return True if `note_history` would change something.

    Args:
        known: the highest number of changes that somebody knows of.
    """
    origin = history.origin
    return known > history.changes or (origin is not None and origin.text != history.stored_origin)


def note_history(connection: Connection, known: int = 0) -> FallBack | None:
    """
    Compare the database with what somebody knows, and with where it was before. If it fell back,
    quarantine the copies of all groups. No lock may be held but those on broker rows.

    Args:
        known: the highest number of changes that somebody knows of.
    """
    wait_for_broker_locks(connection, alone=True)
    history = read_history(connection)
    if not needs_note(history, known):
        return None
    reason = ""
    if known > history.changes:
        reason = f"brokers know {known} changes of copies, and the database has {history.changes}"
        floor = history.floor + known - history.changes
        insert_or_replace(connection, facts, {"name": HISTORY_FLOOR, "value": str(floor)})
    origin = history.origin
    if origin is not None and origin.text != history.stored_origin:
        if history.stored_origin and parse_origin(history.stored_origin).has_lost(origin):
            reason = reason or (
                "a PostgreSQL server was promoted for which commits did not wait, or the database "
                "comes from another server"
            )
        insert_or_replace(connection, facts, {"name": ORIGIN, "value": origin.text})
    if not reason:
        return None
    return FallBack(reason, quarantine_copies(connection, reason))
