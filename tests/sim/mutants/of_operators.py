"""Bugs of operators' requests: resets of groups, broker groups given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from keylane.broker.store import group_changes as set_cursor
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.operations import journal as operations_journal
from keylane.metaserver.resets import rows as resets_rows
from keylane.metaserver.resets import service as resets_service
from keylane.metaserver.sql.dialect import insert_new
from keylane.metaserver.sql.schema import drained, partitions
from keylane.producer.executor import Executor
from keylane.protocol.errors import DeliveryError, Reason
from keylane.protocol.progress import GroupStatus
from keylane.protocol.routing import PartitionState
from sim.mutants.mutant import Breaks, Patches


def reset_raises_no_fence(patches: Patches) -> None:
    """The owner before the reset is not fenced."""

    def decide(lock: Any, **kwargs: Any) -> bool:
        return real(lock, **kwargs) and not lock.fence

    real = patches.set(set_cursor, "decide_acquire", decide)


def reset_leaves_one_out(patches: Patches) -> None:
    def submit(store: Any, partition: Any, group: Any, cursor: int) -> Any:
        beyond = cursor < partition.readable_offset
        return real(store, partition, group, cursor + beyond)

    real = patches.set(set_cursor, "_submit_cursor", submit)


def reset_keeps_what_was_drained(patches: Patches) -> None:
    """After a reset, children are read again beside their parents."""

    def begin(connection: Any, scope: Any, **kwargs: Any) -> Any:
        query = sa.select(drained.c.group_id, drained.c.partition_id)
        rows = connection.execute(query.where(drained.c.group_id == scope.group_id)).all()
        tokens = real(connection, scope, **kwargs)
        insert_new(connection, drained, [dict(row._mapping) for row in rows])
        return tokens

    real = patches.set(resets_service, "begin_reset", begin)


def reset_forgets_the_last_one(patches: Patches) -> None:
    """One of several partitions is told as set, although its broker was never asked."""

    async def tell(
        self: Any, group: Any, scope: Any, ids: Any, tokens: Any, cursors: Any, done: Any
    ) -> None:
        left = ids[:-1] if len(ids) > 1 else ids
        await real(self, group, scope, left, tokens, cursors, done)
        done |= {
            number: GroupStatus(
                group=group, token=tokens[number], cursor=cursors[number], acked_above=0, lag=0
            )
            for number in ids
            if number not in left
        }

    real = patches.set(resets_service.ResetService, "_set_cursors", tell)


def reset_drains_empty_partitions(patches: Patches) -> None:
    """A partition at its end counts as drained, though its parents are not, and its children wait
    for it alone.
    """

    def readable(partitions: Any, drained: Any) -> Any:
        passed = [
            replace(partition, parents=()) if partition.partition_id in drained else partition
            for partition in partitions
        ]
        return real(passed, drained)

    patches.set(
        resets_rows, "_filter_drained_after_parents", lambda connection, group_id, at_end: at_end
    )
    real = patches.set(lease_rows, "readable_partitions", readable)


def strict_is_given_up_too(patches: Patches) -> None:
    """An operation does not wait for a silent broker, although its subject allows no messages to be
    reordered.
    """
    patches.set(operations_journal, "may_reorder", lambda strategy, *, static: not static)


def lost_messages_are_sent_again(patches: Patches) -> None:
    """Messages that may be stored and handled in a lost partition are sent elsewhere, and their
    sender is not told.
    """

    def leave(self: Any) -> None:
        for batch in self._in_flight:
            batch.doubtful = False
        real(self)

    real = patches.set(Executor, "_leave_lost_partition", leave)


def all_that_waits_counts_as_lost(patches: Patches) -> None:
    """Messages that were never sent to a lost partition are told as lost with it."""

    def leave(self: Any) -> None:
        self.queue_open_batch()
        for batch in [*self._in_flight, *self._queue]:
            error = DeliveryError(Reason.ACCEPTED_AS_LOST, partition_id=self.partition.partition_id)
            self._budget.give_up(batch, error)
        self._in_flight.clear()
        self._queue.clear()
        real(self)

    real = patches.set(Executor, "_leave_lost_partition", leave)


def parents_of_a_lost_partition_are_passed_over(patches: Patches) -> None:
    """Children of a lost partition are read beside its parents."""

    def readable(partitions: Any, drained: Any) -> Any:
        return real(
            [
                replace(partition, parents=()) if partition.lost else partition
                for partition in partitions
            ],
            drained,
        )

    real = patches.set(lease_rows, "readable_partitions", readable)


def lost_counts_as_abandoned(patches: Patches) -> None:
    """Groups wait for a lost partition as for an abandoned one."""
    patches.set(operations_journal, "mark_lost", lambda connection, ids: None)


def loss_takes_what_is_elsewhere(patches: Patches) -> None:
    """With a lost disk, sealed partitions on other disks are given up too, with their unread
    messages.
    """

    def lose(connection: Any, ids: Any) -> None:
        real(connection, ids)
        if ids:
            elsewhere = partitions.c.state == PartitionState.SEALED
            gone = {"state": PartitionState.EXPIRED, "lost": True, "abandoned": True}
            connection.execute(sa.update(partitions).where(elsewhere).values(gone))

    real = patches.set(operations_journal, "mark_lost", lose)


BREAKS: tuple[Breaks, ...] = (
    reset_raises_no_fence,
    reset_leaves_one_out,
    reset_keeps_what_was_drained,
    reset_forgets_the_last_one,
    reset_drains_empty_partitions,
    strict_is_given_up_too,
    lost_messages_are_sent_again,
    all_that_waits_counts_as_lost,
    parents_of_a_lost_partition_are_passed_over,
    lost_counts_as_abandoned,
    loss_takes_what_is_elsewhere,
)
