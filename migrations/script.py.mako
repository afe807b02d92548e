"""${message}

Revision: ${up_revision}, after ${down_revision | comma,n}
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Go back by one."""
    ${downgrades if downgrades else "pass"}
