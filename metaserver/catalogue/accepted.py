"""A data folder that an operator accepts although it is an older copy.  SQL, synchronous.

Invariant
    The copy may lack consumer groups that its original was told of: from the transaction on it counts as told of none,
    so that it is told again before retention removes anything there.
    No token outlives the acceptance: the copy gives offsets away again that its consumers have handled, and what they
    still have to ack would then be acks of other messages.  Leases end here; the broker refuses their tokens, which it
    is told with the answer to its report, before it serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import AcceptFolder, PartitionStatus, RefusedBroker
from ...protocol.errors import InvalidRequestError
from ...protocol.ids import FencingToken, check_name
from ...protocol.operations import StepAction
from ...protocol.routing import PartitionState
from ...protocol.text import listed
from ..cluster.brokers import known_broker, refused_now, refused_view, unknown_group
from ..cluster.heard import forget_heard
from ..groups.locked_group import (
    lock_group,
    raise_versions,
    read_leases_of,
    read_members,
    set_group,
    store_leases,
)
from ..sql.schema import (
    accepted_folders,
    brokers,
    groups,
    leases,
    partitions,
    refused_brokers,
    steps,
)


def accept_folder(connection: Connection, broker_group: str, ask: AcceptFolder) -> RefusedBroker:
    """
    Go on with a copy of a broker group's data folder that is refused because it is behind, and journal that.

    The copy may lack consumer groups that its original was told: it counts as told of none.  Leases of its partitions
    end, and shared ones get another token.

    Raises:
        InvalidNameError
        BrokerGroupUnknownError: it never reported itself.
        InvalidRequestError: the group's own broker is alive, or not exactly one such copy reports itself.
    """
    check_name("broker group", broker_group)
    here = {"of_group": broker_group, "for_ms": 0}
    row = connection.execute(known_broker, here).one_or_none()
    if row is None:
        raise unknown_group(connection, broker_group)
    if row.alive:
        raise InvalidRequestError(
            f"broker group {broker_group!r} is alive at {row.address}: nothing of it is given up"
        )
    of_group = refused_now.where(
        refused_brokers.c.broker_group == broker_group,
        refused_brokers.c.broker_id == brokers.c.broker_id,
    )
    found = [one for one in connection.execute(of_group) if ask.address in {"", one.address}]
    if len(found) != 1:
        places = ", ".join(one.address for one in found) or "none"
        raise InvalidRequestError(
            f"of the refused copies of {broker_group!r}'s data folder exactly one can be accepted; "
            f"these report themselves: {places}",
            copies=len(found),
        )
    (copy,) = found
    if not ask.dry_run:
        group = brokers.c.broker_group == broker_group
        now = {"opening": copy.opening, "log_end": copy.log_end}
        connection.execute(sa.update(brokers).where(group).values(now))
        known = {"known_opening": row.opening, "known_log_end": row.log_end}
        forget_heard(connection, broker_group)
        fence = _end_leases(connection, broker_group)
        journal = {"broker_group": broker_group, **now, **known, "fence": fence}
        connection.execute(sa.insert(accepted_folders).values(journal))
    return refused_view(copy)


def check_complete(
    connection: Connection, broker_group: str, hosted: Iterable[PartitionStatus]
) -> None:
    """
    Let a copy through that has every partition of the group, each sealed one with its end.

    What is open in it and sealed in the database, or not in it at all, neither it nor anybody else could serve.

    Raises:
        InvalidRequestError: names what it lacks, and what can be done.
    """
    in_copy = {one.partition_id: one for one in hosted}
    hosts = sa.select(steps.c.partition_id).where(steps.c.action == StepAction.HOST, steps.c.done)
    wanted = (
        sa.select(partitions.c.partition_id, partitions.c.end_offset)
        .where(
            partitions.c.broker_group == broker_group,
            sa.or_(
                partitions.c.state.in_((PartitionState.OPEN, PartitionState.SEALED)),
                # Its broker has said that it hosts it, and is not asked again.
                sa.and_(
                    partitions.c.state == PartitionState.PLANNED,
                    partitions.c.partition_id.in_(hosts),
                ),
            ),
        )
        .order_by(partitions.c.partition_id)
    )
    lacking = []
    for partition_id, end_offset in connection.execute(wanted):
        status = in_copy.get(partition_id)
        if status is None:
            lacking.append(f"{partition_id} (not in the copy)")
        elif (
            end_offset is not None
        ):  # known before the state is SEALED, while others are being sealed
            ends = status.state is PartitionState.SEALED and status.next_offset == end_offset
            lacking += [] if ends else [f"{partition_id} (sealed since, at {end_offset})"]
    if lacking:
        raise InvalidRequestError(
            f"the copy of {broker_group!r}'s data folder is from before a change of partitions: it lacks "
            f"{listed(lacking)}; stop it, and give the disk up: keylane subject evacuate {broker_group} --accept-loss",
            partitions=len(lacking),
        )


def accepted_fence(connection: Connection, broker_group: str) -> int:
    """The highest token from before the group's data folder was accepted; 0 if none ever was."""
    highest = sa.select(sa.func.max(accepted_folders.c.fence)).where(
        accepted_folders.c.broker_group == broker_group
    )
    return connection.execute(highest).scalar_one() or 0


def _end_leases(connection: Connection, broker_group: str) -> FencingToken:
    """
    End what consumer groups hold of a broker group's partitions; they are settled anew.  The groups are locked.

    Returns:
        A token above all that were granted, of any consumer group that has partitions there; whatever is granted from
        now on, to any group, is above it.
    """
    there = sa.select(partitions.c.partition_id).where(partitions.c.broker_group == broker_group)
    subject_ids = sa.select(partitions.c.subject_id).where(
        partitions.c.broker_group == broker_group
    )
    concerned = (
        sa.select(groups.c.group_id)
        .where(groups.c.subject_id.in_(subject_ids))
        .order_by(groups.c.group_id)
    )
    locked = [lock_group(connection, one) for one in connection.execute(concerned).scalars().all()]
    fence = FencingToken(max((one.last_token for one in locked), default=0) + 1)
    for group in locked:
        mine = sa.and_(leases.c.group_id == group.group_id, leases.c.partition_id.in_(there))
        ids = connection.execute(sa.select(leases.c.partition_id).where(mine)).scalars().all()
        last_token = fence
        ended = []
        for lease in read_leases_of(connection, group.group_id, ids).values():
            if group.shared:
                last_token = FencingToken(last_token + 1)
                ended.append(replace(lease, token=last_token))
            else:
                free = replace(lease, token=fence, session=None, wanted=None, withdrawn=False)
                ended.append(free)
        store_leases(connection, group.group_id, ended)
        version = group.version + 1
        columns = {"version": version, "last_token": last_token, "settled": False}
        set_group(connection, group.group_id, **columns)
        raise_versions(connection, read_members(connection, group.group_id), version)
    # The broker refuses tokens up to it of every group, also of those that come to it later.
    below = sa.update(groups).where(groups.c.last_token < fence)
    connection.execute(below.values(last_token=fence))
    return fence
