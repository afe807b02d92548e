"""Batches of brokers as Arrow columns, and readers of ranges of subjects; it needs pyarrow and numpy."""
