"""Where a read begins and ends: instants, and the bounds of partitions. Pure."""
