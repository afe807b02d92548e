"""A session in a test: steps with fewer words."""

from __future__ import annotations

import random
from typing import Any

from keylane.consumer.session.events import (
    LeaseGranted,
    MessageFailed,
    MessagesHandled,
    Pulled,
    Ready,
    WorkWanted,
)
from keylane.consumer.session.state import PartitionSession
from keylane.consumer.session.step import step
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.frames import Acked, Acquired
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure
from support.session.partition_model import PARTITION_ID, BatchModel

LEASE = (PARTITION_ID, "g", "s", 5)
LEASE_MS = 30_000
FAILURE = Failure("ValueError", "bad", "test", 1, 1)


class Steps:
    """One session, the time, and what the last step said."""

    def __init__(self, *keys: bytes, acquired: Acquired | None = None, **settings: Any) -> None:
        settings.setdefault("handler_backoff", Backoff(first_ms=100, max_ms=100))
        self.keys = list(keys)
        self.now_ms = 1_000
        self.session = PartitionSession(LEASE, ConsumerSettings(**settings), random.Random(1))
        self.ready: Ready
        lease_ms = max(LEASE_MS, self.session.settings.ttl_ms)
        self.step(LeaseGranted(self.now_ms + lease_ms))
        self.step(acquired or Acquired(0, (), len(keys), False))

    def step(self, event: Any, *, after_ms: int = 0) -> Ready:
        self.now_ms += after_ms
        self.ready = step(self.session, event, self.now_ms)
        return self.ready

    def pull(self, *sizes: int, sealed: bool = False) -> list[BatchModel]:
        """Batches of the given sizes arrive."""
        start = self.session.offsets.next_offset
        batches = []
        for size in sizes:
            batches.append(BatchModel(self.keys, start, start + size))
            start += size
        self.step(Pulled(batches, start, len(self.keys), sealed))
        return batches

    def want(self, count: int = 1, *, run: int = 0) -> list[int]:
        """A worker asks; returns the offsets that it gets."""
        return offsets_of(self.step(WorkWanted(count, 1, run)).hand_out)

    def handle(self, *offsets: int, wanted: int = 0) -> list[int]:
        in_hand = self.session.lanes.in_hand
        messages = [in_hand[PARTITION_ID, offset] for offset in offsets]
        return offsets_of(self.step(MessagesHandled(messages, wanted=wanted)).hand_out)

    def fail(self, offset: int, **given: Any) -> Ready:
        message = self.session.lanes.in_hand[PARTITION_ID, offset]
        return self.step(MessageFailed(message, FAILURE, **given))

    def requested(self, kind: type) -> list[Any]:
        """The requests of a kind that the last step made."""
        return [request for request in self.ready.requests if isinstance(request, kind)]

    def ack(self, cursor: int = 0) -> Ready:
        """The broker has stored the ack request in flight."""
        return self.step(Acked(cursor))


def offsets_of(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]
