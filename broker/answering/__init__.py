"""Answers requests of the data plane without starting a task for each."""
