"""how far a broker had come, losses that an operator accepts, creations that failed

Revision: 0007, after 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Bring the schema here."""
    op.add_column(
        "brokers", _text("opening", 512, "the newest of its data folder; empty: not known")
    )
    op.add_column(
        "brokers",
        _number("log_end", "position up to which its log was durable at its last report"),
    )
    op.add_column("brokers", _number("hosted", "partitions that it said it hosts"))
    op.add_column("refused_brokers", _text("opening", 512))
    op.add_column("refused_brokers", _number("log_end"))
    op.add_column("refused_brokers", _text("problem", 1024))
    op.add_column("subjects", _text("problem", 1024, "why its creation has failed"))
    op.add_column("partitions", _flag("lost", "expired because the loss of its disk was accepted"))
    op.add_column("operations", _flag("accept_loss", "what a silent broker has is given up"))
    op.create_table(
        "accepted_folders",
        sa.Column("accepted_id", BigId, autoincrement=True, nullable=False),
        sa.Column("broker_group", sa.String(length=200), nullable=False),
        sa.Column("opening", sa.String(length=512), nullable=False),
        sa.Column("log_end", sa.BigInteger(), nullable=False),
        sa.Column("known_opening", sa.String(length=512), nullable=False),
        sa.Column("known_log_end", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("accepted_id", name=op.f("pk_accepted_folders")),
        comment="data folders that were behind, and that an operator went on with",
    )
    op.create_table(
        "lost_folders",
        sa.Column("broker_id", sa.String(length=512), nullable=False),
        sa.Column("broker_group", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("broker_id", name=op.f("pk_lost_folders")),
        comment="data folders whose loss an operator has accepted: they are refused",
    )


def downgrade() -> None:
    """Go back by one."""
    op.drop_table("lost_folders")
    op.drop_table("accepted_folders")
    for table, columns in (
        ("operations", ("accept_loss",)),
        ("partitions", ("lost",)),
        ("subjects", ("problem",)),
        ("refused_brokers", ("problem", "log_end", "opening")),
        ("brokers", ("hosted", "log_end", "opening")),
    ):
        with op.batch_alter_table(table) as batch:
            for column in columns:
                batch.drop_column(column)


def _text(name: str, length: int, comment: str | None = None) -> sa.Column[str]:
    return sa.Column(
        name, sa.String(length=length), nullable=False, server_default="", comment=comment
    )


def _number(name: str, comment: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default="0", comment=comment)


def _flag(name: str, comment: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false(), comment=comment)
