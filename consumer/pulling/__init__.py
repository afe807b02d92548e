"""Pulls, reads and acks the messages of a partition that a session owns."""
