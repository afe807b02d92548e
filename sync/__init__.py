"""Clients for programs without an event loop, as scripts and notebooks: `from keylane.sync import Consumer, Producer`."""

from .arrow_batch import TakenBatch
from .consumer import SyncConsumer, TakenMessage
from .producer import ScheduledMessage, SentMessage, SyncProducer

Consumer = SyncConsumer
Producer = SyncProducer

__all__ = ["Consumer", "Producer", "ScheduledMessage", "SentMessage", "TakenBatch", "TakenMessage"]
