"""The database of a user's program, as `outbox/` and `sink/` use it."""
