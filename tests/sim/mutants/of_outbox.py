"""Bugs of the outbox."""

from __future__ import annotations

from typing import Any

from keylane.outbox import drainer as drainer_module
from keylane.outbox import lease as lease_module
from keylane.outbox import partition_sender as sender_module
from keylane.outbox import round as round_module
from keylane.outbox import rows as rows_module
from keylane.outbox.batches import SendStep
from keylane.outbox.partition_sender import PartitionSender
from sim.mutants.mutant import Breaks, Patches


def batches_sent_before_they_are_recorded(patches: Patches) -> None:
    """A batch is recorded by a mark on its rows only: the next holder sends them in batches of its
    own.
    """

    def read_recorded(connection: Any, tables: Any) -> Any:
        for batch in real(connection, tables):
            rows_module.requeue_batches(connection, tables, [batch])
        return []

    real = patches.set(rows_module, "read_recorded", read_recorded)


def left_partition_is_no_barrier(patches: Patches) -> None:
    """Rows go to the new partition while older ones of their key may be stored late in the old
    one.
    """

    def capacity_table(partition_ids: Any, capacities: Any, _barred: Any) -> Any:
        return real(partition_ids, capacities, ())

    real = patches.set(drainer_module, "capacity_table", capacity_table)


def lease_token_is_not_checked(patches: Patches) -> None:
    """A program that was frozen with the lease goes on as if it still had it."""

    def renew(connection: Any, tables: Any, *, token: int, lease_ms: int) -> None:
        try:
            real(connection, tables, token=token, lease_ms=lease_ms)
        except lease_module.TokenChangedError:
            return

    real = patches.set(lease_module, "renew", renew)


def rows_deleted_before_the_ack(patches: Patches) -> None:
    """A batch counts as stored once it is on its way."""

    def enqueue(self: Any, batch: Any) -> bool:
        is_queued: bool = real(self, batch)
        if is_queued:
            self._owner.on_stored(batch)
        return is_queued

    real = patches.set(PartitionSender, "enqueue", enqueue)


def recorded_batches_wait_behind_new_ones(patches: Patches) -> None:
    """New batches are recorded and sent while those of an earlier holder are not settled."""

    def capacity(self: Any) -> Any:
        batches, self.batches = self.batches, type(self.batches)()
        try:
            return real(self)
        finally:
            self.batches = batches

    real = patches.set(PartitionSender, "capacity", capacity)


def sealed_partition_gives_up(patches: Patches) -> None:
    """A batch that a sealed partition refused is taken for one that may be stored."""

    def decide(error: Any, **kwargs: Any) -> SendStep:
        step: SendStep = real(error, **kwargs)
        return SendStep.GIVE_UP if step is SendStep.RETURN and kwargs["doubtful"] else step

    real = patches.set(sender_module, "decide_send_step", decide)


def doubtful_batches_return(patches: Patches) -> None:
    """A batch that may be stored goes to another partition when the route has left its own."""

    def decide(error: Any, **kwargs: Any) -> SendStep:
        return real(error, **(kwargs | {"doubtful": False}))  # type: ignore[no-any-return]

    real = patches.set(sender_module, "decide_send_step", decide)


def scan_begins_behind_the_last_row(patches: Patches) -> None:
    """Rows that wait again are not read again."""

    def read_waiting(connection: Any, tables: Any, closed: Any, **kwargs: Any) -> Any:
        read, more = real(connection, tables, closed, **kwargs)
        last = seen.get(id(connection.engine), 0)
        fresh = [row for row in read if row.id > last]
        if fresh:
            seen[id(connection.engine)] = fresh[-1].id
        return fresh, more

    seen: dict[int, int] = {}
    real = patches.set(round_module.rows, "read_waiting", read_waiting)


def rows_are_recorded_newest_first(patches: Patches) -> None:
    """The rows that are read together are put into batches from the last one on."""

    def assign(rows: Any, *args: Any, **limits: Any) -> Any:
        return real(list(rows)[::-1], *args, **limits)

    real = patches.set(round_module, "assign", assign)


BREAKS: tuple[Breaks, ...] = (
    batches_sent_before_they_are_recorded,
    left_partition_is_no_barrier,
    lease_token_is_not_checked,
    rows_deleted_before_the_ack,
    recorded_batches_wait_behind_new_ones,
    sealed_partition_gives_up,
    doubtful_batches_return,
    scan_begins_behind_the_last_row,
    rows_are_recorded_newest_first,
)
