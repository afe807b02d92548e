"""Bugs of deletions, growths, later deliveries, tables and first messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import sqlalchemy as sa

from keylane.broker import control as broker_control
from keylane.broker.partition.dropped import DroppedPartitions
from keylane.broker.scheduled.agenda import ScheduledAgenda
from keylane.broker.scheduled.records import Place, Taken, read_changes
from keylane.broker.scheduled.schedule_index import ScheduleIndex
from keylane.broker.scheduled.scheduler import Scheduler
from keylane.metaserver.catalogue import service as catalogue_service
from keylane.metaserver.groups import sessions as groups_sessions
from keylane.metaserver.operations import journal as operations_journal
from keylane.metaserver.operations import plan as operations_plan
from keylane.metaserver.removals import begin as removals_begin
from keylane.metaserver.sql.schema import partition_parents, partitions
from keylane.producer.tables import arrow as producer_arrow
from keylane.protocol.errors import Fate, KeylaneError, SubjectUnknownError
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.rpc.client import MetaClient
from sim.mutants.mutant import Breaks, Patches


# ── deletions ─────────────────────────────────────────────────────────────────────────────────────
def dropped_partitions_stay(patches: Patches) -> None:
    """A broker says that it has dropped a partition, and keeps it."""
    patches.set(
        broker_control,
        "drop_partition",
        lambda store, _partition_id, _ask, **_: store.commit.wait_flushed(),
    )


def forgotten_groups_are_remembered(patches: Patches) -> None:
    """A broker says that it has forgotten a group, and keeps its progress."""
    patches.set(
        broker_control,
        "forget_group",
        lambda store, _partition, ask: (ask.token, store.commit.wait_flushed()),
    )


def senders_follow_the_name(patches: Patches) -> None:
    """A producer asks for the route by the subject's name alone."""

    def route(self: Any, subject: str, **kwargs: Any) -> Any:
        return real(self, subject, **(kwargs | {"subject_id": 0}))

    real = patches.set(MetaClient, "route", route)


def later_groups_begin_with_the_first_token(patches: Patches) -> None:
    """A group's tokens begin anew under a name that was deleted."""

    def open_subject(connection: Any, name: str) -> Any:
        return replace(real(connection, name), tokens_above=0)

    real = patches.set(groups_sessions, "open_subject_row", open_subject)


def dropped_partitions_are_hosted_again(patches: Patches) -> None:
    """A broker forgets which partitions it has dropped, and a late call hosts one again."""
    patches.set(DroppedPartitions, "__contains__", lambda _self, _partition_id: False)


def names_are_free_before_brokers_dropped(patches: Patches) -> None:
    """A deletion ends without its brokers."""

    def plan(connection: Any, chosen: Any, *, group_id: int = 0, token: int = 0) -> None:
        if group_id:
            real(connection, chosen, group_id=group_id, token=token)

    real = patches.set(removals_begin, "plan_removals", plan)


# ── growths ───────────────────────────────────────────────────────────────────────────────────────
def first_half_begins_anew(patches: Patches) -> None:
    """A queue that is cut counts from 0 again."""
    patches.set(operations_journal, "set_logic_starts", lambda _connection, _children: None)


def second_half_counts_on(patches: Patches) -> None:
    """A new queue counts on where the queue stood that was cut."""

    def set_starts(connection: Any, children: Any) -> None:
        real(connection, children)
        parent, child = partitions.alias("parent"), partitions.alias("child")
        rows = connection.execute(
            sa.select(child.c.partition_id, parent.c.logic_start, parent.c.end_offset)
            .select_from(partition_parents)
            .join(parent, parent.c.partition_id == partition_parents.c.parent_id)
            .join(child, child.c.partition_id == partition_parents.c.partition_id)
            .where(partition_parents.c.partition_id.in_(children), child.c.queue != parent.c.queue)
        ).all()
        for row in rows:
            here = partitions.c.partition_id == row.partition_id
            start = row.logic_start + row.end_offset
            connection.execute(sa.update(partitions).where(here).values(logic_start=start))

    real = patches.set(operations_journal, "set_logic_starts", set_starts)


