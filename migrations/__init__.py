"""Alembic migrations of the metaserver's database. Nothing here imports the rest of the house."""
