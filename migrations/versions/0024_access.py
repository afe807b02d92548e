"""principals, their tokens and rights, and the keys that sign capabilities

Revision: 0024, after 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Bring the schema here."""
    op.create_table(
        "access_state",
        sa.Column(
            "one",
            sa.Integer(),
            autoincrement=False,
            nullable=False,
            comment="1: there is one row",
        ),
        sa.Column("cluster", sa.String(64), nullable=False, comment="random: capabilities name it"),
        sa.Column(
            "version",
            sa.BigInteger(),
            nullable=False,
            comment="rises with every change of access",
        ),
        sa.PrimaryKeyConstraint("one", name="pk_access_state"),
    )
    op.create_table(
        "access_principals",
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="of its last change"),
        sa.Column(
            "changed_at",
            sa.BigInteger(),
            nullable=False,
            comment="calendar of the metaserver, ms",
        ),
        sa.PrimaryKeyConstraint("principal", name="pk_access_principals"),
    )
    op.create_table(
        "access_tokens",
        sa.Column("token_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, comment="SHA-256; the token is not kept"),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("made_at", sa.BigInteger(), nullable=False),
        sa.Column("begins_at", sa.BigInteger(), nullable=False),
        sa.Column("ends_at", sa.BigInteger(), nullable=False, comment="0: never"),
        sa.Column(
            "revoked_at",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="0: it is not",
        ),
        sa.ForeignKeyConstraint(
            ["principal"],
            ["access_principals.principal"],
            name="fk_access_tokens_principal",
        ),
        sa.PrimaryKeyConstraint("token_id", name="pk_access_tokens"),
        sa.UniqueConstraint("hash", name="uq_access_tokens_hash"),
        comment="times are the calendar's, in milliseconds",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_access_tokens_principal", "access_tokens", ["principal"])
    op.create_table(
        "access_grants",
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("right", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(201), nullable=False, comment="a pattern"),
        sa.Column("group", sa.String(201), nullable=False, comment="a pattern"),
        sa.ForeignKeyConstraint(
            ["principal"],
            ["access_principals.principal"],
            name="fk_access_grants_principal",
        ),
        sa.PrimaryKeyConstraint("principal", "right", "subject", "group", name="pk_access_grants"),
    )
    op.create_table(
        "access_keys",
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("public", sa.String(128), nullable=False, comment="Ed25519, hexadecimal"),
        sa.Column(
            "ends_at",
            sa.BigInteger(),
            nullable=False,
            comment="nothing that it signed is valid later",
        ),
        sa.PrimaryKeyConstraint("key_id", name="pk_access_keys"),
    )


def downgrade() -> None:
    """Go back by one."""
    for table in ("keys", "grants", "tokens", "principals", "state"):
        op.drop_table(f"access_{table}")
