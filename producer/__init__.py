"""Sending: one executor per message group, batches with idempotent sequences, STRICT and BEST_TRIED."""

from .client import Producer, ProducerStats
from .settings import ProducerSettings
from .ticket import Ticket

__all__ = ["Producer", "ProducerSettings", "ProducerStats", "Ticket"]
