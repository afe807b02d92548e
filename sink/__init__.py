"""Fenced effects: commits a handler's writes to the user's database exactly once per message, and
only for the partition's owner.
"""

from ..protocol.errors import MissingExtraError

try:
    from .admin import create_tables, forget
    from .session import Fenced, FencedSession, fenced, fenced_batch
except ModuleNotFoundError as error:
    raise MissingExtraError.of(error, "keylane.sink", "outbox") from error

__all__ = ["Fenced", "FencedSession", "create_tables", "fenced", "fenced_batch", "forget"]
