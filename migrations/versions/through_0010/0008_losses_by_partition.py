"""what an operation gives up is known by partition

Revision: 0008, after 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

operations = sa.table(
    "operations", sa.column("operation_id"), sa.column("accept_loss", sa.Boolean())
)
steps = sa.table(
    "steps", sa.column("operation_id"), sa.column("action"), sa.column("given_up", sa.Boolean())
)


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column("steps", _flag("given_up", "the loss of its disk is accepted"))
    accepted = sa.select(operations.c.operation_id).where(operations.c.accept_loss)
    seals = sa.and_(steps.c.action == "seal", steps.c.operation_id.in_(accepted))
    op.execute(sa.update(steps).where(seals).values(given_up=True))
    # Not in a batch, which would make the table anew, and forget that its ids are never given twice.
    op.drop_column("operations", "accept_loss")


def downgrade() -> None:
    """Go back by one."""
    op.add_column("operations", _flag("accept_loss", "what a silent broker has is given up"))
    given_up = sa.select(steps.c.operation_id).where(steps.c.given_up)
    op.execute(
        sa.update(operations)
        .where(operations.c.operation_id.in_(given_up))
        .values(accept_loss=True)
    )
    with op.batch_alter_table("steps") as batch:
        batch.drop_column("given_up")


def _flag(name: str, comment: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false(), comment=comment)
