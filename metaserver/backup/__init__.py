"""Writes backups of the database while metaservers run, and restores them to an empty one."""
