"""limits of what the subjects of a pattern have together

Revision: 0031, after 0030
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "access_name_limits",
        sa.Column("name", sa.String(201), nullable=False, comment="a subject or pattern"),
        sa.Column("subjects", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column(
            "scheduled_bytes", sa.BigInteger(), nullable=False, comment="0: no limit; each broker"
        ),
        sa.PrimaryKeyConstraint("name", name="pk_access_name_limits"),
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("access_name_limits")
