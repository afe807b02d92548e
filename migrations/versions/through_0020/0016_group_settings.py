"""a group has a stored failure policy, a start, and what an operator has suspended of it

Revision: 0016, after 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NULLABLE = (
    ("on_failure", sa.String(8), "none: what the code of each consumer says"),
    ("tries_max", sa.Integer(), "as on_failure"),
    ("backoff_first_ms", sa.Integer(), "as on_failure"),
    ("backoff_max_ms", sa.Integer(), "as on_failure"),
    ("start_ms", sa.BigInteger(), "since 1970, if it began at a time"),
)


def upgrade() -> None:
    """Bring the schema here."""
    for name, kind, comment in NULLABLE:
        op.add_column("groups", sa.Column(name, kind, comment=comment))
    op.add_column(
        "groups",
        sa.Column(
            "start_at",
            sa.String(8),
            nullable=False,
            server_default="earliest",
            comment="where it began on the partitions that existed then",
        ),
    )
    op.add_column(
        "groups",
        sa.Column(
            "suspended",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="an operator lets it have no grants",
        ),
    )
    op.create_table(
        "starts",
        sa.Column("group_id", BIG_ID, nullable=False),
        sa.Column("partition_id", BIG_ID, nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name="pk_starts"),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name="fk_starts_group_id"),
        sa.ForeignKeyConstraint(
            ["partition_id"],
            ["partitions.partition_id"],
            name="fk_starts_partition_id",
        ),
        comment="where new groups begin, until the broker has stored it",
    )
    op.create_table(
        "suspended_clients",
        sa.Column("group_id", BIG_ID, nullable=False),
        sa.Column("client", sa.String(512), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "client", name="pk_suspended_clients"),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name="fk_suspended_clients_group_id"
        ),
        comment="members that an operator lets have no grants, by name",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("suspended_clients")
    op.drop_table("starts")
    with op.batch_alter_table("groups") as batch:
        for name, *_ in NULLABLE:
            batch.drop_column(name)
        batch.drop_column("start_at")
        batch.drop_column("suspended")
