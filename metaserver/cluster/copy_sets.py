"""Stores the copies of broker groups that acks wait for. Runs SQL synchronously.

Invariants
    Only the broker with the newest opening of the group's data folder changes the set, and only
    from the version that it knows. An operator may take a copy out of it: until the broker hears of
    that, its acks wait for one copy more.
    A copy that is not in the set, or has less than was durable, is promoted only if its operator
    gives up what it lacks. A promotion raises the term. The others of the set have what was acked
    too, and stay, unless something was given up. The broker before can ack nothing more if the copy
    was in its set, because it cannot take it out; otherwise once it hears of the term.
    A broker that lives is replaced only by the copy to which it hands over.
    In quarantine the set stays as it is until the broker says which copies count, and all of them
    follow it; or an operator speaks.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol.copies import (
    HAND_OVER_MS,
    ChangeCopySet,
    CopySet,
    ForgetCopy,
    OfferPlace,
    PromoteCopy,
    SetCopies,
)
from ...protocol.errors import (
    BusyError,
    ConflictError,
    FolderRefusedError,
    InvalidRequestError,
    NotFoundError,
    Reason,
)
from ..sql.dialect import insert_new, now_ms
from ..sql.quarantine import VERSIONS_AHEAD
from ..sql.schema import brokers, copy_sets, operations, partitions, steps, subjects
from .brokers import (
    TERMS_AHEAD,
    find_broker,
    lock_broker_query,
    unknown_broker_group_error,
    wait_for_broker_locks,
)
from .fall_backs import note_history


def read_copy_set(connection: Connection, broker_group: str) -> CopySet:
    """Return the copies of a broker group. Raises NotFoundError if it has never reported itself."""
    if find_broker(connection, broker_group) is None:
        raise unknown_broker_group_error(connection, broker_group)
    return _read(connection, broker_group)


def set_copies(connection: Connection, broker_group: str, request: SetCopies) -> CopySet:
    """
    Set how many data folders a broker group is to have, and where.

    Raises:
        NotFoundError
        InvalidRequestError: more of them are to have each message than there are to be.
    """
    least = request.least or (2 if request.wanted > 2 else 1)
    if least > request.wanted:
        raise InvalidRequestError(
            f"{least} data folders cannot have each message where {request.wanted} are wanted"
        )
    _lock_broker(connection, broker_group)
    stored = _read(connection, broker_group)
    may_share = request.may_share_machine
    changed = replace(
        stored,
        wanted=request.wanted,
        least=least,
        may_share_machine=stored.may_share_machine if may_share is None else may_share,
    )
    if request.end_quarantine and stored.quarantine:
        changed = replace(changed, members=(), promoted="", quarantine="")
    return stored if changed == stored else _store(connection, broker_group, changed)


def forget_copy(connection: Connection, broker_group: str, request: ForgetCopy) -> CopySet:
    """
    Take a copy that is gone for good out of the set. One that still follows joins again.

    Raises:
        NotFoundError: there is no such broker group, or acks do not wait for the copy.
        ConflictError: it is the last one of the set, or nothing would be acked without it.
    """
    _lock_broker(connection, broker_group)
    stored = _read(connection, broker_group)
    others = tuple(each for each in stored.members if each != request.copy_id)
    if others == stored.members:
        raise NotFoundError(
            Reason.COPY_UNKNOWN,
            f"acks of broker group {broker_group!r} wait for no copy {request.copy_id}",
            broker_group=broker_group,
        )
    if not others or 1 + len(others) < stored.least:
        problem = f"an ack needs {stored.least} data folders" if others else "it is the only one"
        raise ConflictError(
            Reason.COPY_NEEDED,
            f"acks of broker group {broker_group!r} need copy {request.copy_id}: {problem}",
            broker_group=broker_group,
        )
    return _store(connection, broker_group, replace(stored, members=others))


def change_copy_set(connection: Connection, broker_group: str, request: ChangeCopySet) -> CopySet:
    """
    Change the set, if its term and version are still those of the request.

    Raises:
        NotFoundError
        ConflictError: the broker's opening of the data folder is not the newest one.
    """
    stored = _read_of_opening(connection, broker_group, request)
    if (request.term, request.version) > (stored.term, stored.version):
        stored = _quarantine(connection, broker_group, stored, request)
    if stored.quarantine:
        return _end_quarantine(connection, broker_group, stored, request)
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


def _quarantine(
    connection: Connection, broker_group: str, stored: CopySet, request: ChangeCopySet
) -> CopySet:
    """Quarantine the copies of a group whose broker knows a newer set than the database."""
    known = request.known or stored
    quarantined = replace(
        stored,
        wanted=known.wanted,
        least=known.least,
        term=max(stored.term, request.term),
        version=max(stored.version, request.version) + VERSIONS_AHEAD,
        promoted="",
        handing_to="",
        quarantine=(
            f"the broker knows version {request.version} of the set in term {request.term}, and "
            f"the database has version {stored.version} in term {stored.term}"
        ),
    )
    return _store(connection, broker_group, quarantined)


def _end_quarantine(
    connection: Connection, broker_group: str, stored: CopySet, request: ChangeCopySet
) -> CopySet:
    """Take the set from the broker if all of its copies follow it; otherwise return the stored
    one.
    """
    is_current = (stored.term, stored.version) == (request.term, request.version)
    if not is_current or not request.is_followed or request.known is None:
        return stored
    return _store(
        connection,
        broker_group,
        replace(
            stored,
            members=request.known.members,
            promoted="",
            durable_end=request.durable_end,
            quarantine="",
        ),
    )


def offer_place(connection: Connection, broker_group: str, request: OfferPlace) -> CopySet:
    """
    Let a copy of the set take the place of a broker that lives, for HAND_OVER_MS, or withdraw that.

    Raises:
        NotFoundError
        ConflictError: the broker's opening of the data folder is not the newest one, acks do not
            wait for the copy, or the copies are in quarantine.
        BusyError: the broker hands over to another copy.
    """
    stored = _read_of_opening(connection, broker_group, request)
    if request.copy_id:
        _check_not_quarantined(stored, broker_group)
        if request.term != stored.term or request.copy_id not in stored.members:
            raise ConflictError(
                Reason.COPY_NOT_READY,
                f"acks of broker group {broker_group!r} do not wait for copy {request.copy_id}",
                broker_group=broker_group,
            )
        if stored.handing_to not in {"", request.copy_id}:
            raise BusyError(
                Reason.HAND_OVER_RUNNING,
                f"broker group {broker_group!r} is handed over to copy {stored.handing_to}",
                broker_group=broker_group,
            )
    return _store_offer(connection, broker_group, replace(stored, handing_to=request.copy_id))


def check_no_operation(connection: Connection, broker_group: str) -> None:
    """Raise BusyError if a resize, a move or another operation changes partitions of the broker
    group.
    """
    query = (
        sa.select(operations.c.operation_id, subjects.c.name)
        .join(steps, steps.c.operation_id == operations.c.operation_id)
        .join(partitions, partitions.c.partition_id == steps.c.partition_id)
        .join(subjects, subjects.c.subject_id == operations.c.subject_id)
        .where(operations.c.running.is_not(None), partitions.c.broker_group == broker_group)
        .order_by(operations.c.operation_id)
    )
    row = connection.execute(query).first()
    if row is not None:
        raise BusyError(Reason.OPERATION_RUNNING, subject=row.name, operation_id=row.operation_id)


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
        ConflictError: the group's broker reports itself; acks did not wait for the copy, it has
            less than was durable, or the copies are in quarantine.
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
    is_repeated = is_repeated and not stored.quarantine
    if is_repeated and (broker.opening == request.copy_id or not broker.alive):
        return stored
    is_offered = stored.handing_to == request.copy_id
    if broker.alive and not is_offered and (stored.promoted or broker.address != gone_from):
        where = f"was given to copy {stored.promoted}" if stored.promoted else "is served"
        raise ConflictError(
            Reason.BROKER_SERVES, f"broker group {broker_group} {where} at {broker.address}"
        )
    if not request.lose:
        _check_not_quarantined(stored, broker_group)
    promoted = replace(
        stored,
        term=stored.term + (TERMS_AHEAD if stored.quarantine else 1),
        members=(),
        promoted=request.copy_id,
        durable_end=request.log_end,
        handing_to="",
        quarantine="",
    )
    has_all = request.copy_id in stored.members and request.log_end >= stored.durable_end
    if has_all and not stored.quarantine:
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


def _check_not_quarantined(stored: CopySet, broker_group: str) -> None:
    """Raise ConflictError if the copies are in quarantine."""
    if stored.quarantine:
        raise ConflictError(
            Reason.COPIES_QUARANTINED,
            f"no copy takes the place of the broker of group {broker_group}: {stored.quarantine}",
            broker_group=broker_group,
        )


def _read_of_opening(
    connection: Connection, broker_group: str, request: ChangeCopySet | OfferPlace
) -> CopySet:
    """Lock the broker group, and return its copies if its newest opening asks. Raises NotFoundError
    and ConflictError.
    """
    broker = _lock_broker(connection, broker_group)
    if (broker.broker_id, broker.opening) != (request.broker_id, request.opening):
        raise ConflictError(
            Reason.COPY_SET_TAKEN,
            f"the data folder of broker group {broker_group!r} was opened elsewhere since",
            broker_group=broker_group,
        )
    return _read(connection, broker_group)


def _lock_broker(connection: Connection, broker_group: str) -> sa.Row[Any]:
    wait_for_broker_locks(connection, alone=True)
    row = connection.execute(
        lock_broker_query, {"of_group": broker_group, "for_ms": 0}
    ).one_or_none()
    if row is None:
        raise unknown_broker_group_error(connection, broker_group)
    note_history(connection)
    return row


def _read(connection: Connection, broker_group: str) -> CopySet:
    is_offered = (copy_sets.c.handing_until > now_ms()).label("is_offered")
    query = sa.select(copy_sets, is_offered).where(copy_sets.c.broker_group == broker_group)
    row = connection.execute(query).one_or_none()
    if row is None:
        return CopySet()
    return CopySet(
        wanted=row.wanted,
        least=row.least,
        members=msgspec.json.decode(row.members, type=tuple[str, ...]),
        term=row.term,
        version=row.version,
        promoted=row.promoted,
        durable_end=row.durable_end,
        handing_to=row.handing_to if row.is_offered else "",
        may_share_machine=row.may_share_machine,
        quarantine=row.quarantine,
    )


def _store_offer(connection: Connection, broker_group: str, stored: CopySet) -> CopySet:
    values = {"handing_to": stored.handing_to, "handing_until": now_ms() + HAND_OVER_MS}
    connection.execute(
        sa.update(copy_sets).where(copy_sets.c.broker_group == broker_group).values(values)
    )
    return stored


def _store(connection: Connection, broker_group: str, changed: CopySet) -> CopySet:
    stored = replace(changed, version=changed.version + 1)
    _write(connection, broker_group, stored)
    return stored


def _write(connection: Connection, broker_group: str, stored: CopySet) -> None:
    values = {
        "broker_group": broker_group,
        "wanted": stored.wanted,
        "least": stored.least,
        "members": msgspec.json.encode(stored.members).decode(),
        "term": stored.term,
        "version": stored.version,
        "promoted": stored.promoted,
        "durable_end": stored.durable_end,
        "handing_to": stored.handing_to,
        "may_share_machine": stored.may_share_machine,
        "quarantine": stored.quarantine,
    }
    insert_new(connection, copy_sets, values)
    connection.execute(
        sa.update(copy_sets).where(copy_sets.c.broker_group == broker_group).values(values)
    )
