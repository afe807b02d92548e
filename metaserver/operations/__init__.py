"""Changes of a subject's partitions: planned, journaled, and driven to their end."""
