"""The outbox: stores messages in the user's own transactions, and sends them after the commit, in
order and exactly once.
"""

from ..protocol.errors import MissingExtraError

try:
    from .admin import create_tables, outbox_status, purge_failed, purge_waiting, redrive_failed
    from .client import Outbox
    from .settings import OutboxSettings
    from .upkeep import FailedRow, OutboxGauges, OutboxStatus, RefusedRow, RowChange, SubjectRows
except ModuleNotFoundError as error:
    raise MissingExtraError.of(error, "keylane.outbox", "outbox") from error

__all__ = [
    "FailedRow",
    "Outbox",
    "OutboxGauges",
    "OutboxSettings",
    "OutboxStatus",
    "RefusedRow",
    "RowChange",
    "SubjectRows",
    "create_tables",
    "outbox_status",
    "purge_failed",
    "purge_waiting",
    "redrive_failed",
]
