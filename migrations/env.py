"""Alembic's environment: it uses the connection that the metaserver passes in, and no other."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=attributes.get("metadata"),
    # one transaction, begun and ended by the caller; SQLite can do it as well
    transactional_ddl=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
