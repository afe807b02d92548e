"""The commit log: segments, their trails, recovery."""
