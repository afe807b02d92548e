"""The table of limits that subjects of a name or pattern share; see `access/quota_rows.py`,
`cluster/subject_room.py`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, String, Table

from .schema import metadata

name_limits = Table(
    "access_name_limits",
    metadata,
    Column("name", String(201), primary_key=True, comment="a subject or pattern"),
    Column("subjects", BigInteger, nullable=False, comment="0: no limit"),
    Column("scheduled_bytes", BigInteger, nullable=False, comment="0: no limit; each broker"),
)
