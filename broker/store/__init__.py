"""The broker's store: makes decisions durable, reads messages, and restores the state when the
broker starts.
"""
