"""Alembic migrations of the metaserver's database. They import no other module of the package."""
