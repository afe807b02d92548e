"""subjects and consumer groups are deleted in two steps

Revision: 0012, after 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _deleting(comment: str) -> sa.Column[bool]:
    return sa.Column(
        "deleting", sa.Boolean(), nullable=False, server_default=sa.false(), comment=comment
    )


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column("subjects", _deleting("brokers drop its partitions, then its rows go"))
    op.add_column(
        "subjects",
        sa.Column(
            "tokens_above",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="every token of its deleted groups is at most this",
        ),
    )
    op.add_column("groups", _deleting("brokers forget it, then its rows go"))
    op.create_table(
        "removals",
        sa.Column("partition_id", BIG_ID, nullable=False),
        sa.Column(
            "group_id",
            BIG_ID,
            nullable=False,
            comment="what its broker has to forget; 0: the whole partition",
        ),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="the highest one of the group"),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_removals_partition_id")
        ),
        sa.PrimaryKeyConstraint("partition_id", "group_id", name=op.f("pk_removals")),
    )
    op.create_table(
        "deletions",
        sa.Column("subject_id", BIG_ID, nullable=False),
        sa.Column("group_id", BIG_ID, nullable=False, comment="0: the whole subject"),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("subject_id", "group_id", name=op.f("pk_deletions")),
        comment="subjects and groups that are gone: their clients must not go on with namesakes",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("deletions")
    op.drop_table("removals")
    with op.batch_alter_table("groups") as batch:
        batch.drop_column("deleting")
    with op.batch_alter_table("subjects") as batch:
        batch.drop_column("tokens_above")
        batch.drop_column("deleting")
