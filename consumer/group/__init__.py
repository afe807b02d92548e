"""Partitions of a consumer: its membership of a group, and the shells of what it is granted."""
