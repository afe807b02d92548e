"""Access to a user program's own database, on which `outbox/` and `sink/` are built."""
