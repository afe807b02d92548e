"""Limits the bytes that a consumer has pulled ahead, for all its partitions together.

    take ─▶ pull under way ─▶ put: batches that nothing has opened ─▶ opened ─▶ the next in turn

Otherwise many partitions would each have a pull ahead: their bytes would be read into new memory
each time, and leave the processor's cache before they are opened.

Invariants
    A partition that is at its end waits for nothing: room is for bytes that a broker has ready.
    Partitions get room in the order in which they asked. Room that is held without progress, for
    example by a paused partition or a broker that does not answer, delays others for less than
    twice `STALL_S`, however much moves in other partitions meanwhile.
"""

from __future__ import annotations

import asyncio

ROOM_BYTES = 4 << 20
STALL_S = 0.5
"""Seconds between two checks: bytes that a partition had at one check no longer count after the
next, if it has freed none of them.
"""
MESSAGE_BYTES = 1 << 10
"""The assumed size of a message, in bytes, until a pull has shown it."""


class PullRoom:
    """
    The room of a consumer.

    Args:
        bytes_max: the bytes of its partitions together; a pull may have more if there is no other.
    """

    def __init__(self, bytes_max: int = ROOM_BYTES, *, stall_s: float = STALL_S) -> None:
        self._bytes_max = bytes_max
        self._stall_s = stall_s
        self.taken = 0
        """The bytes of all partitions, except those that have not moved for long."""
        self._shares: set[RoomShare] = set()
        self._turns: dict[asyncio.Future[None], tuple[RoomShare, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def share(self) -> RoomShare:
        """Return the share of a new partition."""
        share = RoomShare(self)
        self._shares.add(share)
        return share

    @property
    def is_waited_for(self) -> bool:
        """Return True while a partition waits for room."""
        return bool(self._turns)

    def fits(self, count: int) -> bool:
        """Return True if `count` more bytes fit."""
        return not self.taken or self.taken + count <= self._bytes_max

    def wait(self, share: RoomShare, count: int) -> asyncio.Future[None]:
        """Let `share` take `count` bytes when it is its turn, and return the future that is done
        then.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._turns[waiter] = share, count
        if self._timer is None:
            for each in self._shares:
                each.note()
            self._timer = loop.call_later(self._stall_s, self._look)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """End a wait that was cancelled."""
        self._turns.pop(waiter, None)
        self._serve()

    def free(self, count: int) -> None:
        """Note that `count` bytes are no longer taken."""
        self.taken -= count
        if self._turns:
            self._serve()

    def leave(self, share: RoomShare) -> None:
        """End the share of a partition."""
        self._shares.discard(share)

    def _serve(self) -> None:
        for waiter in list(self._turns):
            share, count = self._turns[waiter]
            if waiter.done():  # its task was cancelled, and has not run since
                del self._turns[waiter]
            elif self.fits(count):
                del self._turns[waiter]
                share.hold(count)
                waiter.set_result(None)
            else:
                return

    def _look(self) -> None:
        """Stop counting the bytes that each partition had at the last check, if it has freed none
        of them since.
        """
        self._timer = None
        for share in self._shares:
            self.taken -= share.look()
        self._serve()
        if self._turns:
            self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._look)


class _Taken:
    """The bytes that one partition takes, and frees in the same order."""

    __slots__ = ("_moved", "_noted", "_standing", "count")

    def __init__(self) -> None:
        self.count = 0
        self._standing = 0
        """The oldest bytes, which do not count in the room."""
        self._noted = 0
        """The number of bytes at the last check."""
        self._moved = False
        """True if some were freed since."""

    def free(self, count: int) -> int:
        """Free the oldest `count` bytes, at most all, and return how many of them count in the
        room.
        """
        count = min(count, self.count)
        self.count -= count
        self._moved = True
        if not self._standing:
            return count
        standing = min(count, self._standing)
        self._standing -= standing
        return count - standing

    def note(self) -> None:
        """Begin the time in which some must be freed."""
        self._noted = self.count
        self._moved = False

    def look(self) -> int:
        """Mark the bytes of the last check as standing, if none was freed since, and return how
        many counted until now.
        """
        stands = 0 if self._moved else self._noted - self._standing
        self._standing += stands
        self.note()
        return stands


class RoomShare:
    """The share of one partition in the room."""

    __slots__ = ("_message_bytes", "_room", "_under_way", "_unopened")

    def __init__(self, room: PullRoom) -> None:
        self._room = room
        self._unopened = _Taken()
        self._under_way = _Taken()
        """The bytes for the pull that is under way."""
        self._message_bytes = MESSAGE_BYTES

    def take_now(self, messages: int, bytes_max: int) -> bool:
        """
        Take room for a pull, and return False if it has to wait.

        Args:
            messages: the number of messages that the broker has ready.
            bytes_max: the most bytes of the pull.
        """
        count = self._size(messages, bytes_max)
        room = self._room
        if count and (room.is_waited_for or not room.fits(count)):
            return False
        self.hold(count)
        return True

    async def take(self, messages: int, bytes_max: int) -> None:
        """Wait for room for a pull; see `take_now`."""
        if self.take_now(messages, bytes_max):
            return
        waiter = self._room.wait(self, self._size(messages, bytes_max))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._room.forget(waiter)
            else:
                self.came()
            raise

    def _size(self, messages: int, bytes_max: int) -> int:
        return min(bytes_max, max(0, messages) * self._message_bytes)

    def hold(self, count: int) -> None:
        """Count `count` bytes as taken for the pull that is under way."""
        self._under_way.count += count
        self._room.taken += count

    def came(self, count: int = 0, messages: int = 0) -> None:
        """Note that the pull has brought `count` bytes, in `messages` messages, or has ended
        without any: its room is free.
        """
        if messages > 0 and count:
            self._message_bytes = -(-count // messages)
        taken = self._under_way
        if taken.count:
            self._room.free(taken.free(taken.count))

    def put(self, count: int) -> None:
        """Note that `count` bytes were pulled that are not opened."""
        self._unopened.count += count
        self._room.taken += count

    def opened(self, count: int) -> None:
        """Note that bytes were opened."""
        self._room.free(self._unopened.free(count))

    def note(self) -> None:
        """Begin the time in which something must move."""
        self._under_way.note()
        self._unopened.note()

    def look(self) -> int:
        """Mark as standing the bytes that did not move since the last check, and return how many
        counted in the room until now.
        """
        return self._under_way.look() + self._unopened.look()

    def leave(self) -> None:
        """End the share: its bytes are not opened here."""
        self.came()
        self.opened(self._unopened.count)
        self._room.leave(self)
