"""Backups of the database: written while metaservers run, restored to an empty one."""
