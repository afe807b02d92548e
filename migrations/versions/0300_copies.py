"""Copies of broker groups that acks wait for.

Revision: 0300
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0300"
down_revision = "0200"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "copy_sets",
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.Column(
            "wanted",
            sa.Integer(),
            nullable=False,
            comment="number of data folders, with the broker's own",
        ),
        sa.Column(
            "members",
            sa.String(1024),
            nullable=False,
            comment="JSON: ids of the copies that acks wait for",
        ),
        sa.Column("term", sa.BigInteger(), nullable=False, comment="number of promotions"),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="number of changes"),
        sa.Column(
            "promoted",
            sa.String(64),
            nullable=False,
            comment="copy that was promoted last, until a broker serves again",
        ),
        sa.Column(
            "durable_end",
            sa.BigInteger(),
            nullable=False,
            comment="end of the durable log, in bytes",
        ),
        sa.PrimaryKeyConstraint("broker_group", name=op.f("pk_copy_sets")),
        comment="copies of broker groups",
    )


def downgrade() -> None:
    """Remove the table."""
    op.drop_table("copy_sets")
