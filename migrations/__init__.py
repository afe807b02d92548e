"""Alembic migrations of the metaserver's database. They import nothing else from keylane."""
