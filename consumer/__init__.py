"""Consuming: membership and leases, pull clients per partition, lanes per order key, acks, hand-over."""

from .client import Assignment, Consumer
from .handling.handlers import Handler
from .handling.not_acked import NACK, Retry
from .pulling.queue_reader import QueueProgress, QueueReader, QueueSlice
from .reading.reader import Reader
from .settings import AckMode, ConsumerSettings

__all__ = [
    "NACK",
    "AckMode",
    "Assignment",
    "Consumer",
    "ConsumerSettings",
    "Handler",
    "QueueProgress",
    "QueueReader",
    "QueueSlice",
    "Reader",
    "Retry",
]
