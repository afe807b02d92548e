"""what groups lost with a disk stays known; brokers are told groups also where retention is by time alone

Revision: 0035, after 0034
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_GIVEN_UP = """
INSERT INTO given_up (group_id, partition_id, messages_max)
SELECT g.group_id, p.partition_id, p.end_offset
FROM partitions p JOIN groups g ON g.subject_id = p.subject_id
WHERE p.lost AND NOT EXISTS (
    SELECT 1 FROM drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id
)
"""
"""A group that was made after a loss has a row as well: until now it was not stored which were there."""
_TELL = """
UPDATE groups SET told = :no, settled = :no, version = version + 1
WHERE subject_id IN (SELECT subject_id FROM subjects WHERE retention = 'time')
"""


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "given_up",
        sa.Column("group_id", BIG_ID, sa.ForeignKey("groups.group_id"), primary_key=True),
        sa.Column(
            "partition_id",
            BIG_ID,
            sa.ForeignKey("partitions.partition_id"),
            primary_key=True,
            index=True,
        ),
        sa.Column("messages_max", sa.BigInteger, comment="none: not known"),
        comment="what groups had not read of partitions whose loss an operator has accepted",
    )
    op.execute(sa.text(_GIVEN_UP))
    op.execute(sa.text(_TELL).bindparams(sa.bindparam("no", False, sa.Boolean)))


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("given_up")
