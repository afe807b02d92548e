"""Answers requests of the data plane, most of them without a task."""
