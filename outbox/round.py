"""One transaction of the process that sends: it deletes settled batches and records waiting rows.
I/O: SQL.

    take or renew the lease ─▶ settle ─▶ read waiting rows ─▶ assign ─▶ record
                                                                └▶ no rows are left: release
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
    """Batches that leave the batch table."""

    stored: list[OutboxBatch] = field(default_factory=list)
    returned: list[OutboxBatch] = field(default_factory=list)
    """Batches whose rows wait again."""
    failed: dict[OutboxBatch, str] = field(default_factory=dict)
    """Batches that failed, each with the reason."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.returned or self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """The input of a round."""

    owner: str
    token: int | None
    """The token of the lease; None if the round has to take the lease."""
    settled: SettledBatches
    sending: bool
    """True if there are recorded batches that are not settled."""
    tables: Mapping[str, CapacityTable]
    halted_keys: set[SubjectKey]
    limits: Mapping[str, SizeLimit]


@dataclass(slots=True, kw_only=True)
class RoundOutcome:
    """The result of a round."""

    token: int | None
    """The token of the lease; None if another process has it, or if it was released because no
    rows are left.
    """
    recorded: list[OutboxBatch] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Subjects of waiting rows whose route is not known."""
    halted_keys: set[SubjectKey] = field(default_factory=set)
    inherited: bool = False
    """True if the lease was taken, and `recorded` are batches of an earlier holder."""
    refused: dict[int, str] = field(default_factory=dict)
    """Rows that are refused, by id, with the reason."""
    unconfirmed: set[str] = field(default_factory=set)
    """Subjects with a row over their limit, which has to be asked for again."""
    more: bool = False
    """True if more rows wait than were read, so that the next round is due at once."""


def run_round(
    connection: Connection, tables: OutboxTables, settings: OutboxSettings, order: RoundOrder
) -> RoundOutcome:
    """
    Do one round.

    Raises:
        TokenPassedError: this process must read the tables again.
    """
    token = order.token
    halted_keys = order.halted_keys
    if token is None:
        token = lease.take(connection, tables, owner=order.owner, lease_ms=settings.lease_ms)
        if token is None:
            return RoundOutcome(token=None)
        halted_keys = rows.failed_keys(connection, tables)
        inherited = rows.recorded(connection, tables)
        if inherited:
            return RoundOutcome(
                token=token, inherited=True, recorded=inherited, halted_keys=halted_keys
            )
    else:
        lease.renew(connection, tables, token=token, lease_ms=settings.lease_ms)
        _settle(connection, tables, order.settled)
        if order.settled.failed:
            halted_keys = rows.failed_keys(connection, tables)
    waiting, more = rows.waiting(
        connection,
        tables,
        closed_ranges(order.tables),
        rows_max=settings.read_rows,
        bytes_max=settings.read_bytes,
    )
    assigned = assign(
        waiting,
        order.tables,
        halted_keys,
        limits=order.limits,
        batch_bytes=settings.batch_bytes,
        batch_count=settings.batch_count,
    )
    rows.record(connection, tables, assigned.batches)
    rows.halt(connection, tables, assigned.halted)
    rows.refuse(connection, tables, assigned.refused)
    if not (order.sending or waiting or rows.any_waiting(connection, tables)):
        lease.release(connection, tables, owner=order.owner)
        token = None
    return RoundOutcome(
        token=token,
        recorded=assigned.batches,
        unknown=assigned.unknown,
        halted_keys=halted_keys,
        refused=assigned.refused,
        unconfirmed=assigned.unconfirmed,
        more=more and bool(assigned.batches or assigned.halted or assigned.refused),
    )


def _settle(connection: Connection, tables: OutboxTables, settled: SettledBatches) -> None:
    rows.remove(connection, tables, settled.stored)
    rows.unassign(connection, tables, settled.returned)
    rows.fail(connection, tables, settled.failed)
