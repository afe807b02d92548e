"""The bounds of a read: instants, and first and end offsets of partitions. Pure."""
