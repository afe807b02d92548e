"""Reads a subject without a consumer group: its bounds, its partitions and their order."""
