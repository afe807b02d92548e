"""Answers the copies of this broker's data folder: bytes of the durable log, from where each copy
ends.

    Follow(position) ─┬─ position > end, or other bytes before it ─▶ refused: the copy differs
                      ├─ position < first position ─▶ answered with where the log begins
                      ├─ position = end ─▶ waits for a commit, at most wait_ms
                      ╰─ bytes of one segment, at most bytes_max

A copy that is far behind reads like a job: clients that are served come first.

Invariants
    Only a copy that acks wait for gets what is not durable yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import crc32c

from ...protocol.address import parse_address
from ...protocol.clock import Clock
from ...protocol.copies import COPY_ID_CHARS_MAX
from ...protocol.errors import (
    ConfigError,
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
from ..storage.files import READ_BYTES
from .placement import NOWHERE, Site

if TYPE_CHECKING:
    from ..store.group_commit import RunBlocking
    from ..store.store import Store

FOLLOW_BYTES_MAX = 3 << 20
"""The largest number of bytes in an answer; a frame has at most 4 MiB."""
NEAR_BYTES = 4 << 20
"""A copy that is no further behind is answered before jobs."""
REMEMBERED_MAX = 64
"""The largest number of copies that are remembered, the last ones that have asked; one that is
forgotten counts again when it reconnects. It is also the largest number of followers of each.
"""
TAIL_BYTES_MAX = 2 << 30
"""The largest number of bytes that are compared: the largest commit has less."""
FORGET_MS = 60_000
"""After this time without a request a copy is forgotten."""


@dataclass(slots=True)
class KnownCopy:
    """What is known of a copy."""

    copy_id: str
    position: int = -1
    """The end of its durable log; -1 while it has none."""
    at_ms: int = 0
    """When it said so, by the boot clock."""
    whole_ms: int = 0
    """When it had the whole durable log last, or was heard first."""
    is_compared: bool = False
    """True if its log was compared with that of this opening, or began in it."""
    followers: list[str] = field(default_factory=list)
    """The names of its followers, the last one at the end."""
    takes_over: bool = False
    """True if its follower takes the broker's place if it may."""
    site: Site = NOWHERE
    """Where its last follower runs."""
    reads_at: str = ""
    """The address at which it answers reads; "" if it does not."""


