"""Fenced effects: what a handler writes to the user's database, committed once for each message, by
its owner alone.
"""

from .admin import create_tables, forget
from .session import Fenced, FencedSession, fenced, fenced_batch

__all__ = ["Fenced", "FencedSession", "create_tables", "fenced", "fenced_batch", "forget"]
