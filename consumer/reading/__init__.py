"""Reads a subject without a group: its bounds, its partitions and their order."""
