"""Bugs of what is over and forgotten, and of the consumers that a tenant may have."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from keylane.metaserver.groups import sessions
from keylane.metaserver.retention import history as past_expirer
from keylane.metaserver.retention import history as past_rows
from sim.mutants.mutant import Breaks, Patches


def cuts_are_forgotten_before_they_are_published(patches: Patches) -> None:
    """The operations of a subject go after their time, also while a hidden subject waits to be
    published.
    """
    patches.set(past_rows, "_needed_by_hidden", sa.false())


def running_publications_are_forgotten(patches: Patches) -> None:
    """A publication counts as over from its beginning."""
    over = tuple(
        (table, sa.true() if table is past_rows.publications else when)
        for table, when in past_rows._FINISHED
    )
    patches.set(past_rows, "_FINISHED", over)


def what_is_over_counts_from_the_start(patches: Patches) -> None:
    """A row that ends is as old as the history."""
    real = past_rows.start_row_ages
    patches.set(past_expirer, "start_row_ages", lambda connection, _age_ms: real(connection, 0))


def nothing_is_forgotten(patches: Patches) -> None:
    """Rows of what is over stay."""
    patches.set(past_expirer, "remove_old_rows", lambda _connection, _before_ms: False)


def quotas_are_looked_up_for_everybody_alone(patches: Patches) -> None:
    """The limit of a tenant of its own does not count."""

    def check(connection: Any, principal: str, *, count: int = 1) -> None:
        real(connection, principal and f"not {principal}", count=count)

    real = patches.set(sessions, "check_session_quota", check)


BREAKS: tuple[Breaks, ...] = (
    cuts_are_forgotten_before_they_are_published,
    running_publications_are_forgotten,
    what_is_over_counts_from_the_start,
    nothing_is_forgotten,
    quotas_are_looked_up_for_everybody_alone,
)
