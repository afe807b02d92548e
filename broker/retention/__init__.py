"""Decides which segments of the log may be removed, and removes them."""
