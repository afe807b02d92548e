"""Access to the database of a user's program; `outbox/` and `sink/` are built on it."""
