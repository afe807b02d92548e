"""The store of a broker: decisions made durable, read back, and restored at a start."""
