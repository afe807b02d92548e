"""Resets of a consumer group's cursors by an operator."""
