"""Spark writes subjects: each row once, in the order of its key, whatever is tried again."""
