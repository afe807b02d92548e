"""operations on partitions, journaled; where a sealed partition ends

Revision: 0002, after 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "partitions",
        sa.Column(
            "end_offset",
            sa.BigInteger(),
            nullable=True,
            comment="none: open, or its end is not known",
        ),
    )
    op.add_column(
        "partitions",
        sa.Column("forsaken", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("operation_id", _BIG, autoincrement=True, nullable=False),
        sa.Column("subject_id", _BIG, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("without_source", sa.Boolean(), nullable=False),
        sa.Column("problem", sa.String(length=1024), nullable=False, comment="why it waits"),
        sa.Column(
            "running",
            sa.BigInteger(),
            nullable=True,
            comment="its subject, until the route has changed",
        ),
        sa.Column(
            "driver", sa.String(length=64), nullable=True, comment="the metaserver that sees to it"
        ),
        sa.Column(
            "driven_until", sa.BigInteger(), nullable=False, comment="from then on another may"
        ),
        sa.ForeignKeyConstraint(
            ["subject_id"], ["subjects.subject_id"], name=op.f("fk_operations_subject_id")
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_operations")),
        sa.UniqueConstraint("running", name=op.f("uq_operations_running")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_operations_subject_id"), "operations", ["subject_id"], unique=False)
    op.create_index(op.f("ix_operations_state"), "operations", ["state"], unique=False)
    op.create_table(
        "steps",
        sa.Column("operation_id", _BIG, nullable=False),
        sa.Column("partition_id", _BIG, nullable=False),
        sa.Column("action", sa.String(length=8), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.operation_id"], name=op.f("fk_steps_operation_id")
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_steps_partition_id")
        ),
        sa.PrimaryKeyConstraint("operation_id", "partition_id", name=op.f("pk_steps")),
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("steps")
    op.drop_table("operations")
    op.drop_column("partitions", "forsaken")
    op.drop_column("partitions", "end_offset")
