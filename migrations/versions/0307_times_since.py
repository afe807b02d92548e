"""Times since when what holds a group or a broker up has lasted.

Revision: 0307
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0307"
down_revision = "0306"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("brokers", "refusing_since", "calendar of the database, ms; none: it accepts writes"),
    ("groups", "suspended_since", "calendar of the database, ms; none: not known"),
    ("groups", "ended_heard_at", "last heartbeat of that consumer; null: not known"),
    ("suspended_clients", "since", "calendar of the database, ms; none: not known"),
    ("live_resets", "asked_at", "calendar of the database, ms; none: not known"),
)


def upgrade() -> None:
    """Add the columns."""
    op.add_column(
        "sessions",
        sa.Column(
            "unreached_since",
            sa.String(4_096),
            nullable=False,
            server_default="",
            comment="for each of these the calendar of the database, ms, separated by spaces",
        ),
    )
    for table, name, comment in _COLUMNS:
        op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=True, comment=comment))


def downgrade() -> None:
    """Remove the columns."""
    for table, name, _ in reversed(_COLUMNS):
        op.drop_column(table, name)
    op.drop_column("sessions", "unreached_since")
