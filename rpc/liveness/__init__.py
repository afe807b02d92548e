"""Detects connections that were lost silently, and repeats calls over new ones."""
