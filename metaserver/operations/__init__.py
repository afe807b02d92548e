"""Changes of a subject's partitions: planned, journaled, driven to their end."""
