"""Answers of the data plane that need no task."""
