"""In a shared group: until when a message may begin, and which ones are renewed. Pure.

    handed over by the broker for `in_flight_ms` ─▶ may begin within two thirds of it
        ─▶ in hand: renewed every sixth ─▶ handled, or failed: it waits here, and is not renewed
              ╰─ left by a loop without an ack: not renewed ─▶ after nine tenths a failed try

Invariants
    No handler begins with a message after two thirds of its time, because another consumer may soon
    have it. What a handler has is renewed, and is not handed out here a second time.
"""

from __future__ import annotations

from ...protocol.ids import MAX_I64
from .pull_size import PullSize

RENEWALS_PER_FLIGHT = 6
ALONE_FROM = 2
"""After this many ended processes the broker hands a message out alone."""
CRASHES_MAX = 3
"""After this many ended processes, of which the last had it alone, a message is set aside."""
EXPIRED_MAX = 100_000
"""The number of messages whose late acks count."""


class Flights:
    """The messages of one partition of a shared group that are in flight at this session."""

    __slots__ = (
        "_in_flight_ms",
        "begin_until_ms",
        "crashes",
        "expired",
        "is_shared",
        "left",
        "pull_size",
    )

    def __init__(self, in_flight_ms: int, *, is_shared: bool, by_hand: bool = False) -> None:
        self._in_flight_ms = in_flight_ms
        self.is_shared = is_shared
        self.begin_until_ms: dict[int, int] = {}
        """Until when a message that is in hand or waits for a retry may begin again, by offset."""
        self.crashes: dict[int, int] = {}
        """How many processes ended with a message in flight, by offset."""
        self.left: set[int] = set()
        """The offsets in hand whose program goes on without an ack."""
        self.expired: dict[int, None] = {}
        """The offsets that were not acked in time, of which a late ack still counts."""
        self.pull_size = PullSize(by_hand=by_hand)

    def begin_limit_ms(self, sent_ms: int) -> int:
        """Return until when messages of a pull that was sent at `sent_ms` may begin."""
        return sent_ms + self._in_flight_ms * 2 // 3 if self.is_shared else MAX_I64

    def expiry_ms(self, offset: int) -> int:
        """Return when a message that is not renewed counts as failed."""
        return self.begin_until_ms[offset] + self._in_flight_ms * 7 // 30  # 2/3 to 9/10

    def expire(self, offset: int) -> None:
        """Note that a message was not acked in time."""
        self.end(offset)
        self.expired[offset] = None
        if len(self.expired) > EXPIRED_MAX:
            del self.expired[next(iter(self.expired))]

    @property
    def renewal_ms(self) -> int:
        """The time between two renewals."""
        return self._in_flight_ms // RENEWALS_PER_FLIGHT

    def renew(self, offsets: list[int], sent_ms: int) -> None:
        """Restart the time in flight of messages that a request sent at `sent_ms` has renewed."""
        until_ms = self.begin_limit_ms(sent_ms)
        for offset in offsets:
            if offset in self.begin_until_ms:
                self.begin_until_ms[offset] = max(until_ms, self.begin_until_ms[offset])

    def end(self, offset: int) -> None:
        """Forget a message."""
        self.begin_until_ms.pop(offset, None)
        self.crashes.pop(offset, None)
        self.left.discard(offset)
