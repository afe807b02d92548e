"""Consuming: membership and leases, pull clients per partition, lanes per order key, acks, hand-over."""

from .client import Assignment, Consumer
from .handling.handlers import Handler
from .pulling.queue_reader import QueueProgress, QueueReader, QueueSlice
from .settings import ConsumerSettings

__all__ = [
    "Assignment",
    "Consumer",
    "ConsumerSettings",
    "Handler",
    "QueueProgress",
    "QueueReader",
    "QueueSlice",
]
