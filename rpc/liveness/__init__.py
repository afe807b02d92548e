"""Detects silently lost connections, and repeats calls over new ones."""
