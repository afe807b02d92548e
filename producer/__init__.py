"""Sending: one executor per message group, batches with idempotent sequences, STRICT and BEST_TRIED."""

from .client import Producer, ProducerStats
from .placing import LogicQueue
from .send_future import SendFuture
from .settings import ProducerSettings
from .waiting_keys import WaitingKey, WaitingMessages

__all__ = [
    "LogicQueue",
    "Producer",
    "ProducerSettings",
    "ProducerStats",
    "SendFuture",
    "WaitingKey",
    "WaitingMessages",
]
