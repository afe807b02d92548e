"""The store of a broker: makes decisions durable, reads messages, restores the state at a start."""
