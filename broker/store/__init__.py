"""The store of a broker: makes decisions durable, reads messages, and restores the state at a
start.
"""
