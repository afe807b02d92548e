"""Alembic's environment, which uses only the connection that the metaserver passes in."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=attributes.get("metadata"),
    # One transaction, begun and ended by the caller; SQLite supports that too.
    transactional_ddl=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
