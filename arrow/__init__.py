"""Batches of brokers as Arrow columns, for clients that read by column; it needs pyarrow and numpy."""
