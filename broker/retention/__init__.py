"""Which segments of the log may go, and how they are removed."""
