"""Bugs of what operators ask for: progress set anew, broker groups given up."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from keylane.broker import resets
from keylane.metaserver import resetter, store_operations, store_resets
from keylane.metaserver.dialect import insert_new
from keylane.metaserver.schema import drained
from sim.mutants.mutant import Breaks, Patches


def reset_raises_no_fence(patches: Patches) -> None:
    """Whoever held the partition may go on."""

    def decide(lock: Any, **kwargs: Any) -> bool:
        return real(lock, **kwargs) and not lock.fence

    real = patches.set(resets, "decide_acquire", decide)


def reset_leaves_one_out(patches: Patches) -> None:
    def submit(store: Any, partition: Any, group: Any, cursor: int) -> Any:
        beyond = cursor < partition.readable_offset
        return real(store, partition, group, cursor + beyond)

    real = patches.set(resets, "_submit", submit)


def reset_keeps_what_was_drained(patches: Patches) -> None:
    """Children are read again while their parents are."""

    def begin(connection: Any, scope: Any, **kwargs: Any) -> Any:
        found = sa.select(drained.c.group_id, drained.c.partition_id)
        rows = connection.execute(found.where(drained.c.group_id == scope.group_id)).all()
        tokens = real(connection, scope, **kwargs)
        insert_new(connection, drained, [dict(row._mapping) for row in rows])
        return tokens

    real = patches.set(resetter, "begin_reset", begin)


def reset_forgets_the_last_one(patches: Patches) -> None:
    """One partition of several is told as set, and its broker was never asked."""

    async def tell(
        self: Any, group: Any, scope: Any, ids: Any, tokens: Any, cursors: Any, done: Any
    ) -> None:
        left = ids[:-1] if len(ids) > 1 else ids
        await real(self, group, scope, left, tokens, cursors, done)
        done |= {one: cursors[one] for one in ids if one not in left}

    real = patches.set(resetter.Resetter, "_tell", tell)


def reset_drains_empty_partitions(patches: Patches) -> None:
    """Whatever is at its end counts as drained, though what it continues is not."""
    patches.set(store_resets, "_through", lambda connection, group_id, at_end: at_end)


def strict_is_given_up_too(patches: Patches) -> None:
    """A silent broker is not waited for, although its subject allows no messages to be reordered."""
    patches.set(store_operations, "_may_forsake", lambda row: row.without_source and not row.static)


BREAKS: tuple[Breaks, ...] = (
    reset_raises_no_fence,
    reset_leaves_one_out,
    reset_keeps_what_was_drained,
    reset_forgets_the_last_one,
    reset_drains_empty_partitions,
    strict_is_given_up_too,
)
