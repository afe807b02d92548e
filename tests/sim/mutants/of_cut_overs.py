"""Bugs of cuts, of holds, and of publications that take the place of messages."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from keylane.broker.partition import appends
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.store.holds import MessageHolds
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.operations import journal as operations_journal
from keylane.metaserver.publications import cuts, publishing
from keylane.metaserver.sql.schema import partitions, steps
from keylane.protocol.operations import StepAction
from keylane.spark.writing.rows import RowReader
from sim.features import cut_overs
from sim.mutants.mutant import Breaks, Patches


def ends_are_not_compared(patches: Patches) -> None:
    """A publication takes the place of messages of which it has no rows."""

    def check(connection: Any, row: Any, target: Any, ask: Any, cut: Any, parents: Any) -> None:
        real(connection, row, target, replace(ask, ends=None), cut, parents)

    real = patches.set(publishing, "check_cut", check)


def cut_opens_before_it_seals(patches: Patches) -> None:
    """What goes on behind a cut is opened while producers still send before it."""

    def journal(connection: Any, *args: Any, **kwargs: Any) -> int:
        operation_id: int = real(connection, *args, **kwargs)
        sealing = sa.and_(steps.c.operation_id == operation_id, steps.c.action == StepAction.SEAL)
        ids = sa.select(steps.c.partition_id).where(sealing)
        # Where they end is what they had when someone last looked: nothing.
        connection.execute(
            sa.update(partitions).where(partitions.c.partition_id.in_(ids)).values(end_offset=0)
        )
        connection.execute(sa.update(steps).where(sealing).values(done=True))
        return operation_id

    real = patches.set(cuts, "journal_operation", journal)


def published_rows_stay_open(patches: Patches) -> None:
    """A publication shows hidden partitions that are not sealed."""

    def plan_steps(*args: Any) -> Any:
        return [
            (partition_id, action, done or action is StepAction.SEAL)
            for partition_id, action, done in real(*args)
        ]

    real = patches.set(publishing, "_plan_steps", plan_steps)


def holds_are_forgotten_at_a_restart(patches: Patches) -> None:
    """Retention knows only of holds that were set since the broker was started."""

    def left_ms(self: Any, partition: Any, body: Any) -> int:
        known = (partition.partition_id, body.job) in self._expiries_ms
        return int(real(self, partition, body)) if known else 0

    real = patches.set(MessageHolds, "_remaining_ms", left_ms)


def groups_read_while_they_are_placed(patches: Patches) -> None:
    """A group is granted what a publication is about to expire, although it is fixed where the
    group goes on.
    """

    def circumstances(connection: Any, group: Any) -> Any:
        return real(connection, group)._replace(being_replaced=False)

    real = patches.set(lease_rows, "_read_context", circumstances)


def rows_and_messages_both_stay(patches: Patches) -> None:
    """A publication leaves what it takes the place of."""
    patches.set(operations_journal, "_expire_older", lambda _connection, _subject_id, _kept: None)


def hidden_rows_wait_for_no_one(patches: Patches) -> None:
    """Retention removes rows that are not published, because no consumer group has them to read."""

    def needed(self: Any, partition: Any) -> int:
        wanted: int = real(self, partition)
        is_free = partition.facts.hidden and not partition.groups
        return partition.readable_offset if is_free else wanted

    real = patches.set(RetentionLoop, "_needed_by_groups", needed)


def repeated_tasks_store_their_rows_again(patches: Patches) -> None:
    """A task that begins again stores what it had stored before."""

    def decide(producer: Any, header: Any, *, is_clashed: bool) -> Any:
        return None

    patches.set(appends, "_decide_numbered", decide)


def groups_go_on_behind_the_first_row_left(patches: Patches) -> None:
    """The first message that a group has not handled is left out of the rows where it goes on."""

    def positions(cursors: Any, batches: Any, ends: Any) -> Any:
        later = {
            group: {number: cursor + 1 for number, cursor in by_source.items()}
            for group, by_source in cursors.items()
        }
        return real(later, batches, ends)

    real = patches.set(cut_overs, "positions", positions)


def rows_without_a_key_go_anywhere(patches: Patches) -> None:
    """A row without a key is stored outside of the range of the partition that it was made from."""

    def init(self: Any, **given: Any) -> None:
        real(self, **given | {"keyless_bounds": (0, 1_024)})

    real = patches.set(RowReader, "__init__", init)


BREAKS: tuple[Breaks, ...] = (
    ends_are_not_compared,
    cut_opens_before_it_seals,
    published_rows_stay_open,
    holds_are_forgotten_at_a_restart,
    groups_read_while_they_are_placed,
    rows_and_messages_both_stay,
    hidden_rows_wait_for_no_one,
    repeated_tasks_store_their_rows_again,
    groups_go_on_behind_the_first_row_left,
    rows_without_a_key_go_anywhere,
)