def halves_change_their_numbers(patches: Patches) -> None:
    """The second half of a queue keeps its number."""

    def cut(subject: str, ranges: dict[int, tuple[int, int]], queue: int) -> None:
        real(subject, ranges, queue)
        last = max(ranges)
        ranges[queue], ranges[last] = ranges[last], ranges[queue]

    real = patches.set(operations_plan, "_split_queue", cut)


# ── later deliveries ──────────────────────────────────────────────────────────────────────────────
def scheduled_told_before_durable(patches: Patches) -> None:
    """A message for later is accepted while it is being written."""

    def begin(self: Any, messages: Any) -> Any:
        pending = real(self, messages)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return pending._replace(done=done)

    real = patches.set(Scheduler, "_begin_writing", begin)


def cancel_told_before_durable(patches: Patches) -> None:
    """A cancel is answered while it is being written."""

    async def cancel(self: Any, scheduled_id: bytes) -> CancelOutcome:
        writing = asyncio.ensure_future(real(self, scheduled_id))
        await asyncio.sleep(0)
        return await writing if writing.done() else CancelOutcome.CANCELED

    real = patches.set(Scheduler, "cancel", cancel)


def deliveries_are_not_noted(patches: Patches) -> None:
    """A delivery begins before its key is durable; after a crash it has another one."""

    def submit(self: Any, changes: Any, **kwargs: Any) -> Any:
        if not any(isinstance(change, Taken) for change in changes):
            return real(self, changes, **kwargs)
        kwargs["on_durable"](changes, Place(self._store.log.end, 0))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    real = patches.set(Scheduler, "_submit", submit)


def unknown_deliveries_are_given_back(patches: Patches) -> None:
    """A delivery without an answer is taken for one that was refused, and made again under another
    key.
    """

    class Refusing:
        def __init__(self, target: Any) -> None:
            self.choose_logical_partition = target.choose_logical_partition
            self._target = target

        async def store(self, *args: Any, **kwargs: Any) -> None:
            try:
                await self._target.store(*args, **kwargs)
            except KeylaneError as error:
                raise error.copy(Fate.NOT_DONE) from error

    async def store(
        self: Any, delivery: Any, messages: Any, target: Any, *args: Any, **kwargs: Any
    ) -> None:
        await real(self, delivery, messages, Refusing(target), *args, **kwargs)

    real = patches.set(Scheduler, "_store_delivery", store)


def repeats_are_kept_again(patches: Patches) -> None:
    """A message for later that comes a second time, after its delivery, is a new one."""
    patches.set(ScheduleIndex, "knows", lambda self, scheduled_id: scheduled_id in self.entries)


def settled_messages_go_with_their_segment(patches: Patches) -> None:
    """What became of a message is not written again; after a start its repeat is a new one."""
    patches.set(ScheduleIndex, "settled_changes", lambda _self, _below: [])


def waiting_messages_go_with_their_segment(patches: Patches) -> None:
    """Retention removes the log up to a position where messages wait for their time, and writes
    none of them again.
    """

    async def rewrite(*_args: Any) -> None:
        pass

    patches.set(ScheduledAgenda, "_rewrite_messages", rewrite)


def messages_are_written_again_behind_their_end(patches: Patches) -> None:
    """A message that is being canceled or was just delivered is written again behind that."""

    async def rewrite(self: Any, position: int, log: Any, commit: Any, run_read: Any) -> None:
        queued = []
        for entry in list(self.index.entries.values()):
            if entry.place.position < position:
                changes = read_changes(await run_read(log.read, *entry.place), entry.place)
                queued += [
                    each
                    for each in changes
                    if getattr(each, "value", None) is not None
                    and each.scheduled_id == entry.scheduled_id
                ]
        if queued:
            await self._write(queued, commit)

    patches.set(ScheduledAgenda, "_rewrite_messages", rewrite)


