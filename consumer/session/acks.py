"""What the next ack request of a session says, and when it is due. Pure.

Invariant
    What a request reported is dropped only when the broker has stored it: offsets, failed tries,
    begun suspects. Each request names the oldest message that fails or hangs, if there is one.
"""

from __future__ import annotations

from itertools import islice

from ...protocol.frames import Ack
from ...protocol.message import Message
from ...protocol.offsets import Range
from .failing import FailingMessages
from .offsets import HandledOffsets
from .tenure import NEVER, HeldLease

TRIES_PER_ACK = 1_000


class PendingAcks:
    """The acks of one session."""

    __slots__ = (
        "awaited",
        "begun",
        "due_ms",
        "failing",
        "handled",
        "sent",
        "sent_ms",
        "tries",
    )

    def __init__(self) -> None:
        self.handled = HandledOffsets()
        self.due_ms = NEVER
        """When a request is due."""
        self.sent_ms = 0
        """When the last request was sent."""
        self.tries: dict[int, int] = {}
        """The failed tries by offset that are not stored."""
        self.begun: dict[int, int] = {}
        """The crash counts of suspects that begin, by offset, until they are stored."""
        self.failing = FailingMessages()
        self.sent: Ack | None = None
        """The request in flight."""
        self.awaited: dict[tuple[int, int], Message] = {}
        """Messages that wait for their ack: the key of a handled one (ack "each"), or the handler
        of one that was taken (ack "before").
        """

    @property
    def is_flushed(self) -> bool:
        """True if the broker has stored everything, or can store no more ranges."""
        if self.sent is not None or self.awaited:
            return False
        return self.handled.is_refused or not (self.handled or self.tries)

    def request(
        self, lease: HeldLease, now_ms: int, held: tuple[Range, ...], in_flight_ms: int
    ) -> Ack:
        """Return the next request, which is then in flight."""
        self.due_ms = NEVER
        self.sent_ms = now_ms
        tries = tuple(islice(self.tries.items(), TRIES_PER_ACK)) if self.tries else ()
        begun = tuple(self.begun.items()) if self.begun else ()
        ranges = self.handled.take()
        failing = None
        if self.failing:
            self.failing.forget_acked(ranges)
            failing = self.failing.oldest(self.handled)
        self.sent = Ack(*lease, ranges, tries, failing, begun, held, in_flight_ms if held else 0)
        return self.sent

    def confirm(self) -> tuple[Range, ...]:
        """Drop what the request in flight has reported, and return its ranges."""
        sent = self.sent
        assert sent is not None
        self.sent = None
        for offset, attempt in sent.failed:
            if self.tries.get(offset) == attempt:
                del self.tries[offset]
        for offset, _ in sent.begun:
            self.begun.pop(offset, None)
        return self.handled.confirm()

    def retract(self, *, is_refused: bool = False) -> bool:
        """Take back the request in flight; see `HandledOffsets.retract`."""
        self.sent = None
        return self.handled.retract(is_refused=is_refused)
