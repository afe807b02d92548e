"""Clients for programs without an event loop, as scripts and notebooks: `from keylane.sync import Producer`."""

from .producer import ScheduledMessage, SentMessage, SyncProducer

Producer = SyncProducer

__all__ = ["Producer", "ScheduledMessage", "SentMessage"]
