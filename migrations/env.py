"""The Alembic environment, which uses only the connection passed in by the metaserver."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=attributes.get("metadata"),
    # Run in a single transaction, which the caller begins and ends; SQLite supports that too.
    transactional_ddl=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
