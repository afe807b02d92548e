"""What others read of a pull client: its lease, and how far its partition is pulled and acked."""

from __future__ import annotations

from ...protocol.clock import Clock
from ..parking.key_parking import KeyParking
from ..settings import ConsumerSettings
from .careful import CarefulHandOut
from .fetch_offsets import FetchOffsets
from .lifetime import Lifetime
from .messages_in_flight import MessagesInFlight
from .progress import Position, PullProgress
from .pull_gate import PAUSED, PullGate


class PullViews:
    """The part of a pull client that is only read."""

    life: Lifetime
    gate: PullGate
    parking: KeyParking
    _careful: CarefulHandOut | None
    _clock: Clock
    _in_flight: MessagesInFlight
    _offsets: FetchOffsets
    _progress: PullProgress
    _settings: ConsumerSettings

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.life.fenced

    @property
    def lapsed(self) -> bool:
        """True once the right to the partition is lost for good: fenced, or past the end of the lease."""
        return self.life.lapsed(self._clock.boot_ms())

    @property
    def left_ms(self) -> int:
        """Milliseconds until the lease ends."""
        return self.life.left_ms(self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time at which the last heartbeat that renewed the lease was sent."""
        return self.life.lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    @property
    def cursor(self) -> int:
        """The offset below which the broker has an ack of every message."""
        return self._offsets.cursor

    @property
    def acked_to_end(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        return self._offsets.drained

    @property
    def drained(self) -> bool:
        """True when it is acked to the end, and no parked message is with handlers."""
        return self._offsets.drained and not self.parking.busy

    @property
    def has_parked(self) -> bool:
        """True if messages may be parked on the partition."""
        return self.parking.has_parked

    @property
    def is_careful(self) -> bool:
        """True while messages that may have ended the process of an earlier owner are handled one at a time."""
        return self._careful is not None and not self._careful.is_over

    @property
    def paused(self) -> bool:
        """True while the user has paused the partition."""
        return PAUSED in self.gate.reasons

    @property
    def position(self) -> Position:
        """How far the partition is pulled and acked."""
        offsets = self._offsets
        return self._progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())

    @property
    def next_offset(self) -> int:
        """The first offset that is not pulled."""
        return self._offsets.next_offset

    @property
    def missed(self) -> int:
        """As `FetchOffsets.missed`."""
        return self._offsets.missed

    @property
    def outstanding(self) -> int:
        """Messages handed out and not yet handled or forgotten."""
        return self._in_flight.count

    async def wait_handled(self) -> None:
        """Wait until every message handed out is handled or forgotten."""
        await self._in_flight.wait_until_empty()

    @property
    def sealed(self) -> bool:
        """True if the partition ends: those that continue it wait until the group has acked all of it."""
        return self._offsets.end_offset is not None

    @property
    def holds_fence(self) -> bool:
        """True while the broker has the fence, and the lease has not ended."""
        return self._offsets.begun and not self.lapsed
