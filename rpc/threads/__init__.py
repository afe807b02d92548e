"""Threads and event loops: a cheap worker thread, callbacks at the end of a callback, DNS
lookups.
"""
