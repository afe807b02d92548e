"""Access to the user's own database, on which `outbox/` and `sink/` are built."""
