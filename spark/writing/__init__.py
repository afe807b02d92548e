"""Writes from Spark to subjects: each row is stored once, in the order of its key, despite
retries.
"""
