"""Runs one transaction of the sending process, which deletes settled batches and records waiting
rows. I/O: SQL.

    take or renew the lease ─▶ settle ─▶ read waiting rows ─▶ assign ─▶ record
                                                                └▶ no rows remain: release
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy.engine import Connection

from . import lease, rows
from .assignment import CapacityTable, SizeLimit, SubjectKey, assign, closed_ranges
from .batches import OutboxBatch
from .settings import OutboxSettings
from .tables import OutboxTables


@dataclass(slots=True, kw_only=True)
class SettledBatches:
    """Batches to remove from the batch table."""

    stored: list[OutboxBatch] = field(default_factory=list)
    returned: list[OutboxBatch] = field(default_factory=list)
    """Batches whose rows must wait again."""
    failed: dict[OutboxBatch, str] = field(default_factory=dict)
    """The failed batches, with the reasons."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.returned or self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInput:
    """The input of a round."""

    owner: str
    token: int | None
    """The lease's token; None if the round must take the lease."""
    settled: SettledBatches
    sending: bool
    """True if recorded batches are still being sent."""
    tables: Mapping[str, CapacityTable]
    halted_keys: set[SubjectKey]
    limits: Mapping[str, SizeLimit]


@dataclass(slots=True, kw_only=True)
class RoundOutcome:
    """The result of a round."""

    token: int | None
    """The lease's token; None if another process holds the lease, or if it was released because no
    rows remain.
    """
    recorded: list[OutboxBatch] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Subjects with waiting rows whose route is unknown."""
    halted_keys: set[SubjectKey] = field(default_factory=set)
    inherited: bool = False
    """True if the lease was just taken and `recorded` contains an earlier holder's batches."""
    refused: dict[int, str] = field(default_factory=dict)
    """The reasons for refused rows, by row id."""
    unconfirmed: set[str] = field(default_factory=set)
    """Subjects with a row over the size limit; the limit must be fetched again."""
    more: bool = False
    """True if more rows are waiting than were read, so that the next round is due immediately."""


def run_round(
    connection: Connection, tables: OutboxTables, settings: OutboxSettings, round_input: RoundInput
) -> RoundOutcome:
    """
    Run one round.

    Raises:
        TokenChangedError: this process must read the tables again.
    """
    token = round_input.token
    halted_keys = round_input.halted_keys
    if token is None:
        token = lease.acquire(
            connection, tables, owner=round_input.owner, lease_ms=settings.lease_ms
        )
        if token is None:
            return RoundOutcome(token=None)
        halted_keys = rows.read_failed_keys(connection, tables)
        recorded = rows.read_recorded(connection, tables)
        if recorded:
            return RoundOutcome(
                token=token, inherited=True, recorded=recorded, halted_keys=halted_keys
            )
    else:
        lease.renew(connection, tables, token=token, lease_ms=settings.lease_ms)
        _settle(connection, tables, round_input.settled)
        if round_input.settled.failed:
            halted_keys = rows.read_failed_keys(connection, tables)
    waiting, more = rows.read_waiting(
        connection,
        tables,
        closed_ranges(round_input.tables),
        rows_max=settings.read_rows,
        bytes_max=settings.read_bytes,
    )
    plan = assign(
        waiting,
        round_input.tables,
        halted_keys,
        limits=round_input.limits,
        batch_bytes=settings.batch_bytes,
        batch_count=settings.batch_count,
    )
    rows.record_batches(connection, tables, plan.batches)
    rows.halt_rows(connection, tables, plan.halted)
    rows.refuse_rows(connection, tables, plan.refused)
    if not (round_input.sending or waiting or rows.has_waiting_rows(connection, tables)):
        lease.release(connection, tables, owner=round_input.owner)
        token = None
    return RoundOutcome(
        token=token,
        recorded=plan.batches,
        unknown=plan.unknown,
        halted_keys=halted_keys,
        refused=plan.refused,
        unconfirmed=plan.unconfirmed,
        more=more and bool(plan.batches or plan.halted or plan.refused),
    )


def _settle(connection: Connection, tables: OutboxTables, settled: SettledBatches) -> None:
    """Delete the stored batches, requeue the returned ones, and mark the failed ones."""
    rows.delete_stored(connection, tables, settled.stored)
    rows.requeue_batches(connection, tables, settled.returned)
    rows.fail_batches(connection, tables, settled.failed)
