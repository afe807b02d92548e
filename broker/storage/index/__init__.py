"""The index of the log by partition: an interface and two implementations of it."""
