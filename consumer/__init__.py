"""Consuming: membership and leases, pull clients per partition, lanes per order key, acks, hand-over."""

from .client import Consumer
from .queue_reader import QueueProgress, QueueReader, QueueSlice
from .settings import ConsumerSettings

__all__ = ["Consumer", "ConsumerSettings", "QueueProgress", "QueueReader", "QueueSlice"]
