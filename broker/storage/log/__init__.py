"""The commit log: segments, trails and recovery."""
