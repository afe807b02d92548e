"""Resets the cursors of consumer groups on behalf of operators."""
