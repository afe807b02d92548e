"""Answers requests of the data plane, most of them without creating a task."""
