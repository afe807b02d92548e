"""static subjects and what their messages wait for, how a group consumes, brokers that take nothing new

Revision: 0004, after 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "subjects",
        sa.Column(
            "static",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="it has logic queues",
        ),
    )
    op.add_column(
        "subjects",
        sa.Column("retention", sa.String(length=16), nullable=False, server_default="acked"),
    )
    op.add_column(
        "partitions",
        sa.Column(
            "logic_start",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="offset in its logic queue of its first message",
        ),
    )
    op.add_column(
        "groups",
        sa.Column("strategy", sa.String(length=16), nullable=False, server_default="exclusive"),
    )
    op.add_column(
        "brokers",
        sa.Column(
            "cordoned",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="was evacuated: gets no new partitions",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    for table, column in (
        ("brokers", "cordoned"),
        ("groups", "strategy"),
        ("partitions", "logic_start"),
        ("subjects", "retention"),
        ("subjects", "static"),
    ):
        with op.batch_alter_table(table) as batch:
            batch.drop_column(column)
