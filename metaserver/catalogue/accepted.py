"""Accepts a data folder on behalf of an operator although it is an older copy. SQL, synchronous.

Invariants
    The copy may lack consumer groups. From this transaction on, the metaserver assumes that its
    broker knows none, and announces all of them to it before retention removes anything there.
    No earlier token stays valid: the copy assigns again offsets that consumers have handled, and a
    late ack would be one of another message. The leases end here. The answer to the broker's report
    has the highest of their tokens, which the broker refuses before it serves.
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
from ..cluster.brokers import (
    known_broker,
    last_report,
    refused_now,
    refused_view,
    unknown_group,
    wait_turn,
)
from ..cluster.heard import forget_heard
from ..groups.locked_group import (
    lock_group,
    raise_group_versions,
    read_leases_of,
    set_group,
    store_leases,
)
from ..sql.schema import (
    accepted_folders,
    brokers,
    drained,
    groups,
    leases,
    partitions,
    refused_brokers,
    steps,
)


def accept_folder(connection: Connection, broker_group: str, ask: AcceptFolder) -> RefusedBroker:
    """
    Accept a refused older copy of a broker group's data folder, and store that it was accepted.

    Every consumer group will be announced to the broker again. Leases of its partitions end; those
    of shared groups get another token.

    Raises:
        InvalidRequestError
        NotFoundError: it has never reported itself.
        InvalidRequestError: the group's own broker is alive, or the number of such copies that
            report themselves is not one.
    """
    check_name("broker group", broker_group)
    here = {"of_group": broker_group, "for_ms": 0}
    wait_turn(connection, alone=True)
    row = connection.execute(known_broker, here).one_or_none()
    if row is None:
        raise unknown_group(connection, broker_group)
    if row.alive:
        report = last_report(connection, broker_group)
        raise InvalidRequestError(
            f"broker group {broker_group!r} {report.age}, from {row.address}: nothing of it "
            f"is given up. If that broker is dead, {report.ask_again}"
        )
    of_group = refused_now.where(
        refused_brokers.c.broker_group == broker_group,
        refused_brokers.c.broker_id == brokers.c.broker_id,
    )
    copies = [copy for copy in connection.execute(of_group) if ask.address in {"", copy.address}]
    if len(copies) != 1:
        addresses = ", ".join(copy.address for copy in copies) or "none"
        raise InvalidRequestError(
            f"exactly one refused copy of the data folder of {broker_group!r} can be accepted; "
            f"these report themselves: {addresses}",
            copies=len(copies),
        )
    (copy,) = copies
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


def accept_complete(
    connection: Connection, broker_group: str, ask: AcceptFolder, hosted: Iterable[PartitionStatus]
) -> RefusedBroker:
    """Call `accept_folder` and `check_complete` in one transaction: a driver may have finished
    another step since the last check.
    """
    accepted = accept_folder(connection, broker_group, ask)
    check_complete(connection, broker_group, hosted)
    return accepted


def check_complete(
    connection: Connection, broker_group: str, hosted: Iterable[PartitionStatus]
) -> None:
    """
    Check that a copy has every partition of the group, and the end of each sealed one.

    No broker could serve a partition that the copy lacks, or that is open in the copy and sealed in
    SQL.

    Raises:
        InvalidRequestError: the text has the partitions that the copy lacks, and a way out.
    """
    in_copy = {status.partition_id: status for status in hosted}
    hosts = sa.select(steps.c.partition_id).where(steps.c.action == StepAction.HOST, steps.c.done)
    wanted = (
        sa.select(partitions.c.partition_id, partitions.c.end_offset)
        .where(
            partitions.c.broker_group == broker_group,
            sa.or_(
                partitions.c.state.in_((PartitionState.OPEN, PartitionState.SEALED)),
                # Its broker has answered that it hosts it, and is not asked again.
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
        ):  # the end is known before the state is SEALED, while other parents are being sealed
            ends = status.state is PartitionState.SEALED and status.next_offset == end_offset
            lacking += [] if ends else [f"{partition_id} (sealed since, at {end_offset})"]
    if lacking:
        raise InvalidRequestError(
            f"the copy of the data folder of {broker_group!r} is older than a change of "
            f"partitions: it lacks "
            f"{listed(lacking)}; stop it, and give the disk up: keylane broker evacuate "
            f"{broker_group} --accept-loss",
            partitions=len(lacking),
        )


def accepted_fence(connection: Connection, broker_group: str) -> int:
    """Return the highest token that was granted before the group's data folder was accepted; 0 if
    no folder was accepted.
    """
    highest = sa.select(sa.func.max(accepted_folders.c.fence)).where(
        accepted_folders.c.broker_group == broker_group
    )
    return connection.execute(highest).scalar_one() or 0


def _end_leases(connection: Connection, broker_group: str) -> FencingToken:
    """
    End the leases of a broker group's partitions, and lock their consumer groups and mark them
    unsettled.

    Returns:
        A token above every one that was granted to a consumer group with partitions there. All
        later grants of all groups are above it.
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
    group_ids = connection.execute(concerned).scalars().all()
    locked = [lock_group(connection, group_id) for group_id in group_ids]
    fence = FencingToken(max((group.last_token for group in locked), default=0) + 1)
    for group in locked:
        mine = sa.and_(leases.c.group_id == group.group_id, leases.c.partition_id.in_(there))
        ids = connection.execute(sa.select(leases.c.partition_id).where(mine)).scalars().all()
        through = sa.and_(drained.c.group_id == group.group_id, drained.c.partition_id.in_(there))
        done = set(connection.execute(sa.select(drained.c.partition_id).where(through)).scalars())
        last_token = fence
        ended = []
        for lease in read_leases_of(connection, group.group_id, ids).values():
            if lease.partition_id in done:
                # A higher token would say that messages were parked there anew, and children would
                # take over all again.
                ended.append(replace(lease, session=None, wanted=None, withdrawn=False))
            elif group.shared:
                last_token = FencingToken(last_token + 1)
                ended.append(replace(lease, token=last_token))
            else:
                free = replace(lease, token=fence, session=None, wanted=None, withdrawn=False)
                ended.append(free)
        store_leases(connection, group.group_id, ended)
        version = group.version + 1
        columns = {"version": version, "last_token": last_token, "settled": False}
        set_group(connection, group.group_id, **columns)
    raise_group_versions(connection, [group.group_id for group in locked])
    # The broker refuses tokens up to the fence of every group, also of groups that join later.
    below = sa.update(groups).where(groups.c.last_token < fence)
    connection.execute(below.values(last_token=fence))
    return fence
