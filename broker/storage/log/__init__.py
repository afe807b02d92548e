"""The commit log: segments, trails, recovery."""
