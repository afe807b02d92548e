"""Stores the copies of broker groups that acks wait for. Runs SQL synchronously.

Invariants
    Only the broker with the newest opening of the group's data folder changes the set, and only
    from the version that it knows.
    A copy that is not in the set, or has less than was durable, is promoted only if its operator
    gives up what it lacks. A promotion raises the term. The others of the set have what was acked
    too, and stay, unless something was given up. The broker before can ack nothing more if the copy
    was in its set, because it cannot take it out; otherwise once it hears of the term.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol.copies import ChangeCopySet, CopySet, PromoteCopy, SetCopies
from ...protocol.errors import ConflictError, FolderRefusedError, Reason
from ..sql.dialect import insert_or_replace, now_ms
from ..sql.schema import brokers, copy_sets
from .brokers import (
    find_broker,
    lock_broker_query,
    unknown_broker_group_error,
    wait_for_broker_locks,
)


def read_copy_set(connection: Connection, broker_group: str) -> CopySet:
    """Return the copies of a broker group. Raises NotFoundError if it has never reported itself."""
    if find_broker(connection, broker_group) is None:
        raise unknown_broker_group_error(connection, broker_group)
    return _read(connection, broker_group)


def set_copies(connection: Connection, broker_group: str, request: SetCopies) -> CopySet:
    """Set how many data folders a broker group is to have, and where. Raises NotFoundError."""
    _lock_broker(connection, broker_group)
    stored = _read(connection, broker_group)
    may_share = request.may_share_machine
    changed = replace(
        stored,
        wanted=request.wanted,
        may_share_machine=stored.may_share_machine if may_share is None else may_share,
    )
    return stored if changed == stored else _store(connection, broker_group, changed)


def change_copy_set(connection: Connection, broker_group: str, request: ChangeCopySet) -> CopySet:
    """
    Change the set, if its term and version are still those of the request.

    Raises:
        NotFoundError
        ConflictError: the broker's opening of the data folder is not the newest one.
    """
    broker = _lock_broker(connection, broker_group)
    if (broker.broker_id, broker.opening) != (request.broker_id, request.opening):
        raise ConflictError(
            Reason.COPY_SET_TAKEN,
            f"the data folder of broker group {broker_group!r} was opened elsewhere since",
            broker_group=broker_group,
        )
    stored = _read(connection, broker_group)
    if request.durable_end > stored.durable_end and stored.version:
        stored = replace(stored, durable_end=request.durable_end)
        _write(connection, broker_group, stored)
    is_current = (stored.term, stored.version) == (request.term, request.version)
    if request.members is not None and is_current and stored.members != request.members:
        return _store(
            connection, broker_group, replace(stored, members=request.members, promoted="")
        )
    if stored.version and request.term == -1:
        # A proposal of an earlier process is void, and so is a promotion that was not followed: the
        # folder may take messages now that the promoted copy lacks.
        return _store(connection, broker_group, replace(stored, promoted=""))
    return stored


def promote_copy(
    connection: Connection,
    broker_group: str,
    request: PromoteCopy,
    *,
    gone_from: str = "",
    start_ms: int = 0,
) -> CopySet:
    """
    Let a copy take the place of the broker's data folder.

    Args:
        gone_from: an address at which no broker is, although it may have reported itself from there
            within its ttl.
        start_ms: how long the copy's broker has for its first report, before another copy may take
            its place.

    Raises:
        NotFoundError
        FolderRefusedError: it is a copy of another folder than the group's.
        ConflictError: the group's broker reports itself; acks did not wait for the copy, or it has
            less than was durable.
    """
    broker = _lock_broker(connection, broker_group)
    stored = _read(connection, broker_group)
    if broker.broker_id != request.broker_id:
        raise FolderRefusedError(
            Reason.COPY_OF_OTHER_FOLDER,
            f"broker group {broker_group!r} of this cluster has another data folder than the one "
            f"that copy {request.copy_id} is of",
            broker_group=broker_group,
        )
    is_repeated = stored.promoted == request.copy_id and request.log_end >= stored.durable_end
    if is_repeated and (broker.opening == request.copy_id or not broker.alive):
        return stored
    if broker.alive and (stored.promoted or broker.address != gone_from):
        where = f"was given to copy {stored.promoted}" if stored.promoted else "is served"
        raise ConflictError(
            Reason.BROKER_SERVES, f"broker group {broker_group} {where} at {broker.address}"
        )
    promoted = replace(
        stored,
        term=stored.term + 1,
        members=(),
        promoted=request.copy_id,
        durable_end=request.log_end,
    )
    if request.copy_id in stored.members and request.log_end >= stored.durable_end:
        others = tuple(each for each in stored.members if each != request.copy_id)
        promoted = replace(promoted, members=others)
        # From now on, reports of the folder before are refused as those of an older one. It may
        # have reported an end that was not durable.
        values: dict[str, Any] = {
            "opening": request.copy_id,
            "log_end": min(broker.log_end, request.log_end),
        }
        if start_ms:
            values["expires_at"] = now_ms() + start_ms
        connection.execute(
            sa.update(brokers).where(brokers.c.broker_group == broker_group).values(values)
        )
    elif not request.lose:
        problem = (
            f"has the log up to {request.log_end}, and it was durable up to {stored.durable_end}: "
            "it lacks acked messages"
            if request.copy_id in (*stored.members, stored.promoted)
            else f"is not one that acks of broker group {broker_group!r} wait for: it may lack "
            "acked messages"
        )
        raise ConflictError(
            Reason.COPY_LACKS_ACKED,
            f"the copy {request.copy_id} {problem}",
            broker_group=broker_group,
        )
    return _store(connection, broker_group, promoted)


def _lock_broker(connection: Connection, broker_group: str) -> sa.Row[Any]:
    wait_for_broker_locks(connection, alone=True)
    row = connection.execute(
        lock_broker_query, {"of_group": broker_group, "for_ms": 0}
    ).one_or_none()
    if row is None:
        raise unknown_broker_group_error(connection, broker_group)
    return row


def _read(connection: Connection, broker_group: str) -> CopySet:
    query = sa.select(copy_sets).where(copy_sets.c.broker_group == broker_group)
    row = connection.execute(query).one_or_none()
    if row is None:
        return CopySet()
    return CopySet(
        wanted=row.wanted,
        members=msgspec.json.decode(row.members, type=tuple[str, ...]),
        term=row.term,
        version=row.version,
        promoted=row.promoted,
        durable_end=row.durable_end,
        may_share_machine=row.may_share_machine,
    )


def _store(connection: Connection, broker_group: str, changed: CopySet) -> CopySet:
    stored = replace(changed, version=changed.version + 1)
    _write(connection, broker_group, stored)
    return stored


def _write(connection: Connection, broker_group: str, stored: CopySet) -> None:
    values = {
        "broker_group": broker_group,
        "wanted": stored.wanted,
        "members": msgspec.json.encode(stored.members).decode(),
        "term": stored.term,
        "version": stored.version,
        "promoted": stored.promoted,
        "durable_end": stored.durable_end,
        "may_share_machine": stored.may_share_machine,
    }
    insert_or_replace(connection, copy_sets, [values])
