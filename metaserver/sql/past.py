"""The tables of the history: deletions and publications. Their rows, and those of done operations,
are deleted after a time.

`ended_at` is an age of the history at which a row's end was noticed; the database counts that age
as a fact: see `retention/past_rows.py`. None: the end was not noticed yet, or is still to come.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, String, Table

from .schema import BigId, metadata

publications = Table(
    "publications",
    metadata,
    Column("hidden", String(200), primary_key=True),
    Column("target", String(200), nullable=False),
    Column("operation_id", BigInteger, nullable=False),
    Column("replaces", Boolean, nullable=False),
    Column("subject_id", BigInteger, nullable=False, server_default="0", comment="0: not known"),
    Column("ended_at", BigInteger, index=True),
    comment="hidden subjects that were published, so that a repeat changes nothing",
)

deletions = Table(
    "deletions",
    metadata,
    Column("subject_id", BigId, primary_key=True, autoincrement=False),
    Column(
        "group_id", BigId, primary_key=True, autoincrement=False, comment="0: the whole subject"
    ),
    Column("subject", String(200), nullable=False),
    Column("ended_at", BigInteger, index=True),
    Index(None, "subject", "group_id"),
    comment="deleted subjects and groups, whose clients must not use later ones of the name",
)
