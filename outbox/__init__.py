"""The outbox: messages written in the user's own transactions, sent after commit, in order, each once."""

from .client import Outbox as Outbox
from .client import create_tables as create_tables
from .settings import OutboxSettings as OutboxSettings
