"""Consumer groups: their sessions, and the leases that grant partitions to sessions."""
