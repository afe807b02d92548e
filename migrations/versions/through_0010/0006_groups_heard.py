"""consumer groups that a partition's broker has on its disk, apart from what is granted

Revision: 0006, after 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here.  Of the leases so far only those without a grant say that the broker has heard."""
    op.create_table(
        "heard",
        sa.Column("group_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "partition_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_heard_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_heard")),
    )
    op.execute(
        "INSERT INTO heard (group_id, partition_id) "
        "SELECT group_id, partition_id FROM leases WHERE token = 0"
    )
    op.add_column(
        "groups",
        sa.Column(
            "told",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="every broker that has to has heard of it",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("groups") as batch:
        batch.drop_column("told")
    op.drop_table("heard")
