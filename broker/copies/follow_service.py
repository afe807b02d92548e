"""Answers the copies of this broker's data folder: bytes of the durable log, from where each copy
ends.

    Follow(position) ─┬─ position > end, or other bytes before it ─▶ refused: the copy differs
                      ├─ position < first position ─▶ told where the log begins
                      ├─ position = end ─▶ waits for a commit, at most wait_ms
                      ╰─ bytes of one segment, at most bytes_max

Acks of producers do not wait for copies. A copy that is far behind reads like a job: clients that
are served come first.

Invariants
    Nothing above the durable end is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crc32c

from ...protocol.clock import Clock
from ...protocol.errors import (
    CorruptLogError,
    FolderRefusedError,
    InvalidRequestError,
    Reason,
    WrongBrokerError,
)
from ...protocol.frames import Follow, Followed
from ...protocol.ids import check_name
from ...protocol.limits import PULL_WAIT_MS_MAX
from ...rpc.answer_budget import reserve_bytes
from ...rpc.plane.prompt import Handled
from .copied_log import tail_start

if TYPE_CHECKING:
    from ..store.group_commit import RunBlocking
    from ..store.store import Store

FOLLOW_BYTES_MAX = 3 << 20
"""The largest number of bytes in an answer; a frame has at most 4 MiB."""
NEAR_BYTES = 4 << 20
"""A copy that is no further behind is answered before jobs."""
COPIES_MAX = 16
"""The largest number of copies that are remembered."""
FORGET_MS = 60_000
"""After this time without a request a copy is forgotten."""


@dataclass(frozen=True, slots=True)
class CopyStanding:
    """How far a copy has come."""

    copy_id: str
    position: int
    """The end of its durable log."""
    at_ms: int
    """When it said so, by the boot clock."""


class FollowService:
    """
    Answers `Follow`.

    Args:
        background_turn: waits until a job's read may begin, and returns how many bytes it may have.
    """

    def __init__(
        self,
        store: Store,
        *,
        broker_group: str,
        broker_id: str,
        opening: str,
        clock: Clock,
        run_read: RunBlocking,
        background_turn: Callable[[int], Awaitable[int]],
    ) -> None:
        self._store = store
        self._broker_group = broker_group
        self._broker_id = broker_id
        self._opening = opening
        self._boot_ms = clock.boot_ms
        self._run_read = run_read
        self._background_turn = background_turn
        self._standings: dict[str, CopyStanding] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_closed = False
        store.commit.on_commit.append(self._wake)

    @property
    def standings(self) -> list[CopyStanding]:
        """The copies that follow."""
        now_ms = self._boot_ms()
        return [each for each in self._standings.values() if now_ms - each.at_ms < FORGET_MS]

    def lag_bytes(self) -> dict[str, int]:
        """Return how many bytes of the log each copy lacks."""
        end = self._store.log.end
        return {each.copy_id: end - each.position for each in self.standings}

    def view(self) -> dict[str, object]:
        """Return, for operators, how far each copy is behind."""
        return {copy_id: f"{lag} bytes behind" for copy_id, lag in self.lag_bytes().items()}

    async def follow(self, request: Follow, _payload: memoryview) -> Handled:
        """
        Answer a copy.

        Raises:
            WrongBrokerError: it follows another broker group.
            InvalidRequestError
            FolderRefusedError: its log is not the beginning of this broker's.
        """
        log = self._store.log
        self._check(request)
        position = request.position
        if position >= 0:
            self._note(request)
        if request.tail_crc >= 0 and log.first_position < position <= log.end:
            await self._compare(position, request.tail_crc)
        if position == log.end and request.wait_ms and not self._is_closed:
            await self._wait(request.wait_ms)
        if position < log.first_position:
            return self._answer(log.first_position), b""
        segment = self._segment_of(position)
        length = min(log.segment_end(position), log.end) - position
        length = min(length, request.bytes_max, FOLLOW_BYTES_MAX)
        if log.end - position > NEAR_BYTES:
            length = await self._background_turn(length)
        data = b""
        if length:
            await reserve_bytes(length)
            data = await self._read(position, length)
        if position < log.first_position:  # retention was quicker
            return self._answer(log.first_position), b""
        return self._answer(position, segment), data

    def _check(self, request: Follow) -> None:
        check_name("copy", request.copy_id)
        if request.broker_group != self._broker_group:
            raise WrongBrokerError(
                f"this broker serves group {self._broker_group}, not {request.broker_group}"
            )
        if request.bytes_max < 1 or not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(
                f"cannot send {request.bytes_max} bytes, nor wait {request.wait_ms} ms"
            )
        if request.position > self._store.log.end:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"the copy has the log up to position {request.position}, and this broker only "
                f"up to {self._store.log.end}",
                broker_group=self._broker_group,
                log_end=request.position,
                known_log_end=self._store.log.end,
            )

    def _note(self, request: Follow) -> None:
        self._standings.pop(request.copy_id, None)
        self._standings[request.copy_id] = CopyStanding(
            request.copy_id, request.position, self._boot_ms()
        )
        if len(self._standings) > COPIES_MAX:
            del self._standings[next(iter(self._standings))]

    async def _compare(self, position: int, tail_crc: int) -> None:
        """Raise FolderRefusedError if a copy has other bytes before its end."""
        start = tail_start(self._segment_of(position - 1), position)
        data = await self._read(start, position - start)
        if data and crc32c.crc32c(data) != tail_crc:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"the copy has other bytes than this broker before position {position}",
                broker_group=self._broker_group,
            )

    async def _read(self, position: int, length: int) -> bytes:
        """Read bytes of the log; none if retention has removed them meanwhile."""
        log = self._store.log
        try:
            data: bytes = await self._run_read(log.read, position, length)
        except CorruptLogError:
            if position < log.first_position:
                return b""
            raise
        return data

    def _segment_of(self, position: int) -> int:
        """Return where the segment begins to which the byte at `position` belongs."""
        return max(base for base in self._store.log.bases if base <= position)

    def _answer(self, position: int, segment: int | None = None) -> Followed:
        log = self._store.log
        return Followed(
            self._broker_id,
            self._opening,
            log.end,
            log.first_position,
            position if segment is None else segment,
            position,
        )

    async def _wait(self, wait_ms: int) -> None:
        """Wait for the next commit, at most `wait_ms`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=wait_ms / 1000)
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Answer the copies that wait, and let none wait any more."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