class FollowService:
    """
    Answers `Follow`.

    Args:
        background_turn: waits until a job's read may begin, and returns how many bytes it may have.
        is_accepted: returns True if a metaserver has accepted this opening of the folder, and none
            has refused it since. A copy follows no other: it might lose what only it has.
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
        is_accepted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._broker_group = broker_group
        self._broker_id = broker_id
        self._opening = opening
        self._boot_ms = clock.boot_ms
        self._run_read = run_read
        self._background_turn = background_turn
        self._is_accepted = is_accepted
        self._copies: dict[str, KnownCopy] = {}
        """The last copies that have asked, by id; the last one is at the end."""
        self._waiters: dict[asyncio.Future[None], None] = {}
        """Those who wait for a commit, in order."""
        self._is_closed = False
        self.on_report: Callable[[str, int, Site], None] = lambda *_: None
        """Called with the id of a copy, the end of its log, if that is part of this log, and where
        the copy runs.
        """
        self.may_be_ahead: Callable[[str], bool] = lambda _copy_id: False
        """Returns True for a copy that gets a commit before it is durable, since acks wait for it.
        """
        self.knows_durable_end: Callable[[], bool] = lambda: True
        """Returns False while copies that acks wait for may lack some of the durable log."""
        self._offered_to = ""
        """The copy that may take this broker's place."""
        self.bytes_sent = 0
        """How many bytes of the log copies were sent."""
        self.taken_over = asyncio.Event()
        """Set once that copy has said that it has the place."""
        store.commit.copy_wait.on_write = self._wake
        store.commit.on_commit.append(self._wake)

    @property
    def standings(self) -> list[KnownCopy]:
        """The copies that follow, and have a log."""
        now_ms = self._boot_ms()
        return [
            each
            for each in self._copies.values()
            if each.position >= 0 and now_ms - each.at_ms < FORGET_MS
        ]

    def lag_bytes(self) -> dict[str, int]:
        """Return how many bytes of the log each copy lacks, with those of a commit that waits for
        copies.
        """
        end = self._store.log.written_end
        return {each.copy_id: max(0, end - each.position) for each in self.standings}

    def lag_ms(self) -> dict[str, int]:
        """Return for how many milliseconds each copy has lacked some of the durable log; 0 if it
        lacks nothing.
        """
        now_ms, end = self._boot_ms(), self._store.log.end
        return {
            each.copy_id: 0 if each.position >= end else now_ms - each.whole_ms
            for each in self.standings
        }

    def view(
        self, in_set: Collection[str], shared_machines: Mapping[str, str]
    ) -> dict[str, object]:
        """
        Return, for operators, how far each copy is behind, whether it is in the set, and its place.

        Args:
            shared_machines: by copy, what is to be said of its machine.
        """
        return {
            copy_id: {
                "bytes_behind": lag,
                "in_set": copy_id in in_set,
                **self._copies[copy_id].site._asdict(),
                "shared_machine": shared_machines.get(copy_id, ""),
                "reads_at": self._copies[copy_id].reads_at,
            }
            for copy_id, lag in sorted(self.lag_bytes().items())
        }

    async def follow(self, request: Follow, _payload: memoryview) -> Handled:
        """
        Answer a copy.

        Raises:
            WrongBrokerError: it follows another broker group, or this broker is not the group's.
            InvalidRequestError
            FolderRefusedError: its log is not the beginning of this broker's, or a later follower
                has a folder with the same id.
        """
        log = self._store.log
        self._check(request)
        copy = self._remember(request.copy_id)
        self._check_follower(copy, request.follower)
        copy.takes_over = request.takes_over
        copy.site, copy.reads_at = Site(request.machine, request.zone), request.reads_at
        position = request.position
        if request.has_taken_over:
            if request.copy_id == self._offered_to:
                self.taken_over.set()
            return self._answer(position), b""
        if 0 <= request.tail_start < log.first_position < position:
            return self._answer(log.first_position), b""  # what is to be compared was removed
        if request.tail_start >= 0 and position > log.first_position:
            await self._compare(request)
        if position < 0 or (request.tail_start >= 0 and position >= log.first_position):
            copy.is_compared = True
        if position >= 0:
            self._note(copy, position - request.unsynced_bytes)
        is_told_at_once = self._is_closed or request.copy_id == self._offered_to
        if position >= self._end_for(request) and request.wait_ms and not is_told_at_once:
            await self._wait(request.wait_ms)
        if position < log.first_position:
            return self._answer(log.first_position), b""
        end = self._end_for(request)
        segment, upto = log.segment_of(position, end)
        length = max(0, min(upto - position, request.bytes_max, FOLLOW_BYTES_MAX))
        if end - position > NEAR_BYTES and not self.may_be_ahead(request.copy_id):
            length = await self._background_turn(length)
        data = b""
        if length:
            await reserve_bytes(length)
            unsynced = log.read_unsynced(position, length)
            data = await self._read(position, length) if unsynced is None else unsynced
        if position < log.first_position:  # retention was quicker
            return self._answer(log.first_position), b""
        self.bytes_sent += len(data)
        is_offered = request.copy_id == self._offered_to and position == end
        return self._answer(position, segment, is_offered=is_offered), data

    def offer_place(self, copy_id: str) -> None:
        """Tell a copy that it may take this broker's place once it has the whole log; "": none may
        any more.
        """
        self._offered_to = copy_id
        self.taken_over.clear()
        self._wake()

    def known(self, copy_id: str) -> KnownCopy | None:
        """Return what is known of a copy; None if it has not followed lately."""
        return next((each for each in self.standings if each.copy_id == copy_id), None)

    def _end_for(self, request: Follow) -> int:
        """Return the end of what a copy may have."""
        log = self._store.log
        return log.written_end if self.may_be_ahead(request.copy_id) else log.end

    def _check(self, request: Follow) -> None:
        if not self._is_accepted():
            raise WrongBrokerError(
                f"no metaserver has accepted this broker of group {self._broker_group}"
            )
        check_name("copy", request.copy_id)
        if len(request.copy_id) > COPY_ID_CHARS_MAX:
            raise InvalidRequestError(
                f"the id of a copy has at most {COPY_ID_CHARS_MAX} characters"
            )
        for kind, name in (("machine", request.machine), ("zone", request.zone)):
            if name:
                check_name(kind, name)
        if request.reads_at:
            try:
                parse_address(request.reads_at)
            except ConfigError as error:
                raise InvalidRequestError(error.message) from None
        if request.broker_group != self._broker_group:
            raise WrongBrokerError(
                f"this broker serves group {self._broker_group}, not {request.broker_group}"
            )
        if not 0 <= request.unsynced_bytes <= max(0, request.position):
            raise InvalidRequestError(
                f"{request.unsynced_bytes} bytes before position {request.position} cannot be "
                "unsynced"
            )
        if request.bytes_max < 1 or not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(
                f"cannot send {request.bytes_max} bytes, nor wait {request.wait_ms} ms"
            )
        tail_bytes = request.position - request.tail_start
        if request.tail_start >= 0 and not 0 <= tail_bytes <= TAIL_BYTES_MAX:
            raise InvalidRequestError(f"cannot compare {tail_bytes} bytes")
        if request.position > self._store.log.written_end:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"the copy has the log up to position {request.position}, and this broker only "
                f"up to {self._store.log.written_end}",
                broker_group=self._broker_group,
                log_end=request.position,
                known_log_end=self._store.log.written_end,
            )

    def _remember(self, copy_id: str) -> KnownCopy:
        """Return what is known of a copy, which is the last one that has asked now."""
        copy = self._copies.pop(copy_id, None) or KnownCopy(copy_id, whole_ms=self._boot_ms())
        self._copies[copy_id] = copy
        if len(self._copies) > REMEMBERED_MAX:
            del self._copies[next(iter(self._copies))]
        return copy

    def _check_follower(self, copy: KnownCopy, name: str) -> None:
        """Raise FolderRefusedError if a later follower has a folder with the same id: two folders
        must not count as one.
        """
        if name not in copy.followers:
            copy.followers = [*copy.followers[1 - REMEMBERED_MAX :], name]
        if name != copy.followers[-1]:
            raise FolderRefusedError(
                Reason.COPY_TAKEN,
                f"another follower has a folder with the id {copy.copy_id}",
                broker_group=self._broker_group,
            )

    def _note(self, copy: KnownCopy, position: int) -> None:
        copy.position, copy.at_ms = position, self._boot_ms()
        if position >= self._store.log.end:
            copy.whole_ms = copy.at_ms
        if copy.is_compared:
            self.on_report(copy.copy_id, position, copy.site)

    async def _compare(self, request: Follow) -> None:
        """
        Raise FolderRefusedError if a copy has other bytes before its end.

        Raises:
            CorruptLogError: they cannot be read here, or were removed meanwhile.
        """
        log, position, crc = self._store.log, request.tail_start, 0
        while position < request.position:
            _, end = log.segment_of(position, request.position)
            length = min(end, position + READ_BYTES) - position
            crc = crc32c.crc32c(await self._run_read(log.read, position, length), crc)
            position += length
        if crc != request.tail_crc:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"the copy has other bytes than this broker before position {request.position}",
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

    def _answer(
        self, position: int, segment: int | None = None, *, is_offered: bool = False
    ) -> Followed:
        log = self._store.log
        return Followed(
            self._broker_id,
            self._opening,
            log.end,
            log.first_position,
            position if segment is None else segment,
            position,
            is_offered,
            self.knows_durable_end(),
        )

    async def _wait(self, wait_ms: int) -> None:
        """Wait for the next commit, at most `wait_ms`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await asyncio.wait((waiter,), timeout=wait_ms / 1000)
        finally:
            self._waiters.pop(waiter, None)

    def close(self) -> None:
        """Answer the copies that wait, and let none wait any more."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
