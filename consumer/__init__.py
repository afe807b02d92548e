"""Consuming: membership and leases, pull clients per partition, lanes per order key, acks,
hand-over.
"""

from .client import Assignment, Consumer, Lag
from .delivery.filter import Filter
from .handling.arrow_batch import ArrowBatch
from .handling.handlers import BatchHandler, Handler
from .handling.not_acked import NACK, Retry
from .pulling.progress import Position
from .reading.queue_reader import QueueProgress, QueueReader, QueueSlice
from .reading.reader import Reader
from .rebalance import PartitionsCallback
from .settings import AckMode, ConsumerSettings, FailurePolicy, FullPolicy

__all__ = [
    "NACK",
    "AckMode",
    "ArrowBatch",
    "Assignment",
    "BatchHandler",
    "Consumer",
    "ConsumerSettings",
    "FailurePolicy",
    "FullPolicy",
    "Filter",
    "Handler",
    "Lag",
    "PartitionsCallback",
    "Position",
    "QueueProgress",
    "QueueReader",
    "QueueSlice",
    "Reader",
    "Retry",
]
