"""hidden subjects say what fills them, and publications which subject it was

Revision: 0029, after 0028
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "subjects",
        sa.Column(
            "filled_by",
            sa.String(200),
            nullable=False,
            server_default="",
            comment="while it is hidden",
        ),
    )
    op.add_column(
        "publications",
        sa.Column(
            "subject_id",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="0: not known",
        ),
    )


def downgrade() -> None:
    """Go back by one."""
    with op.batch_alter_table("publications") as batch:
        batch.drop_column("subject_id")
    with op.batch_alter_table("subjects") as batch:
        batch.drop_column("filled_by")
