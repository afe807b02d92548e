"""quotas of principals and limits of subjects

Revision: 0025, after 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "access_quotas",
        sa.Column("kind", sa.String(16), nullable=False, comment="principal or subject"),
        sa.Column("name", sa.String(201), nullable=False, comment="of a subject a pattern"),
        sa.Column("bytes_per_s", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column("requests_per_s", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column("connections", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.PrimaryKeyConstraint("kind", "name", name="pk_access_quotas"),
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("access_quotas")
