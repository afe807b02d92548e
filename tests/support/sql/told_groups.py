"""Settling a consumer group whose brokers have heard of it, in tests of SQL without brokers."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from keylane.metaserver.cluster.announcements import store_announced
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.groups.lease_rows import Changes
from keylane.metaserver.sql.schema import groups, partitions


def hear(connection: Connection, group_id: int) -> None:
    """Every broker has the group on its disk."""
    subject = sa.select(groups.c.subject_id).where(groups.c.group_id == group_id)
    here = partitions.c.subject_id == subject.scalar_subquery()
    ids = connection.execute(sa.select(partitions.c.partition_id).where(here)).scalars()
    store_announced(connection, {partition_id: [group_id] for partition_id in ids})


def settle_group(connection: Connection, group_id: int) -> Changes:
    """As in `store_leases`, once all brokers have heard."""
    hear(connection, group_id)
    return lease_rows.settle_group(connection, group_id)
