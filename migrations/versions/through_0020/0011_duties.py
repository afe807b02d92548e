"""leases of duties have a table with columns, instead of facts `duty:NAME` = `UNTIL HOLDER`

Revision: 0011, after 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

PREFIX = "duty:"
facts = sa.table("facts", sa.column("name", sa.String), sa.column("value", sa.String))


def upgrade() -> None:
    """Bring the schema here."""
    duties = op.create_table(
        "duties",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("held_until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_duties")),
        comment="named leases of metaservers, by the database's time",
    )
    stored = sa.select(facts).where(facts.c.name.startswith(PREFIX))
    for name, value in op.get_bind().execute(stored).all():
        until, _, holder = value.partition(" ")
        row = {"name": name.removeprefix(PREFIX), "holder": holder, "held_until": int(until)}
        op.bulk_insert(duties, [row])
    op.execute(sa.delete(facts).where(facts.c.name.startswith(PREFIX)))


def downgrade() -> None:
    """Go back by one."""
    duties = sa.table("duties", sa.column("name"), sa.column("holder"), sa.column("held_until"))
    for name, holder, until in op.get_bind().execute(sa.select(duties)).all():
        op.bulk_insert(facts, [{"name": PREFIX + name, "value": f"{until} {holder}"}])
    op.drop_table("duties")
