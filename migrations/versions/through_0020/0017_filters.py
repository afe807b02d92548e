"""the filters of consumers, which members of one group share; resets of groups with live consumers; groups that expire

Revision: 0017, after 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "sessions",
        sa.Column(
            "filter",
            sa.String(length=512),
            nullable=False,
            server_default="",
            comment="what the consumer leaves out; the same for all sessions of a group",
        ),
    )
    op.add_column(
        "groups",
        sa.Column(
            "idle_since",
            sa.BigInteger(),
            comment="no session since; null: it has one, or is not looked at yet",
        ),
    )
    op.create_table(
        "live_resets",
        sa.Column("reset_id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("group_id", BIG_ID, nullable=False),
        sa.Column("ask", sa.Text(), nullable=False, comment="ResetGroup as JSON"),
        sa.Column(
            "begun",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="cursors may be set",
        ),
        sa.Column(
            "answer", sa.Text(), comment="GroupReset as JSON; null: the group is granted nothing"
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_live_resets_group_id")
        ),
        sa.PrimaryKeyConstraint("reset_id", name=op.f("pk_live_resets")),
        sa.UniqueConstraint("group_id", name=op.f("uq_live_resets_group_id")),
        sqlite_autoincrement=True,
        comment="resets of groups with live consumers",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("live_resets")
    with op.batch_alter_table("groups") as batch:
        batch.drop_column("idle_since")
    with op.batch_alter_table("sessions") as batch:
        batch.drop_column("filter")