def copies_are_taken_for_the_newest(patches: Patches) -> None:
    """A start reads the copy of the scheduled messages, and not the log behind it."""

    def on_record(self: Any, header: Any, body: Any) -> None:
        if not self._position:
            real(self, header, body)

    real = patches.set(ScheduledAgenda, "on_record", on_record)


def open_deliveries_go_with_their_segment(patches: Patches) -> None:
    """The record of a delivery without an answer is not written again: a start delivers its
    messages under another key.
    """
    patches.set(ScheduleIndex, "open_deliveries", lambda _self, _below: [])


def due_before_the_time(patches: Patches) -> None:
    """Messages are delivered up to a second early."""

    def take(self: Any, now_ms: int, boot_ms: int) -> Any:
        return real(self, now_ms + 1_000, boot_ms)

    real = patches.set(ScheduleIndex, "take_due", take)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────
def rows_of_a_partition_run_backwards(patches: Patches) -> None:
    """The rows of a block that go to one partition are sorted the wrong way round."""

    def order(self: Any, keys: Any, rows: int) -> Any:
        ordered, bounds = real(self, keys, rows)
        if ordered is None:
            return ordered, bounds
        parts = [ordered[start:end][::-1] for start, end in pairwise(bounds)]
        return np.concatenate(parts), bounds

    real = patches.set(producer_arrow._RowExecutors, "group_rows", order)


def rows_given_up_count_as_stored(patches: Patches) -> None:
    async def count(self: Any, future: Any, row: int) -> None:
        try:
            await real(self, future, row)
        finally:
            if self._given_up_rows.pop(row, None) is not None:
                self._stored += 1

    real = patches.set(producer_arrow.TableSender, "_count_outcome", count)


def held_rows_are_left_out(patches: Patches) -> None:
    """Rows whose partition is not open now count as sent."""

    async def send(self: Any, block: Any, rows: Any) -> None:
        self._stored += len(rows)

    patches.set(producer_arrow.TableSender, "_send_by_row", send)


# ── first messages ────────────────────────────────────────────────────────────────────────────────
def creation_opens_before_all_is_hosted(patches: Patches) -> None:
    """A subject is opened although a broker has not answered."""

    async def host_all(self: Any, row: Any, planned: Any, hosted_ids: Any) -> str:
        await real(self, row, planned, hosted_ids)
        return ""

    real = patches.set(catalogue_service.Catalogue, "_host_partitions", host_all)


def first_messages_do_not_wait_for_each_other(patches: Patches) -> None:
    """While one first message creates the subject, the others are refused."""

    async def complete(self: Any, row: Any) -> None:
        if row.subject_id in running:
            raise SubjectUnknownError(subject=row.name)
        running.add(row.subject_id)
        try:
            await real(self, row)
        finally:
            running.discard(row.subject_id)

    running: set[int] = set()
    real = patches.set(catalogue_service.Catalogue, "complete_creation", complete)


BREAKS: tuple[Breaks, ...] = (
    dropped_partitions_stay,
    forgotten_groups_are_remembered,
    senders_follow_the_name,
    later_groups_begin_with_the_first_token,
    dropped_partitions_are_hosted_again,
    names_are_free_before_brokers_dropped,
    first_half_begins_anew,
    second_half_counts_on,
    halves_change_their_numbers,
    scheduled_told_before_durable,
    cancel_told_before_durable,
    deliveries_are_not_noted,
    unknown_deliveries_are_given_back,
    repeats_are_kept_again,
    settled_messages_go_with_their_segment,
    waiting_messages_go_with_their_segment,
    messages_are_written_again_behind_their_end,
    copies_are_taken_for_the_newest,
    open_deliveries_go_with_their_segment,
    due_before_the_time,
    rows_of_a_partition_run_backwards,
    rows_given_up_count_as_stored,
    held_rows_are_left_out,
    creation_opens_before_all_is_hosted,
    first_messages_do_not_wait_for_each_other,
)
