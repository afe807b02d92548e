"""Follows messages from `send` to their outcome, for traces.

Messages that are sent in the same turn of the event loop, in the same context and to the same
subject share one trace, so that a loop of sends costs a span, and not one for each message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial

from ..protocol.errors import KeylaneError
from ..protocol.message import Receipt, pack_properties
from ..rpc.tracing import Properties, SendTrace, Tracing, add_fields
from .outgoing_batch import OutgoingBatch

SHARED_MAX = 1_000
"""The largest number of messages that share a trace."""


class TracedSend:
    """Messages that share a trace, and the batches that hold them."""

    __slots__ = ("count", "error", "is_recording", "last_indexes", "packed", "pending", "trace")

    def __init__(self, trace: SendTrace) -> None:
        self.trace = trace
        self.is_recording = trace.is_recording
        self.packed = pack_properties(trace.fields)
        """The packed properties of a message that has no others."""
        self.count = 0
        self.last_indexes: dict[OutgoingBatch, int] = {}
        """The index of the last of the messages in each batch. Those before it are settled with it,
        or were given up before.
        """
        self.pending = 0
        """The number of batches whose last message has no outcome."""
        self.error: KeylaneError | None = None

    def wait(self) -> None:
        """End the trace when all messages have an outcome; no others are added."""
        self.pending = len(self.last_indexes)
        for batch, index in self.last_indexes.items():
            self._wait_for(batch, index)

    def _wait_for(
        self, batch: OutgoingBatch, index: int, _done: asyncio.Future[None] | None = None
    ) -> None:
        if not batch.is_settled(index):
            # Done early if others of the batch are settled alone.
            future = batch.message_future(index)
            future.add_done_callback(partial(self._wait_for, batch, index))
            return
        outcome = batch.outcome_of(index)
        if isinstance(outcome, Receipt):
            self.trace.note_stored(outcome, self.count)
        else:
            self.error = outcome
        self.pending -= 1
        if not self.pending:
            self.trace.end(self.count, self.error)


class TracedSends:
    """What a producer sends in one turn of the event loop."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._shared: dict[tuple[str, int], TracedSend] = {}
        """What may be shared in this turn, by subject and context."""
        self._all: list[TracedSend] = []
        self._current: TracedSend | None = None
        """What the messages join that are being sent."""

    def begin(
        self,
        subject: str,
        packed: bytes,
        properties: Properties | None,
        tags: Collection[str],
        limit_bytes: int,
        count: int = 1,
    ) -> bytes:
        """Let `count` messages that are being sent join a trace. Return the packed properties of
        each with those of the trace; see `add_fields`.
        """
        tracing = self._tracing
        if properties is not None and tracing.has_context(properties):
            self._current = self._begin(subject, properties)
            return packed
        key = subject, tracing.context_id()
        traced = self._shared.get(key)
        if traced is None or traced.count + count > SHARED_MAX:
            traced = self._shared[key] = self._begin(subject, None)
        self._current = traced
        if not packed and len(traced.packed) <= limit_bytes:
            return traced.packed
        return add_fields(traced.trace.fields, packed, properties, tags, limit_bytes)

    def _begin(self, subject: str, properties: Properties | None) -> TracedSend:
        traced = TracedSend(self._tracing.begin_send(subject, properties))
        if traced.is_recording:
            self._all.append(traced)
        return traced

    def follow(self, batch: OutgoingBatch, index: int, count: int = 1) -> None:
        """Follow `count` messages that `begin` was called for to their outcome; `index` is that of
        the last one.
        """
        traced = self._current
        assert traced is not None
        traced.count += count
        if traced.is_recording:
            traced.last_indexes[batch] = index

    def end_turn(self) -> None:
        """Let later messages begin other traces."""
        self._shared.clear()
        if self._all:
            ended, self._all = self._all, []
            for traced in ended:
                traced.wait()
