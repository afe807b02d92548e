"""Threads and event loops: a cheap worker thread, functions that run at the end of a callback, and
DNS lookups.
"""
