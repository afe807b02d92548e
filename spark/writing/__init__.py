"""Writes from Spark to subjects: each row once, in the order of its key, in spite of retries."""
