"""A data folder that an operator accepts although it is an older copy.  SQL, synchronous.

Invariant
    The copy may lack consumer groups that its original was told of: from the transaction on it counts as told of none,
    so that it is told again before retention removes anything there.
    No lease outlives the acceptance: the copy gives offsets away again that its consumers have handled, and what they
    still have to ack would then be acks of other messages.
"""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.control import AcceptFolder, RefusedBroker
from ..protocol.errors import InvalidRequestError
from ..protocol.ids import FencingToken, check_name
from .schema import accepted_folders, brokers, leases, partitions, refused_brokers
from .store_announce import forget_heard
from .store_brokers import known_broker, refused_now, refused_view, unknown_group
from .store_locked_group import (
    lock_group,
    raise_versions,
    read_members,
    set_group,
    some_leases,
    store_leases,
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
        journal = {"broker_group": broker_group, **now, **known}
        connection.execute(sa.insert(accepted_folders).values(journal))
        forget_heard(connection, broker_group)
        _end_leases(connection, broker_group)
    return refused_view(copy)


def _end_leases(connection: Connection, broker_group: str) -> None:
    """End what consumer groups hold of a broker group's partitions; they are settled anew.  The groups are locked."""
    held = (
        sa.select(leases.c.group_id, leases.c.partition_id)
        .join(partitions, partitions.c.partition_id == leases.c.partition_id)
        .where(
            partitions.c.broker_group == broker_group,
            sa.or_(leases.c.session.is_not(None), leases.c.wanted.is_not(None)),
        )
        .order_by(leases.c.group_id, leases.c.partition_id)
    )
    ids: dict[int, list[int]] = {}
    for group_id, partition_id in connection.execute(held):
        ids.setdefault(group_id, []).append(partition_id)
    for group_id, partition_ids in ids.items():
        group = lock_group(connection, group_id)
        last_token = group.last_token
        ended = []
        for lease in some_leases(connection, group_id, partition_ids).values():
            if group.shared:
                last_token = FencingToken(last_token + 1)
                ended.append(replace(lease, token=last_token))
            else:
                ended.append(replace(lease, session=None, wanted=None, withdrawn=False))
        store_leases(connection, group_id, ended)
        version = group.version + 1
        columns = {"version": version, "last_token": last_token, "settled": False}
        set_group(connection, group_id, **columns)
        raise_versions(connection, read_members(connection, group_id), version)
