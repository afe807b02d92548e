"""The consumer: membership and leases, a session for each partition, and the dispatch of messages
to handlers and loops.
"""

from .client import Assignment, Consumer, Lag
from .dispatch.arrow import ArrowBatch
from .dispatch.handlers import NACK, BatchHandler, Handler, Retry
from .progress import Position
from .reading.queue_reader import QueueProgress, QueueReader, QueueSlice
from .reading.reader import Reader
from .settings import (
    AckMode,
    ConsumerSettings,
    FailurePolicy,
    Filter,
    FullPolicy,
    PartitionsCallback,
)

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
