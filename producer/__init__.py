"""The producer: one executor per message group, idempotent batches, and the order strategies STRICT
and BEST_TRIED.
"""

from .client import Producer
from .placing import LogicQueue
from .scheduled.sending import ScheduledFuture
from .send_budget import ProducerStats
from .send_future import SendFuture
from .settings import ProducerSettings
from .waiting_keys import WaitingKey, WaitingMessages

__all__ = [
    "LogicQueue",
    "Producer",
    "ProducerSettings",
    "ProducerStats",
    "ScheduledFuture",
    "SendFuture",
    "WaitingKey",
    "WaitingMessages",
]
