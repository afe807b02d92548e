"""The outbox: messages written in the user's own transactions, sent after commit, in order, each once."""

from .admin import create_tables as create_tables
from .admin import outbox_status as outbox_status
from .admin import purge_failed as purge_failed
from .admin import redrive_failed as redrive_failed
from .client import Outbox as Outbox
from .settings import OutboxSettings as OutboxSettings
from .upkeep import FailedRow as FailedRow
from .upkeep import OutboxStatus as OutboxStatus
from .upkeep import SubjectRows as SubjectRows
