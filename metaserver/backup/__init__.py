"""Backs up the database while metaservers use it, and restores a backup into an empty database."""
