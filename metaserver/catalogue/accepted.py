"""Accepts an older copy of a data folder on behalf of an operator. Runs SQL synchronously.

Invariants
    The copy may lack consumer groups. After this transaction, the metaserver assumes that the
    copy's broker knows no groups, and announces all of them before retention removes anything
    there.
    No earlier token remains valid, because the copy reassigns offsets that consumers have already
    handled, so a late ack would apply to a different message. Therefore the transaction ends the
    leases, and the reply to the broker's report contains a token; before it starts to serve, the
    broker refuses all tokens up to this one.
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
from ..cluster.announcements import forget_announced
from ..cluster.brokers import (
    forget_copies,
    last_report,
    lock_broker_query,
    refused_query,
    refused_view,
    unknown_broker_group_error,
    wait_for_broker_locks,
)
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


def accept_folder(
    connection: Connection, broker_group: str, request: AcceptFolder
) -> RefusedBroker:
    """
    Accept an older copy of a broker group's data folder that was refused, and record this in the
    journal.

    All consumer groups will be announced to the broker again. The leases of its partitions end;
    those of shared groups get a new token instead.

    Raises:
        NotFoundError: the broker group has never sent a report.
        InvalidRequestError: the name is invalid, the group's own broker is alive, or there is not
            exactly one such copy that sends reports.
    """
    check_name("broker group", broker_group)
    parameters = {"of_group": broker_group, "for_ms": 0}
    wait_for_broker_locks(connection, alone=True)
    broker_row = connection.execute(lock_broker_query, parameters).one_or_none()
    if broker_row is None:
        raise unknown_broker_group_error(connection, broker_group)
    if broker_row.alive:
        report = last_report(connection, broker_group)
        raise InvalidRequestError(
            f"broker group {broker_group!r} {report.age_text}, from {broker_row.address}, so no "
            f"copy is accepted. If that broker is dead, {report.advice}"
        )
    refused_copies = refused_query.where(
        refused_brokers.c.broker_group == broker_group,
        refused_brokers.c.broker_id == brokers.c.broker_id,
    )
    copies = [
        copy for copy in connection.execute(refused_copies) if request.address in {"", copy.address}
    ]
    if len(copies) != 1:
        addresses = ", ".join(copy.address for copy in copies) or "none"
        raise InvalidRequestError(
            f"exactly one refused copy of the data folder of {broker_group!r} can be accepted; "
            f"these report themselves: {addresses}",
            copies=len(copies),
        )
    (copy,) = copies
    if not request.dry_run:
        this_broker = brokers.c.broker_group == broker_group
        accepted_values = {"opening": copy.opening, "log_end": copy.log_end}
        connection.execute(sa.update(brokers).where(this_broker).values(accepted_values))
        previous_values = {"known_opening": broker_row.opening, "known_log_end": broker_row.log_end}
        forget_copies(connection, broker_group)
        forget_announced(connection, broker_group)
        fence = _end_leases(connection, broker_group)
        journal_row = {
            "broker_group": broker_group,
            **accepted_values,
            **previous_values,
            "fence": fence,
        }
        connection.execute(sa.insert(accepted_folders).values(journal_row))
    return refused_view(copy)


def accept_complete_folder(
    connection: Connection,
    broker_group: str,
    request: AcceptFolder,
    statuses: Iterable[PartitionStatus],
) -> RefusedBroker:
    """Call `accept_folder` and `check_folder_complete` in one transaction, because an operation may
    have advanced since the last check.
    """
    accepted_copy = accept_folder(connection, broker_group, request)
    check_folder_complete(connection, broker_group, statuses)
    return accepted_copy


def check_folder_complete(
    connection: Connection, broker_group: str, statuses: Iterable[PartitionStatus]
) -> None:
    """
    Check that a copy has every partition of its broker group, and the end of each sealed one.

    No broker could serve a partition that the copy lacks, or that is open in the copy and sealed in
    SQL.

    Raises:
        InvalidRequestError: the message lists the partitions that the copy lacks and explains how
            to continue.
    """
    copy_statuses = {status.partition_id: status for status in statuses}
    hosted_ids = sa.select(steps.c.partition_id).where(
        steps.c.action == StepAction.HOST, steps.c.done
    )
    required_query = (
        sa.select(partitions.c.partition_id, partitions.c.end_offset)
        .where(
            partitions.c.broker_group == broker_group,
            sa.or_(
                partitions.c.state.in_((PartitionState.OPEN, PartitionState.SEALED)),
                # The broker has confirmed that it hosts the partition, so it is not asked again.
                sa.and_(
                    partitions.c.state == PartitionState.PLANNED,
                    partitions.c.partition_id.in_(hosted_ids),
                ),
            ),
        )
        .order_by(partitions.c.partition_id)
    )
    missing_partitions = []
    for partition_id, end_offset in connection.execute(required_query):
        status = copy_statuses.get(partition_id)
        if status is None:
            missing_partitions.append(f"{partition_id} (not in the copy)")
        elif end_offset is not None:
            # The end is known before the state is SEALED, while other parents are being sealed.
            is_complete = status.state is PartitionState.SEALED and status.next_offset == end_offset
            missing_partitions += (
                [] if is_complete else [f"{partition_id} (sealed since, at {end_offset})"]
            )
    if missing_partitions:
        raise InvalidRequestError(
            f"the copy of the data folder of {broker_group!r} is older than a change of "
            f"partitions: it lacks "
            f"{listed(missing_partitions)}; stop it, and give the disk up: keylane broker evacuate "
            f"{broker_group} --accept-loss",
            partitions=len(missing_partitions),
        )


def read_accepted_fence(connection: Connection, broker_group: str) -> int:
    """Return the token up to which the broker must refuse all tokens because a copy of the group's
    data folder was accepted; 0 if none was accepted.
    """
    highest = sa.select(sa.func.max(accepted_folders.c.fence)).where(
        accepted_folders.c.broker_group == broker_group
    )
    return connection.execute(highest).scalar_one() or 0


def _end_leases(connection: Connection, broker_group: str) -> FencingToken:
    """
    End the leases of a broker group's partitions, lock their consumer groups, and mark them as
    unsettled.

    Returns:
        A token higher than all tokens granted to consumer groups with partitions there, and lower
        than all later grants of any group.
    """
    partition_ids = sa.select(partitions.c.partition_id).where(
        partitions.c.broker_group == broker_group
    )
    subject_ids = sa.select(partitions.c.subject_id).where(
        partitions.c.broker_group == broker_group
    )
    groups_query = (
        sa.select(groups.c.group_id)
        .where(groups.c.subject_id.in_(subject_ids))
        .order_by(groups.c.group_id)
    )
    group_ids = connection.execute(groups_query).scalars().all()
    locked_groups = [lock_group(connection, group_id) for group_id in group_ids]
    fence = FencingToken(max((group.last_token for group in locked_groups), default=0) + 1)
    for group in locked_groups:
        leased_query = sa.select(leases.c.partition_id).where(
            leases.c.group_id == group.group_id, leases.c.partition_id.in_(partition_ids)
        )
        leased_ids = connection.execute(leased_query).scalars().all()
        drained_query = sa.select(drained.c.partition_id).where(
            drained.c.group_id == group.group_id, drained.c.partition_id.in_(partition_ids)
        )
        drained_ids = set(connection.execute(drained_query).scalars())
        last_token = fence
        ended_leases = []
        for lease in read_leases_of(connection, group.group_id, leased_ids).values():
            if lease.partition_id in drained_ids:
                # A higher token would suggest that messages were parked there again, and children
                # would adopt all of them a second time.
                ended_leases.append(replace(lease, session=None, wanted=None, withdrawn=False))
            elif group.shared:
                last_token = FencingToken(last_token + 1)
                ended_leases.append(replace(lease, token=last_token))
            else:
                freed_lease = replace(
                    lease, token=fence, session=None, wanted=None, withdrawn=False
                )
                ended_leases.append(freed_lease)
        store_leases(connection, group.group_id, ended_leases)
        version = group.version + 1
        columns = {"version": version, "last_token": last_token, "settled": False}
        set_group(connection, group.group_id, **columns)
    raise_group_versions(connection, [group.group_id for group in locked_groups])
    # The broker refuses tokens up to the fence for all groups, including those that join later.
    has_lower_token = sa.update(groups).where(groups.c.last_token < fence)
    connection.execute(has_lower_token.values(last_token=fence))
    return fence
