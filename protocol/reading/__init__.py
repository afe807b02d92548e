"""Where a read starts and ends: instants, and bounds of partitions. Pure."""
