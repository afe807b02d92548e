"""Finds out that a path to a server has been lost silently, and repeats calls on a new one."""
